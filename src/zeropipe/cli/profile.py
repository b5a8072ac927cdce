"""`profile`: the costs of a model's layers, measured on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.command import is_set
from zeropipe.cli.layer_table import print_costs, require_costs_file
from zeropipe.cli.options import option
from zeropipe.errors import ConfigError, short

if TYPE_CHECKING:
    from zeropipe.core.model.probe import Profile
    from zeropipe.core.timeline import Timeline
    from zeropipe.profiling.spec import ProfileJob
    from zeropipe.sim.layer_costs import LayerCosts


DEFAULT_SEQUENCE, DEFAULT_DTYPE, DEFAULT_STEPS = 128, "float32", 5
_RECORD_PHASES = (
    "record a step with `zeropipe run SCHEDULE --mesh pp=P,dp_shard=N,ep=N --timeline FILE`, whose measured phases are "
    "costs (--costs FILE)"
)


@opt.command(short_help="Costs of a model's layers, measured on this machine.")
@click.argument("model")
@opt.ranks
@opt.sequence
@opt.sample
@opt.microbatch
@opt.num_layers
@opt.device
@opt.dtype
@opt.compile
@opt.ac
@opt.ep
@opt.steps
@option(
    "--fit", "fit_files", metavar="FILE", multiple=True,
    help="Recorded timeline (run --timeline) that corrects the costs; of several of one schedule, the medians do.",
)  # fmt: skip
@opt.layers
@opt.timeout
@opt.output()
@opt.json
def profile(
    model: str, out: str | None, as_json: bool, fit_files: tuple[str, ...], layers: str | None, **values: Any
) -> None:
    """Measure the costs of the layers of MODEL: F, I, W, B, F and B together, memory, and messages between ranks.

    MODEL is a directory with config.json, a config file, a name (`zeropipe estimate --known`, tiny-qwen3, tiny-llama),
    or a costs file that --fit corrects. One layer of each kind is built, with random weights, so a large model needs
    little memory. One rank measures by default; messages need two or more. --layers are those of the run of --fit, if
    its recording does not name them.

    \b
    zeropipe profile qwen3-8b --dtype bfloat16 -o costs.json
    zeropipe profile tiny-qwen3 --ranks 4 -o costs.json
    zeropipe profile costs.json --fit measured.json -o better.json
    torchrun --nproc-per-node 8 -m zeropipe profile qwen3-8b --device cuda

    -o writes a .json file for plan, simulate, compare, search and trace compare.
    """
    require_costs_file(out)
    if layers and not fit_files:
        raise ConfigError(
            f"--layers {layers}: the layers of the run that --fit names; pass --fit FILE, or leave it out"
        )
    if values["ep"] not in (None, (1,)):
        size = ",".join(map(str, values["ep"]))
        raise ConfigError(f"--ep {size}: a profile measures experts that are not divided; {_RECORD_PHASES}")
    is_first = os.environ.get("RANK", "0") == "0"
    steps = _read_steps(fit_files) if is_first else []  # before measuring, which may take long
    found = _find_costs(model, bool(fit_files), values)
    if found is None:  # a rank of torchrun that is not the first
        return
    if steps:
        found = _correct(found, steps, fit_files, layers, values)
    print_costs(found, _describe_messages(found), out, as_json)


def _find_costs(model: str, is_corrected: bool, values: dict[str, Any]) -> LayerCosts | None:
    """Measure costs, or read them from a file that is to be corrected."""
    from zeropipe.core.files import read_text
    from zeropipe.core.formats.parse import parse_json
    from zeropipe.core.limits import COMMAND_LINE
    from zeropipe.sim.layer_file import from_layer_data, is_layer_data
    from zeropipe.sim.profile_costs import costs_from_profile

    data = None
    if Path(model).is_file():
        try:
            data = parse_json(read_text(model, COMMAND_LINE, "the model's config"))
        except ValueError as error:
            raise error if isinstance(error, ConfigError) else ConfigError(f"{model} is not JSON: {error}") from None
    if is_layer_data(data):
        if not is_corrected:
            raise ConfigError(f"{model} holds costs already: pass --fit measured.json to correct them, or a model")
        for name in values:
            if is_set(name) and name not in ("ac", "microbatch"):
                raise ConfigError(f"{opt.flag_of(name)}: set by the costs in {model}; leave it out")
        return from_layer_data(data, model)
    measured = _measure(_create_job(model, data, values), values)
    return None if measured is None else costs_from_profile(replace(measured, machine=_add_data_sheet(measured)))


def _add_data_sheet(measured: Profile) -> dict[str, object]:
    """The machine with the data sheet of its GPU, if that is known: plans use it for MFU and optimizers."""
    from zeropipe.estimating.gpus import GPUS

    words = str(measured.machine.get("gpu", "")).lower().replace("_", " ").split()
    gpu = next((GPUS[word] for word in words if word in GPUS), None)
    if gpu is None:
        return measured.machine
    dtype = "float32" if measured.bytes_per_number == 4 else "bf16"
    return {**measured.machine, "peak_flops": gpu.peak_of(dtype), "bandwidth": gpu.bandwidth}


def _create_job(model: str, data: Any, values: dict[str, Any]) -> ProfileJob:
    from zeropipe.core.model.configs import BUILT_IN, CONFIGS, suggest_model
    from zeropipe.engine.run.spec import Job, built_in_config
    from zeropipe.profiling.spec import ProfileJob, list_settings

    source: str | Mapping[str, Any]
    num_layers, sequence = values["num_layers"], values["sequence"] or DEFAULT_SEQUENCE
    is_tiny = model in BUILT_IN and model.startswith("tiny")
    if num_layers and not is_tiny:
        raise ConfigError(f"--num-layers {num_layers}: only for tiny models; {short(model)} has its own")
    if data is not None:
        if not isinstance(data, Mapping) or not isinstance(data.get("model_type"), str):
            raise ConfigError(f"{model} is not a model's configuration: use a config.json of save_pretrained")
        name, source = Path(model).stem, data
    elif Path(model).is_dir():
        if not (Path(model) / "config.json").is_file():
            raise ConfigError(f"{model} has no config.json: use a model directory")
        name, source = Path(model).resolve().name, str(Path(model))
    elif is_tiny:
        name, source = model, built_in_config(Job(model=model, num_layers=num_layers, sequence=sequence))
    elif model.lower() in CONFIGS:
        name, source = model.lower(), CONFIGS[model.lower()]
    else:
        raise ConfigError(
            f"model {short(model)}: must be a directory with config.json, a config file or a built-in model; "
            f"{suggest_model(model)}"
        )
    modes = tuple((values["ac"] or "none").split(","))
    dtype = opt.require_run_dtype(values["dtype"] or DEFAULT_DTYPE)
    compiles = _compiles_by_default(values["device"], dtype) if values["compile"] == "auto" else bool(values["compile"])
    settings = list_settings(modes, values["microbatch"] or (1,), (compiles,))
    sample = values["sample"]
    if sample is not None and sequence % sample:
        raise ConfigError(f"--sample {sample}: must divide --sequence {sequence}")
    return ProfileJob(
        name, source, settings, sequence, values["device"], dtype, values["steps"] or DEFAULT_STEPS, sample=sample
    )


def _compiles_by_default(device: str, dtype: str) -> bool:
    """Whether blocks are compiled if nothing else is said; only a GPU that may be there needs torch."""
    from zeropipe.engine import require_torch
    from zeropipe.engine.run.spec import compiles_by_default

    if not compiles_by_default("cuda" if device == "auto" else device, dtype):
        return False
    require_torch()
    from zeropipe.engine.run.job import resolve_device

    return compiles_by_default(resolve_device(device), dtype)


def _measure(job: ProfileJob, values: dict[str, Any]) -> Profile | None:
    """Measure on local processes, or on those of torchrun."""
    from zeropipe.engine import require_torch
    from zeropipe.engine.run.spec import require_cores

    is_local = os.environ.get("WORLD_SIZE") is None
    ranks = opt.require_single("ranks", values["ranks"], "compare and plan take")
    if not is_local and ranks:
        raise ConfigError(f"--ranks {ranks}: torchrun has started the processes already; leave it out")
    ranks = ranks or 1
    if is_local:
        require_cores(ranks)
    require_torch()
    from zeropipe.engine.run.job import choose_backend, resolve_device
    from zeropipe.engine.run.launch import LocalRanks, model_modules
    from zeropipe.engine.run.slow_dtypes import warn_if_slow
    from zeropipe.engine.run.spec import Job
    from zeropipe.profiling.measure import profile as measure
    from zeropipe.profiling.measure import profile_under_torchrun

    job = replace(job, device=resolve_device(job.device))
    if not is_local:
        return profile_under_torchrun(job)
    warn_if_slow(job.dtype, job.device)
    with LocalRanks(
        ranks, backend=choose_backend(Job(device=job.device), ranks), preload=model_modules(job.device)
    ) as started:
        first: Profile = started.run(measure, job, timeout=values["timeout"])[0]
        return first


def _read_steps(paths: tuple[str, ...]) -> list[Timeline]:
    """Read the recorded steps that correct the costs."""
    from zeropipe.cli.trace import read_timeline
    from zeropipe.sim.refit import require_same_run

    steps = [read_timeline((path,)) for path in paths]
    try:
        require_same_run(steps)
    except ConfigError as error:
        raise ConfigError(f"{', '.join(paths)}: {error}") from None
    return steps


def _correct(
    costs: LayerCosts, steps: list[Timeline], paths: tuple[str, ...], layers: str | None, values: dict[str, Any]
) -> LayerCosts:
    """Correct costs by recorded steps; the first --ac and --microbatch are those of a recording that names none."""
    from zeropipe.cli.layer_options import find_recorded_setting
    from zeropipe.sim.refit import refit

    modes = values["ac"].split(",") if values["ac"] else ()
    try:
        recorded = find_recorded_setting(
            costs, steps[0].schedule, steps[0].origin, layers, modes, values["microbatch"] or ()
        )  # fmt: skip
        return refit(costs, steps, recorded.counts, recorded.setting, recorded.ac)
    except ConfigError as error:
        raise ConfigError(f"{', '.join(paths)}: {error}") from None


def _describe_messages(costs: LayerCosts) -> str:
    """Latency and bandwidth of messages, and what was not measured, in one line."""
    parts = []
    if costs.link.p2p is None and costs.inter_node.p2p is None:
        parts.append("messages were not measured: pass --ranks 2 or more")
    for name, link in (("within a machine", costs.link), ("between machines", costs.inter_node)):
        if link.p2p is not None:
            speed = f", {link.bandwidth / 1e9:.3g} GB/s" if link.bandwidth else ""
            parts.append(f"messages {name}: {output.time_text(link.p2p, 's')}{speed}")
    if costs.sending + costs.receiving > 0:
        times = [output.time_text(time, "s") for time in (costs.sending, costs.receiving)]
        parts.append(f"each occupies its sender for {times[0]} and its receiver for {times[1]}")
    if any(kind.startswith("experts") for kind in costs.layers):
        parts.append(f"experts were not divided: for phases with ep, {_RECORD_PHASES}")
    return "; ".join(parts)
