"""`profile`: what the layers of a model cost on the device at hand, measured."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.layers import require_costs_file, tell
from zeropipe.cli.run import Seconds
from zeropipe.errors import ConfigError, short

if TYPE_CHECKING:
    from zeropipe.core.model.probe import Profile
    from zeropipe.core.timeline import Timeline
    from zeropipe.profiling.spec import ProfileJob
    from zeropipe.sim.layer_costs import LayerCosts


@click.command(short_help="What a model's layers cost here, measured.")
@click.argument("model")
@click.option("--ranks", "-p", type=click.IntRange(1), help="Local processes that measure at once; 1 by default.")
@click.option("--sequence", type=click.IntRange(2), default=128, show_default=True, help="Tokens per sequence.")
@click.option("--microbatch-size", type=opt.Counts(True), default="1", show_default=True, help="Sequences; or several.")
@click.option("--num-layers", type=click.IntRange(1), help="Layers of tiny-qwen3 or tiny-llama, if not their own 8.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float64"]), default="float32", show_default=True)
@click.option("--compile/--no-compile", default=False, show_default=True, help="Compile each block (torch.compile).")
@click.option(
    "--ac", default="none", show_default=True, help="Activation checkpointing, as in `run`; or several: none,full."
)
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True, help="Recorded steps, after a warm-up.")
@click.option(
    "--fit", "fit_files", metavar="FILE", multiple=True,
    help="A timeline (run --timeline) that corrects the costs; of several of one schedule the medians do.",
)  # fmt: skip
@click.option("--layers", help="Layers of each stage of that run, like 2,3,3,2, where it does not tell; else even.")
@click.option(
    "--timeout", type=Seconds(0, min_open=True), default=600.0, show_default=True,
    help="Seconds until a silent process is stopped.",
)  # fmt: skip
@click.option("-o", "--output", "out", help="costs.json, for plan, simulate, compare, search and trace compare.")
@opt.json_option
def profile(
    model: str, out: str | None, as_json: bool, fit_files: tuple[str, ...], layers: str | None, **given: Any
) -> None:
    """Measure what the layers of MODEL cost: F, I, W, B, both together, memory, and messages between ranks.

    MODEL is a directory with config.json, a config file, a name (`zeropipe estimate --known`, tiny-qwen3, tiny-llama),
    or a costs file that --fit corrects. One layer of each kind is built, with random weights: so a large model needs
    little memory.

    \b
    zeropipe profile qwen3-8b --device cuda --dtype bfloat16 -o costs.json
    zeropipe profile tiny-qwen3 --ranks 4 -o costs.json
    zeropipe profile costs.json --fit measured.json -o better.json
    torchrun --nproc-per-node 8 -m zeropipe profile qwen3-8b --device cuda
    """
    require_costs_file(out)
    if layers and not fit_files:
        raise ConfigError(f"--layers {layers} are of the run that --fit names: give both, or none")
    is_first = os.environ.get("RANK", "0") == "0"
    steps = _recorded(fit_files) if is_first else []  # before anything is measured, which may take long
    found = _costs(model, bool(fit_files), given)
    if found is None:  # a rank of torchrun's that is not the first
        return
    if steps:
        found = _corrected(found, steps, fit_files, layers, given)
    tell(found, _links(found), out, as_json)


def _costs(model: str, corrected: bool, given: dict[str, Any]) -> LayerCosts | None:
    """Measured, or read from a file that is to be corrected."""
    from zeropipe.core.files import read_text
    from zeropipe.core.formats.parse import parse_json
    from zeropipe.core.limits import COMMAND_LINE
    from zeropipe.sim.layer_file import from_layer_data, is_layer_data
    from zeropipe.sim.profiled import layer_costs

    data = None
    if Path(model).is_file():
        try:
            data = parse_json(read_text(model, COMMAND_LINE, "the model's config"))
        except ValueError as error:
            raise error if isinstance(error, ConfigError) else ConfigError(f"{model} is not JSON: {error}") from None
    if is_layer_data(data):
        if not corrected:
            raise ConfigError(f"{model} holds costs already: give --fit measured.json to correct them, or a model")
        for name in given:
            if opt.is_told(name) and name not in ("ac", "microbatch_size"):
                raise ConfigError(f"--{name.replace('_', '-')}: the costs in {model} say that already; leave it out")
        return from_layer_data(data, model)
    measured = _measured(_job(model, data, given), given)
    return None if measured is None else layer_costs(replace(measured, machine=_with_sheet(measured)))


def _with_sheet(measured: Profile) -> dict[str, object]:
    """The machine, with what the data sheet of its GPU says, where it is known: plans use it for MFU and optimizers."""
    from zeropipe.estimating.gpus import GPUS

    words = str(measured.machine.get("gpu", "")).lower().replace("_", " ").split()
    gpu = next((GPUS[word] for word in words if word in GPUS), None)
    if gpu is None:
        return measured.machine
    dtype = "float32" if measured.bytes_per_number == 4 else "bf16"
    return {**measured.machine, "peak_flops": gpu.peak_of(dtype), "bandwidth": gpu.bandwidth}


def _job(model: str, data: Any, given: dict[str, Any]) -> ProfileJob:
    from zeropipe.core.model.configs import BUILT_IN, CONFIGS
    from zeropipe.engine.run.spec import Job, built_in
    from zeropipe.profiling.spec import ProfileJob, settings_of

    source: str | Mapping[str, Any]
    tiny = model in BUILT_IN and model.startswith("tiny")
    if given["num_layers"] and not tiny:
        raise ConfigError(f"--num-layers {given['num_layers']}: {short(model)} has its own; only tiny models are cut")
    if data is not None:
        if not isinstance(data, Mapping) or not isinstance(data.get("model_type"), str):
            raise ConfigError(f"{model} is not a model's configuration: save one with save_pretrained")
        name, source = Path(model).stem, data
    elif Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            raise ConfigError(f"{model} has no config.json: give a model's directory")
        name, source = Path(model).resolve().name, str(Path(model))
    elif tiny:
        name, source = model, built_in(Job(model=model, num_layers=given["num_layers"], sequence=given["sequence"]))
    elif model.lower() in CONFIGS:
        name, source = model.lower(), CONFIGS[model.lower()]
    else:
        known = ", ".join(["tiny-qwen3", "tiny-llama", *CONFIGS])
        raise ConfigError(f"model {short(model)}: give a directory with config.json, a config file, or one of {known}")
    settings = settings_of(tuple(given["ac"].split(",")), given["microbatch_size"], (given["compile"],))
    return ProfileJob(name, source, settings, given["sequence"], given["device"], given["dtype"], given["steps"])


def _measured(job: ProfileJob, given: dict[str, Any]) -> Profile | None:
    """On local processes, or on those of torchrun."""
    from zeropipe.engine import require_torch
    from zeropipe.engine.run.spec import require_cores

    local = os.environ.get("WORLD_SIZE") is None
    if not local and given["ranks"]:
        raise ConfigError(f"--ranks {given['ranks']}: torchrun has started the processes already; leave it out")
    ranks = given["ranks"] or 1
    if local:
        require_cores(ranks)
    require_torch()
    from zeropipe.engine.run.job import backend_of, check_device
    from zeropipe.engine.run.launch import LocalRanks, model_code
    from zeropipe.engine.run.slow import tell_slow
    from zeropipe.engine.run.spec import Job
    from zeropipe.profiling.measure import profile as measure
    from zeropipe.profiling.measure import profile_under_torchrun

    as_run = Job(device=job.device)
    check_device(as_run)
    if not local:
        return profile_under_torchrun(job)
    tell_slow(job.dtype, job.device)
    with LocalRanks(ranks, backend=backend_of(as_run, ranks), preload=model_code(job.device)) as started:
        first: Profile = started.run(measure, job, timeout=given["timeout"])[0]
        return first


def _recorded(paths: tuple[str, ...]) -> list[Timeline]:
    """The steps that correct the costs."""
    from zeropipe.cli.trace import timeline_of
    from zeropipe.sim.refit import require_steps

    steps = [timeline_of((path,)) for path in paths]
    try:
        require_steps(steps)
    except ConfigError as error:
        raise ConfigError(f"{', '.join(paths)}: {error}") from None
    return steps


def _corrected(
    costs: LayerCosts, steps: list[Timeline], paths: tuple[str, ...], layers: str | None, given: dict[str, Any]
) -> LayerCosts:
    """Corrected by the steps of a run; of one that does not tell how it ran, as the first mode and size given."""
    from zeropipe.cli.cut import as_run
    from zeropipe.sim.refit import refitted

    modes = given["ac"].split(",") if opt.is_told("ac") else ()
    sizes = given["microbatch_size"] if opt.is_told("microbatch_size") else ()
    try:
        ran = as_run(costs, steps[0].schedule, steps[0].origin, layers, modes, sizes)
        return refitted(costs, steps, ran.counts, ran.setting, ran.ac)
    except ConfigError as error:
        raise ConfigError(f"{', '.join(paths)}: {error}") from None


def _links(costs: LayerCosts) -> str:
    """What messages take, in one line."""
    parts = []
    for name, link in (("within a machine", costs.link), ("between machines", costs.inter_node)):
        if link.p2p is not None:
            speed = f", {link.bandwidth / 1e9:.3g} GB/s" if link.bandwidth else ""
            parts.append(f"messages {name}: {output.time_text(link.p2p, 's')}{speed}")
    if parts and costs.sending + costs.receiving > 0:
        own = [output.time_text(time, "s") for time in (costs.sending, costs.receiving)]
        parts.append(f"each takes {own[0]} of its sender's own time and {own[1]} of its receiver's")
    return "; ".join(parts) or "messages were not measured: that takes --ranks 2 or more"
