"""`trace compare`: a recorded run held against what costs predict."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli import trace_text as text
from zeropipe.cli.progress import progress
from zeropipe.errors import ConfigError, ZeropipeError

if TYPE_CHECKING:
    from zeropipe.cli.cut import AsRun
    from zeropipe.core.schedule import Schedule
    from zeropipe.core.timeline import Origin, Timeline
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.layer_costs import LayerCosts
    from zeropipe.sim.megatron import Log


@dataclass(frozen=True)
class Run:
    """What was measured: a timeline, or of a log its costs and the time of its step."""

    schedule: Schedule
    timeline: Timeline | None
    log: Log | None

    @property
    def origin(self) -> Origin | None:
        """What it was of, where that is known."""
        return self.timeline.origin if self.timeline else None


@click.group(short_help="Recorded runs: compare.", invoke_without_command=True)
@click.pass_context
def trace(context: click.Context) -> None:
    """Recorded runs."""
    if context.invoked_subcommand is None:
        raise ConfigError("trace: say what to do with a run: zeropipe trace compare measured.json --costs costs.json")


@trace.command(short_help="Measured over predicted.")
@click.argument("files", nargs=-1, required=True)
@click.option("--costs", "costs_file", metavar="FILE", help="What to predict with; the run's own means by default.")
@click.option(
    "--per", type=click.Choice(["rank", "stage"]), default="rank", show_default=True,
    help="What a costs file's numbers are of: a rank's part of the model, or a stage.",
)  # fmt: skip
@click.option("--layers", help="Layers of each stage, like 2,3,3,2, where the run does not tell; even by default.")
@click.option("--ac", help="The run's, where it does not tell and costs of layers are of several modes.")
@click.option("--schedule", help="Of a log, which does not tell: a name or a file.")
@opt.size_options
@click.option("--report", help="Write a page with both timelines, linked: report.html.")
@click.option("-o", "--output", "out", help="Write the costs, corrected by the run: corrected.json.")
@opt.json_option
def compare(
    files: tuple[str, ...],
    costs_file: str | None,
    per: str,
    layers: str | None,
    ac: str | None,
    schedule: str | None,
    report: str | None,
    out: str | None,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Hold a run against what costs predict: how far each kind and stage is off, and what idle time was lost to.

    FILES is a timeline (run --timeline), the traces of torch.profiler, one for each rank of a pipeline, or a log of
    Megatron-LM's timers, which needs --schedule and --microbatches.

    \b
    zeropipe trace compare measured.json --costs costs.json --report report.html
    zeropipe trace compare rank0.json rank1.json -o corrected.json
    zeropipe trace compare train.log --schedule 1f1b --ranks 4 --microbatches 32 --costs costs.json
    """
    _check_files(report, out)
    with progress(3) as begin:
        begin("reading")
        run = _read(files, schedule, sizes)
        begin("simulating")
        given = _given(costs_file, run, per, layers, ac)
        found = _compared(run, given.stages if given else None)
        begin("writing")
        if report:
            from zeropipe.viz import draw

            draw(list(found.timelines), report)
        if out:
            from zeropipe.core.files import write_whole

            write_whole(out, _corrected_text(found, given, run))
    if as_json:
        output.print_json(text.data(found))
        return
    text.print_compared(found)
    for path in (report, out):
        if path:
            output.print_written(path)


def _check_files(report: str | None, out: str | None) -> None:
    from zeropipe.core.files import has_suffix, require_writable
    from zeropipe.viz import check_name

    if report:
        check_name(report)
    if out:
        if not has_suffix(out, ".json"):
            raise ConfigError(f"-o {out}: costs are written as JSON, its name must end in .json")
        require_writable(out)


def _read(files: tuple[str, ...], schedule: str | None, sizes: dict[str, Any]) -> Run:
    from zeropipe.core.files import read_text
    from zeropipe.core.limits import COMMAND_LINE
    from zeropipe.sim.megatron import is_megatron_log

    texts = [read_text(path, COMMAND_LINE) for path in files]
    if is_megatron_log(texts[0]) and not texts[0].lstrip().startswith("{"):
        if len(files) > 1:
            raise ConfigError(f"{files[1]}: a log holds all ranks: give one log")
        return _of_log(files[0], texts[0], schedule, sizes)
    if schedule or any(sizes.values()):
        raise ConfigError(f"{files[0]} has a schedule of its own: leave --schedule and sizes out")
    timeline = _of_traces(files, texts)
    return Run(timeline.schedule, timeline, None)


