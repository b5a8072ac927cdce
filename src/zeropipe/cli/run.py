"""`run`: run schedules on a model, and compare the run with its simulation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output, run_output
from zeropipe.cli.command import Option, is_set
from zeropipe.cli.options import POSITIVE, option
from zeropipe.core.mesh import DIMENSIONS, EXPERTS, Mesh, format_mesh, num_processes, parse_mesh
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError, short

if TYPE_CHECKING:
    from zeropipe.cli.request import Request
    from zeropipe.core.schedule import Schedule
    from zeropipe.engine.run.job import Outcome
    from zeropipe.engine.run.spec import Job

DEFAULT_SEQUENCE, DEFAULT_DTYPE, DEFAULT_STEPS = 128, "float32", 3
_MOVED_BATCH = "use --microbatch; in plan and in training files, batch is the sequences of a step"


@opt.command(short_help="Run schedules, on local processes or under torchrun.")
@click.argument("schedules", nargs=-1, required=True)
@option(
    "--model", default="tiny-qwen3", show_default=True, field="model.path",
    help="Model directory, or a built-in model with random weights: tiny-qwen3, tiny-llama, qwen3-0.6b, qwen3-8b, "
    "llama-8b.",
)  # fmt: skip
@opt.num_layers
@option(
    "--vocabulary", type=click.IntRange(2), field="model.vocabulary",
    help="Vocabulary size of a built-in model, if not its own.",
)  # fmt: skip
@opt.layers
@option(
    "--layers-per-stage", type=POSITIVE, field="schedule.layers_per_stage",
    help="Choose the stages per rank to get this number of layers.",
)  # fmt: skip
@option(
    "--first-less", type=click.IntRange(0), default=0, field="schedule.first_less",
    help="Number of layers fewer on the first stage, which has the embedding.",
)  # fmt: skip
@option(
    "--last-less", type=click.IntRange(0), default=0, field="schedule.last_less",
    help="Number of layers fewer on the last stage, which has the head.",
)  # fmt: skip
@opt.steps
@opt.sequence
@opt.run_microbatch(_MOVED_BATCH)
@opt.device
@opt.dtype
@opt.compile
@opt.ac
@option(
    "--split", type=click.Choice(["store", "whole"]), default="store", show_default=True,
    field="engine.split",
    help="How the backward is split into I and W: store deferred products, or do not split.",
)  # fmt: skip
@option(
    "--dynamic-weights", is_flag=True, field="engine.dynamic_weights",
    help="While waiting for a message, run pending weight gradients.",
)  # fmt: skip
@option(
    "--engine.overlap", "overlap_mode", type=click.Choice(["streams", "turns"]), default="streams", show_default=True,
    field="engine.overlap",
    help="How F and B of an Overlap run together: on two streams of a GPU, or in turns at every exchange.",
)  # fmt: skip
@opt.mesh
@option("--verify", is_flag=True, old_names={"--prove": ""}, help="Compare a step's gradients with the full model's.")
@opt.report
@option("--timeline", "timeline_file", metavar="FILE", help="Write the measured timeline to a .json file.")
@opt.dry_run
@opt.timeout
@opt.json
@opt.size
@opt.mesh_fields
def run(
    schedules: tuple[str, ...], report: str | None, timeline_file: str | None, dry_run: bool, timeout: float,
    as_json: bool, **values: Any,
) -> None:  # fmt: skip
    """Run schedules on a model with synthetic tokens, and compare the run with its simulation.

    \b
    zeropipe run zbv 1f1b --ranks 4 --microbatches 8 --report report.html
    zeropipe run job.toml --timeline measured.json
    torchrun --nproc-per-node 4 -m zeropipe run zbv --microbatches 8
    zeropipe run zbv --mesh pp=2,dp_shard=2 --microbatches 8 --verify

    Starts local processes, or uses those of torchrun. Schedules have the pp ranks of --mesh. By default the microbatch
    is one sequence and ac is none; a tiny model has the layers that --layers names.
    """
    from zeropipe.core.check import check

    _check_files(report, timeline_file)
    built = _build_schedules(schedules, values, dry_run)
    if len({schedule.num_ranks for schedule in built}) > 1:
        raise ConfigError("these schedules have different numbers of ranks: run them one by one")
    if timeline_file and len(built) > 1:
        raise ConfigError(f"--timeline {timeline_file}: holds the run of one schedule; pass one schedule")
    for schedule in built:
        check(schedule)
    job = _create_job(built, values)
    if dry_run:
        run_output.print_plan(built, job, as_json)
        return
    job = _with_device(job)
    results = _run_ranks(built, job, timeout)
    if results is None:  # a rank of torchrun that is not the first
        return
    both = [(result, run_output.predict(result.measured.timeline, job)) for result in results]
    if report:
        from zeropipe.viz import draw

        draw(
            [t for r, predicted in both for t in (run_output.label(r.measured.timeline, "measured", job), predicted)],
            report,
        )
    if timeline_file:
        _write_timeline(results[0], job, timeline_file)
    if as_json:
        output.print_json([run_output.run_data(result, predicted, job) for result, predicted in both])
        return
    for result, predicted in both:
        run_output.print_run(result, predicted, job)
        output.print_warnings(predicted.schedule)
    if len(both) > 1:
        run_output.print_ranking(results)
    for path in (report, timeline_file):
        if path:
            print(f"wrote {path}")


def _check_files(report: str | None, timeline_file: str | None) -> None:
    """ConfigError for a file that could not be written at the end."""
    from zeropipe.core.files import has_suffix
    from zeropipe.viz import check_name

    for path in (report, timeline_file):
        if path:
            check_name(path)
    if timeline_file and not has_suffix(timeline_file, ".json"):
        raise ConfigError(f"--timeline {timeline_file}: its name must end in .json")


def _write_timeline(result: Outcome, job: Job, path: str) -> None:
    from zeropipe.core.files import write_whole
    from zeropipe.core.formats.json import to_json
    from zeropipe.engine.run.spec import origin_of

    timeline = result.measured.timeline
    write_whole(path, to_json(replace(timeline, origin=origin_of(job, timeline.schedule))))


def _build_schedules(schedules: tuple[str, ...], values: dict[str, Any], dry_run: bool) -> list[Schedule]:
    """Build the schedules, with the ranks of torchrun or --mesh, and the stages of --layers-per-stage.

    Adds the options of a .toml file to `values`.
    """
    from zeropipe.cli.request import SIZES, create_request
    from zeropipe.engine.run.spec import require_cores

    sizes = {name: values.pop(name) for name in (*SIZES, "slices", "pairs")}
    request = create_request(schedules, sizes, several=("schedule",))
    _apply_job_file(request.run, values)
    values["mesh"] = mesh = _parse_mesh(values)
    world = os.environ.get("WORLD_SIZE")
    if mesh:
        request = _with_mesh(request, mesh, world)
    elif world is not None and world.isdecimal() and not request.ranks:
        request = replace(request, ranks=(int(world),))
    is_local = world is None and not dry_run
    if is_local and (mesh or request.ranks):  # before anything of that size is built
        require_cores(num_processes(mesh) if mesh else request.ranks[0])
    per_stage = values.pop("layers_per_stage")
    if per_stage is not None:
        request = _with_layers_per_stage(request, per_stage, values)
    built = [request.load_schedule(spec) for spec in request.specs]
    for schedule in built:  # a file has its own ranks
        if mesh and schedule.num_ranks != dict(mesh).get("pp", 1):
            raise ConfigError(
                f"{schedule.name} is for {count_text(schedule.num_ranks, 'rank')}, --mesh has "
                f"pp={dict(mesh).get('pp', 1)}: use pp={schedule.num_ranks}"
            )
    if is_local:
        require_cores(built[0].num_ranks)
    return built


def _parse_mesh(values: dict[str, Any]) -> Mesh:
    """The mesh of --mesh, or of --mesh.pp and the others, as `train` takes them."""
    fields = {name: values.pop(f"mesh_{name}") for name in (*DIMENSIONS, EXPERTS)}
    given = ",".join(f"{name}={size}" for name, size in fields.items() if size is not None)
    return parse_mesh(",".join(filter(None, (values["mesh"], given)))) if values["mesh"] or given else ()


def _with_mesh(request: Request, mesh: Mesh, world: str | None) -> Request:
    """The request with the mesh's number of pipeline ranks."""
    if world is not None and world.isdecimal() and int(world) != num_processes(mesh):
        raise ConfigError(
            f"--mesh {format_mesh(mesh)} has {count_text(num_processes(mesh), 'process')}, torchrun started "
            f"{world}: start {num_processes(mesh)}"
        )
    pp = dict(mesh).get("pp", 1)
    if request.ranks and request.ranks != (pp,):
        raise ConfigError(f"--ranks {request.ranks[0]} and --mesh with pp={pp}: leave out --ranks, or use the same")
    has_names = any(not spec.is_file for spec in request.specs)
    return replace(request, ranks=(pp,)) if has_names else request


