"""`run`: a schedule for real, and what was measured beside what was predicted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli import run_text as text
from zeropipe.core.mesh import Mesh, format_mesh, num_processes, parse_mesh
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError, short

if TYPE_CHECKING:
    from zeropipe.cli.request import Request
    from zeropipe.core.schedule import Schedule
    from zeropipe.engine.run.job import Outcome
    from zeropipe.engine.run.spec import Job


class Seconds(click.FloatRange):
    """A number in a range, and a number: nan and inf lie in every range otherwise."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


@click.command(short_help="For real, on local processes or under torchrun.")
@click.argument("schedules", nargs=-1, required=True)
@opt.size_options
@click.option(
    "--model",
    default="tiny-qwen3",
    show_default=True,
    help="A model directory, or built in with random weights: tiny-qwen3, tiny-llama, qwen3-0.6b, qwen3-8b, llama-8b.",
)
@click.option("--num-layers", type=click.IntRange(1), help="Layers of a built-in model, if not its own number.")
@click.option("--vocabulary", type=click.IntRange(2), help="Vocabulary of a built-in model, if not its own.")
@click.option(
    "--layers",
    help="Layers of each stage, like 2,3,3,2; spread evenly by default. A tiny model has as many as they add up to.",
)
@click.option("--layers-per-stage", type=click.IntRange(1), help="Choose the stages per rank to get these layers.")
@click.option("--first-less", type=click.IntRange(0), default=0, help="Layers the first stage has less: it embeds.")
@click.option("--last-less", type=click.IntRange(0), default=0, help="Layers the last stage has less: it has the head.")
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Recorded steps, after a warm-up.")
@click.option("--sequence", type=click.IntRange(2), default=128, show_default=True, help="Tokens per sequence.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences per microbatch.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float64"]), default="float32", show_default=True)
@click.option("--compile", is_flag=True, help="Compile each transformer block (torch.compile).")
@click.option(
    "--ac",
    default="none",
    show_default=True,
    help="Activation checkpointing: none, full, selective:N, selective:op, memory_budget:X.",
)
@click.option(
    "--split",
    type=click.Choice(["store", "autograd", "whole"]),
    default="store",
    show_default=True,
    help="How I and W share the backward; autograd is torch's way.",
)
@click.option("--dynamic-weights", is_flag=True, help="A rank that would wait for a message runs Ws that it owes.")
@click.option(
    "--mesh",
    help="Processes by dimension, pp=2,dp_shard=2: any of pp, dp_replicate, dp_shard, tp. Schedules have pp ranks.",
)
@click.option("--prove", is_flag=True, help="Hold a step's gradients against the model in one process.")
@click.option("--report", help="Write a page with the measured and the simulated timeline: report.html.")
@click.option("--timeline", "timeline_file", help="Write the measured timeline: x.json.")
@click.option("--dry-run", is_flag=True, help="Print layers, placement and messages; start nothing.")
@click.option(
    "--timeout",
    type=Seconds(0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds until a silent run is stopped.",
)
@opt.json_option
def run(
    schedules: tuple[str, ...],
    report: str | None,
    timeline_file: str | None,
    dry_run: bool,
    timeout: float,
    as_json: bool,
    ranks: tuple[int, ...],
    microbatches: tuple[int, ...],
    stages_per_rank: tuple[int, ...],
    pairs: tuple[str, ...],
    **wishes: Any,
) -> None:
    """Run schedules for real on a model with synthetic tokens, and hold the run against the simulation.

    \b
    zeropipe run zbv 1f1b --ranks 4 --microbatches 8 --report report.html
    zeropipe run job.toml --timeline measured.json
    torchrun --nproc-per-node 4 -m zeropipe run zbv --microbatches 8
    zeropipe run zbv --mesh pp=2,dp_shard=2 --microbatches 8 --prove

    Starts local processes, or uses torchrun's.
    """
    from zeropipe.core.check import check

    _check_files(report, timeline_file)
    sizes = {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank, "pairs": pairs}
    built = _built(schedules, sizes, wishes, dry_run)
    if len({schedule.num_ranks for schedule in built}) > 1:
        raise ConfigError("these schedules have different numbers of ranks: run them one by one")
    if timeline_file and len(built) > 1:
        raise ConfigError("--timeline holds one run: give one schedule")
    for schedule in built:
        check(schedule)
    todo = _job(built, **wishes)
    if dry_run:
        text.print_plan(built, todo, as_json)
        return
    results = _run_ranks(built, todo, timeout)
    if results is None:  # a rank of torchrun's that is not the first
        return
    both = [(result, text.predicted(result.measured.timeline, todo)) for result in results]
    if report:
        from zeropipe.viz import draw

        draw([t for r, guess in both for t in (text.label(r.measured.timeline, "measured", todo), guess)], report)
    if timeline_file:
        from zeropipe.core.files import write_whole
        from zeropipe.core.formats.json import to_json
        from zeropipe.engine.run.spec import origin_of

        recorded = results[0].measured.timeline
        write_whole(timeline_file, to_json(replace(recorded, origin=origin_of(todo, recorded.schedule))))
    if as_json:
        output.print_json([text.data(result, guess, todo) for result, guess in both])
        return
    for result, guess in both:
        text.print_run(result, guess, todo)
        output.print_warnings(guess.schedule)
    if len(both) > 1:
        text.print_ranking(results)
    for path in (report, timeline_file):
        if path:
            print(f"wrote {path}")


def _check_files(report: str | None, timeline_file: str | None) -> None:
    """ConfigError for a file that could not be written in the end."""
    from zeropipe.core.files import has_suffix
    from zeropipe.viz import check_name

    for path in (report, timeline_file):
        if path:
            check_name(path)
    if timeline_file and not has_suffix(timeline_file, ".json"):
        raise ConfigError(f"--timeline {timeline_file}: its name must end in .json")


def _built(schedules: tuple[str, ...], sizes: dict[str, Any], wishes: dict[str, Any], dry_run: bool) -> list[Schedule]:
    """The schedules, with as many ranks as torchrun started, and as many stages as --layers-per-stage gives."""
    from zeropipe.cli.request import request_of
    from zeropipe.engine.run.spec import require_cores

    request = request_of(schedules, sizes, several=("schedule",))
    _take_flags(request.run, wishes)
    wishes["mesh"] = mesh = parse_mesh(wishes["mesh"]) if wishes["mesh"] else ()
    world = os.environ.get("WORLD_SIZE")
    if mesh:
        request = _with_mesh(request, mesh, world)
    elif world is not None and world.isdecimal() and not request.ranks:
        request = replace(request, ranks=(int(world),))
    local = world is None and not dry_run
    if local and (mesh or request.ranks):  # before anything of that size is built
        require_cores(num_processes(mesh) if mesh else request.ranks[0])
    per_stage = wishes.pop("layers_per_stage")
    if per_stage is not None:
        request = _with_layers_per_stage(request, per_stage, wishes)
    built = [request.schedule_of(spec) for spec in request.specs]
    for schedule in built:  # a file has ranks of its own
        if mesh and schedule.num_ranks != dict(mesh).get("pp", 1):
            raise ConfigError(
                f"{schedule.name} is for {count_text(schedule.num_ranks, 'rank')}, --mesh has "
                f"pp={dict(mesh).get('pp', 1)}: give pp={schedule.num_ranks}"
            )
    if local:
        require_cores(built[0].num_ranks)
    return built


def _with_mesh(request: Request, mesh: Mesh, world: str | None) -> Request:
    """Schedules have the mesh's number of pipeline ranks."""
    if world is not None and world.isdecimal() and int(world) != num_processes(mesh):
        raise ConfigError(
            f"--mesh {format_mesh(mesh)} is of {count_text(num_processes(mesh), 'process')}, torchrun started "
            f"{world}: start {num_processes(mesh)}"
        )
    pp = dict(mesh).get("pp", 1)
    if request.ranks and request.ranks != (pp,):
        raise ConfigError(f"--ranks {request.ranks[0]} and --mesh with pp={pp}: leave --ranks out, or give the same")
    has_names = any(not spec.is_file for spec in request.specs)
    return replace(request, ranks=(pp,)) if has_names else request


def _take_flags(given: Mapping[str, Any], wishes: dict[str, Any]) -> None:
    """Flags of a file's [run] table, where the command line does not give them; read as the command line reads them."""
    context = click.get_current_context()
    options = {option.name: option for option in context.command.params if option.name in wishes}
    for name, value in given.items():
        if name not in options:
            raise ConfigError(f"[run] has {short(name)}: known are {', '.join(map(str, options))}")
        if opt.is_told(name):
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        try:
            wishes[name] = options[name].type_cast_value(context, text)
        except click.BadParameter as error:
            raise ConfigError(f"[run] {name}={short(value)}: {error.message.rstrip('.')}") from None


def _with_layers_per_stage(request: Request, per_stage: int, wishes: dict[str, Any]) -> Request:
    from zeropipe.core.model.layers import num_stages_for
    from zeropipe.engine.run.spec import Job, layers_of

    if wishes["layers"] or request.stages_per_rank:
        other = "--layers" if wishes["layers"] else "--stages-per-rank"
        raise ConfigError(f"--layers-per-stage {per_stage} and {other} say the same in two ways: give one of them")
    if not request.ranks:
        raise ConfigError("ranks is missing: --layers-per-stage needs --ranks N")
    num_layers = layers_of(Job(model=wishes["model"], num_layers=wishes["num_layers"]))
    num_stages = num_stages_for(num_layers, per_stage, request.ranks[0], wishes["first_less"], wishes["last_less"])
    return replace(request, stages_per_rank=(num_stages // request.ranks[0],))


def _job(built: list[Schedule], **given: Any) -> Job:
    from zeropipe.cli.cut import numbers_of
    from zeropipe.core.model.configs import BUILT_IN
    from zeropipe.engine.run.spec import Job, check_job, counts_of

    layers = given.pop("layers")
    counts = numbers_of(layers) if layers else None
    for name in ("first_less", "last_less"):
        if counts and given[name]:
            raise ConfigError(f"--layers says each stage's layers already: leave --{name.replace('_', '-')} out")
    job = Job(layers=counts, **given)
    most = max(schedule.num_stages for schedule in built)
    if job.model in BUILT_IN and job.model.startswith("tiny") and job.num_layers is None:
        # a tiny model has a layer for every stage, and the same number for all schedules compared
        job = replace(job, num_layers=sum(counts) if counts else max(BUILT_IN[job.model]["num_hidden_layers"], most))
    check_job(job)
    for schedule in built:
        counts_of(job, schedule)
    return job


def _run_ranks(built: list[Schedule], job: Job, timeout: float) -> list[Outcome] | None:
    from zeropipe.engine import require_torch

    require_torch()
    from zeropipe.engine.run.job import backend_of, check_device, run_all, run_under_torchrun
    from zeropipe.engine.run.launch import LocalRanks, is_local, model_code
    from zeropipe.engine.run.slow import tell_slow
    from zeropipe.engine.run.spec import num_ranks_of

    check_device(job)
    if not is_local():
        return run_under_torchrun(built, job)
    tell_slow(job.dtype, job.device)
    num_ranks = num_ranks_of(job, built[0])
    with LocalRanks(num_ranks, backend=backend_of(job, num_ranks), preload=model_code(job.device)) as ranks:
        first: list[Outcome] = ranks.run(run_all, built, job, timeout=timeout)[0]
        return first