def _of_log(path: str, content: str, schedule: str | None, sizes: dict[str, Any]) -> Run:
    from zeropipe.cli.request import request_of
    from zeropipe.core.timeline import Timeline
    from zeropipe.sim.megatron import read_megatron_log

    if schedule is None:
        raise ConfigError(f"{path}: a log does not tell the schedule: give --schedule 1f1b --ranks N --microbatches N")
    try:
        log = read_megatron_log(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    request = request_of([schedule], sizes)
    built = request.load(request.specs[0])
    return Run(built.schedule if isinstance(built, Timeline) else built, None, log)


def timeline_of(files: tuple[str, ...]) -> Timeline:
    """The run that files hold: a timeline, or the traces of its ranks."""
    from zeropipe.core.files import read_text
    from zeropipe.core.limits import COMMAND_LINE

    return _of_traces(files, [read_text(path, COMMAND_LINE) for path in files])


def _of_traces(files: tuple[str, ...], texts: list[str]) -> Timeline:
    from zeropipe.core.complete import check_complete
    from zeropipe.core.formats.json import from_data
    from zeropipe.core.formats.parse import parse_json
    from zeropipe.core.formats.torch_trace import from_torch_traces, is_torch_trace
    from zeropipe.core.limits import require_times
    from zeropipe.core.timeline import Timeline

    parsed = []
    for path, content in zip(files, texts, strict=True):
        try:
            parsed.append(parse_json(content))
        except ValueError as error:
            raise ConfigError(f"{path} is neither a trace (JSON: {error}) nor a log of Megatron's timers") from None
    try:
        if all(map(is_torch_trace, parsed)):
            found: Any = from_torch_traces(parsed, files)
        elif len(files) > 1:
            raise ConfigError("several files must be traces of torch.profiler, one for each rank; give one timeline")
        else:
            found = from_data(parsed[0])
        if not isinstance(found, Timeline):
            raise ConfigError("it is a schedule without times: record a run with zeropipe run --timeline measured.json")
        require_times(found)
        check_complete(found.schedule)
    except ZeropipeError as error:
        where = "" if len(files) > 1 or str(error).startswith(files[0]) else f"{files[0]}: "
        raise ConfigError(f"{where}{error}") from None
    return found


@dataclass(frozen=True)
class Given:
    """Costs to predict with: of stages, and of the layers that these were made of."""

    stages: Costs
    layers: LayerCosts | None = None
    ran: AsRun | None = None


def _given(path: str | None, run: Run, per: str, layers: str | None, ac: str | None) -> Given | None:
    from zeropipe.cli.cut import Cut, as_run
    from zeropipe.cli.request import OF_LAYERS
    from zeropipe.sim.compare import stage_costs
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.fit import load_costs

    found = load_costs(path) if path else None
    if found is None or isinstance(found, Costs):
        Cut(ac=ac, layers=layers).require_nothing_said("only costs of layers (estimate, profile) are cut by it")
        return None if found is None else Given(stage_costs(found, run.schedule.problem, per))
    if opt.is_told("per"):
        raise ConfigError(f"--per {per}: {OF_LAYERS}")
    ran = as_run(found, run.schedule, run.origin, layers, (ac,) if ac else ())
    costs = found.costs(ran.counts, ran.setting, ac=ran.ac, placement=run.schedule.placement)
    return Given(costs, found, ran)


def _corrected_text(found: text.Compared, given: Given | None, run: Run) -> str:
    """The costs file of what the run corrects: of layers, if such costs were given."""
    from zeropipe.sim.costs import costs_data
    from zeropipe.sim.layer_file import to_layer_json
    from zeropipe.sim.refit import refitted

    if given is None or given.layers is None or given.ran is None:
        return json.dumps(costs_data(found.corrected), indent=2) + "\n"
    if run.timeline is None:
        raise ConfigError("-o: a log's means correct costs of stages, not of layers: give such costs, or a timeline")
    return to_layer_json(refitted(given.layers, run.timeline, given.ran.counts, given.ran.setting, given.ran.ac)) + "\n"


def _compared(run: Run, costs: Costs | None) -> text.Compared:
    from zeropipe.sim.fit import fit
    from zeropipe.sim.megatron import costs_of
    from zeropipe.sim.reality import corrected, lost, require_units, retimed, stage_residuals, with_shards
    from zeropipe.sim.simulate import simulate

    if run.log is not None:
        own = costs_of(run.log, run.schedule)
        real = simulate(run.schedule, own)
    else:
        assert run.timeline is not None
        own, real = fit(run.timeline), run.timeline
    if costs is not None:
        require_units(costs, real)
        costs = with_shards(costs, own)
    expected = costs or own
    if real.measured:  # a run records what its actions hold, and no weights
        expected = replace(expected, weights=own.weights)
    guess = simulate(run.schedule, expected)
    word = "from the log's means" if run.log else "measured" if real.measured else "as it is in the file"
    return text.Compared(
        text.label(real, word),
        text.label(guess, "simulated"),
        stage_residuals(real, guess),
        lost(real) if run.log is None else None,
        own if costs is None else corrected(costs, real) if run.log is None else retimed(costs, own),
        costs is not None,
        run.log,
    )