def _apply_job_file(fields: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Take options from the [run] table of a job file, unless the command line has them."""
    context = click.get_current_context()
    options: dict[str, Option] = {}
    for param in context.command.params:
        if isinstance(param, Option) and not param.hidden and param.name in values:
            old = (name.removeprefix("--").replace("-", "_") for name in param.old_names)
            options |= dict.fromkeys((param.name, *old), param)
    for name, value in fields.items():
        if name not in options:
            known = ", ".join(dict.fromkeys(str(one.name) for one in options.values()))
            raise ConfigError(f"[run] has {short(name)}: known are {known}")
        param = options[name]
        assert param.name is not None
        if is_set(param.name):
            continue
        text = ",".join(map(str, value)) if isinstance(value, list) else value
        try:
            values[param.name] = param.type_cast_value(context, text)
        except click.BadParameter as error:
            raise ConfigError(f"[run] {name}={short(value)}: {error.message.rstrip('.')}") from None


def _with_layers_per_stage(request: Request, per_stage: int, values: dict[str, Any]) -> Request:
    from zeropipe.core.model.layers import num_stages_for
    from zeropipe.engine.run.spec import Job, num_layers_of

    if values["layers"] or request.stages_per_rank:
        other = "--layers" if values["layers"] else "--stages-per-rank"
        raise ConfigError(f"--layers-per-stage {per_stage} and {other} set the same: use one of them")
    if not request.ranks:
        raise ConfigError("ranks is missing: --layers-per-stage needs --ranks N")
    num_layers = num_layers_of(Job(model=values["model"], num_layers=values["num_layers"]))
    num_stages = num_stages_for(num_layers, per_stage, request.ranks[0], values["first_less"], values["last_less"])
    return replace(request, stages_per_rank=(num_stages // request.ranks[0],))


def _create_job(built: list[Schedule], values: dict[str, Any]) -> Job:
    from zeropipe.cli.layer_options import parse_layers
    from zeropipe.core.model.configs import BUILT_IN
    from zeropipe.engine.run.spec import Job, check_job, layers_per_stage_of

    counts = parse_layers(values["layers"]) if values["layers"] else None
    for name in ("first_less", "last_less"):
        if counts and values[name]:
            raise ConfigError(f"--layers has each stage's layers already: leave out {opt.flag_of(name)}")
    names = ("model", "num_layers", "vocabulary", "first_less", "last_less", "device", "split", "mesh")
    job = Job(
        **{name: values[name] for name in (*names, "dynamic_weights")}, overlap=values["overlap_mode"], layers=counts,
        compile=None if values["compile"] == "auto" else values["compile"],
        verify=values["verify"], steps=values["steps"] or DEFAULT_STEPS,
        sequence=values["sequence"] or DEFAULT_SEQUENCE,
        batch=opt.require_single("microbatch", values["microbatch"], "estimate, profile and plan take") or 1,
        dtype=opt.require_run_dtype(values["dtype"] or DEFAULT_DTYPE), ac=values["ac"] or "none",
    )  # fmt: skip
    if job.model in BUILT_IN and job.model.startswith("tiny") and job.num_layers is None:
        # a tiny model has a layer for every stage, and the same number for all compared schedules
        max_stages = max(schedule.num_stages for schedule in built)
        default = max(int(BUILT_IN[job.model]["num_hidden_layers"]), max_stages)
        job = replace(job, num_layers=sum(counts) if counts else default)
    check_job(job)
    for schedule in built:
        layers_per_stage_of(job, schedule)
    return job


def _with_device(job: Job) -> Job:
    """The job on the device that `auto` stands for, which the output names."""
    from zeropipe.engine import require_torch

    require_torch()
    from zeropipe.engine.run.job import resolve_device
    from zeropipe.engine.run.spec import compiles_by_default

    device = resolve_device(job.device)
    compiles = compiles_by_default(device, job.dtype) if job.compile is None else job.compile
    return replace(job, device=device, compile=compiles)


def _run_ranks(built: list[Schedule], job: Job, timeout: float) -> list[Outcome] | None:
    from zeropipe.engine.run.job import choose_backend, run_all, run_under_torchrun
    from zeropipe.engine.run.launch import LocalRanks, is_local, model_modules
    from zeropipe.engine.run.slow_dtypes import warn_if_slow
    from zeropipe.engine.run.spec import num_ranks_of

    if not is_local():
        return run_under_torchrun(built, job)
    warn_if_slow(job.dtype, job.device)
    num_ranks = num_ranks_of(job, built[0])
    with LocalRanks(num_ranks, backend=choose_backend(job, num_ranks), preload=model_modules(job.device)) as ranks:
        first: list[Outcome] = ranks.run(run_all, built, job, timeout=timeout)[0]
        return first
