"""`trace compare`: a recorded run, compared with the prediction of costs; `trace import`: traces as a timeline."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.command import Group
from zeropipe.cli.options import option
from zeropipe.cli.progress import show_steps
from zeropipe.cli.trace_output import TraceComparison, comparison_data, label, print_comparison
from zeropipe.errors import ConfigError, ZeropipeError

if TYPE_CHECKING:
    from zeropipe.cli.layer_options import RecordedSetting
    from zeropipe.core.schedule import Schedule
    from zeropipe.core.timeline import Origin, Timeline
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.layer_costs import LayerCosts
    from zeropipe.sim.megatron import TimerLog


@dataclass(frozen=True)
class Run:
    """A recorded run: a timeline, or a log with mean times."""

    schedule: Schedule
    timeline: Timeline | None
    log: TimerLog | None

    @property
    def origin(self) -> Origin | None:
        """The run's settings, if the recording names them."""
        return self.timeline.origin if self.timeline else None


@click.group(cls=Group, short_help="Recorded runs: compare, import.", invoke_without_command=True)
@click.pass_context
def trace(context: click.Context) -> None:
    """Recorded runs: traces, timelines and logs."""
    if context.invoked_subcommand is None:
        raise ConfigError("trace: no subcommand; use zeropipe trace compare measured.json --costs costs.json")


@trace.command(short_help="Measured against predicted times.")
@click.argument("files", nargs=-1, required=True)
@opt.costs_file
@opt.per
@opt.layers
@opt.ac
@option("--schedule", field="schedule.name", help="Schedule of a Megatron-LM log: a name or a file.")
@opt.report
@opt.output()
@opt.json
@opt.size
def compare(
    files: tuple[str, ...], costs_file: str | None, per: str | None, layers: str | None, ac: str | None,
    schedule: str | None, report: str | None, out: str | None, as_json: bool, **sizes: Any,
) -> None:  # fmt: skip
    """Compare a recorded run with the prediction of costs, by kind and stage, and explain its idle time.

    FILES is a timeline (run --timeline), the traces of torch.profiler, one per rank of a pipeline, or a log of
    Megatron-LM's timers, which needs --schedule and --microbatches.

    \b
    zeropipe trace compare measured.json --costs costs.json --report report.html
    zeropipe trace compare rank0.json rank1.json -o corrected.json
    zeropipe trace compare train.log --schedule 1f1b --ranks 4 --microbatches 32 --costs costs.json

    Without --costs, the run's own mean times predict it. --layers and --ac are those of the run, if the recording does
    not name them and costs are per layer. -o writes the costs, corrected by the run, to a .json file.
    """
    _check_files(report, out)
    with show_steps(3) as begin:
        begin("reading")
        run = _read_run(files, schedule, sizes)
        begin("simulating")
        costs = _load_costs(costs_file, run, per, layers, ac)
        found = _compare(run, costs.stages if costs else None)
        begin("writing")
        if report:
            from zeropipe.viz import draw

            draw(list(found.timelines), report)
        if out:
            from zeropipe.core.files import write_whole

            write_whole(out, _corrected_text(found, costs, run))
    if as_json:
        output.print_json(comparison_data(found))
        return
    print_comparison(found)
    for path in (report, out):
        if path:
            output.print_written(path)


@trace.command("import", short_help="Traces of torch.profiler as a timeline.")
@click.argument("files", nargs=-1, required=True)
@option("--actions", metavar="REGEX", help="How events of actions are named: groups kind, microbatch and maybe stage.")
@opt.output(required=True)
@opt.json
def import_traces(files: tuple[str, ...], actions: str | None, out: str, as_json: bool) -> None:
    """Import traces of torch.profiler, one per rank of a pipeline, as a timeline that all commands take.

    \b
    zeropipe trace import rank*.json -o run.json
    zeropipe trace import rank*.json -o run.json --actions '(?P<kind>fwd|bwd)-(?P<stage>\\d+)-(?P<microbatch>\\d+)'
    zeropipe trace compare run.json --costs costs.json

    Of several steps the one of median length counts. An action that was recorded with its wait for a message begins
    when its input is there.
    """
    from zeropipe.core.files import read_text, write_whole
    from zeropipe.core.formats.json import to_json
    from zeropipe.core.limits import COMMAND_LINE
    from zeropipe.core.waits import trim_waits

    _check_output(out)
    texts = [read_text(path, COMMAND_LINE) for path in files]
    timeline, num_shortened = trim_waits(_parse_traces(files, texts, actions))
    write_whole(out, to_json(timeline))
    if as_json:
        output.print_json({**output.timeline_data(timeline), "num_shortened": num_shortened, "files": [out]})
        return
    print(timeline)
    if num_shortened:
        output.print_note(f"{num_shortened} actions were recorded with their wait for a message, which is taken off")
    output.print_written(out)


def _check_files(report: str | None, out: str | None) -> None:
    from zeropipe.viz import check_name

    if report:
        check_name(report)
    if out:
        _check_output(out, "costs")


def _check_output(path: str, what: str = "timelines") -> None:
    from zeropipe.core.files import has_suffix, require_writable

    if not has_suffix(path, ".json"):
        raise ConfigError(f"-o {path}: {what} are written as JSON, its name must end in .json")
    require_writable(path)


def _read_run(files: tuple[str, ...], schedule: str | None, sizes: dict[str, Any]) -> Run:
    from zeropipe.core.files import read_text
    from zeropipe.core.limits import COMMAND_LINE
    from zeropipe.sim.megatron import is_megatron_log

    texts = [read_text(path, COMMAND_LINE) for path in files]
    if is_megatron_log(texts[0]) and not texts[0].lstrip().startswith("{"):
        if len(files) > 1:
            raise ConfigError(f"{files[1]}: a log has all ranks; pass one log")
        return _read_log(files[0], texts[0], schedule, sizes)
    if schedule or any(sizes.values()):
        raise ConfigError(f"{files[0]} has its own schedule: leave out --schedule and sizes")
    timeline = _parse_traces(files, texts)
    return Run(timeline.schedule, timeline, None)


def _read_log(path: str, content: str, schedule: str | None, sizes: dict[str, Any]) -> Run:
    from zeropipe.cli.request import create_request
    from zeropipe.sim.megatron import parse_megatron_log

    if schedule is None:
        raise ConfigError(f"{path}: a log does not name the schedule; pass --schedule 1f1b --ranks N --microbatches N")
    try:
        log = parse_megatron_log(content)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    request = create_request([schedule], sizes)
    return Run(request.load_schedule(request.specs[0]), None, log)


def read_timeline(files: tuple[str, ...]) -> Timeline:
    """Read a recorded timeline, or the traces of its ranks."""
    from zeropipe.core.files import read_text
    from zeropipe.core.limits import COMMAND_LINE

    return _parse_traces(files, [read_text(path, COMMAND_LINE) for path in files])


def _parse_traces(files: tuple[str, ...], texts: list[str], actions: str | None = None) -> Timeline:
    from zeropipe.core.complete import check_complete
    from zeropipe.core.formats.action_names import ActionNames
    from zeropipe.core.formats.json import from_data
    from zeropipe.core.formats.parse import parse_json
    from zeropipe.core.formats.torch_trace import from_torch_traces, is_torch_trace
    from zeropipe.core.limits import require_times
    from zeropipe.core.timeline import Timeline

    names = ActionNames(actions) if actions is not None else None
    parsed = []
    for path, content in zip(files, texts, strict=True):
        try:
            parsed.append(parse_json(content))
        except ValueError as error:
            raise ConfigError(f"{path} is neither a trace (JSON: {error}) nor a log of Megatron's timers") from None
    try:
        if all(map(is_torch_trace, parsed)):
            found: Any = from_torch_traces(parsed, files, names)
        elif len(files) > 1:
            raise ConfigError("several files must be traces of torch.profiler, one per rank; pass one timeline")
        elif names is not None:
            raise ConfigError("a timeline names its actions; leave out --actions")
        else:
            found = from_data(parsed[0])
        if not isinstance(found, Timeline):
            raise ConfigError("a schedule without times: record a run with zeropipe run --timeline measured.json")
        require_times(found)
        check_complete(found.schedule)
    except ZeropipeError as error:
        where = "" if len(files) > 1 or str(error).startswith(files[0]) else f"{files[0]}: "
        raise ConfigError(f"{where}{error}") from None
    return found


@dataclass(frozen=True)
class LoadedCosts:
    """Costs of stages, with the costs of layers that they were computed from."""

    stages: Costs
    layers: LayerCosts | None = None
    recorded: RecordedSetting | None = None


def _load_costs(
    path: str | None, run: Run, per: str | None, layers: str | None, ac: str | None
) -> LoadedCosts | None:  # fmt: skip
    from zeropipe.cli.cost_source import HAVE_LAYERS
    from zeropipe.cli.layer_options import LayerOptions, find_recorded_setting
    from zeropipe.sim.costs import Costs
    from zeropipe.sim.costs_file import load_costs

    found = load_costs(path) if path else None
    if found is None or isinstance(found, Costs):
        LayerOptions(ac=ac, layers=layers).require_unset("only costs of layers (estimate, profile) depend on it")
        return None if found is None else LoadedCosts(found.stage_costs(run.schedule.problem, per=per or "rank"))
    if per:
        raise ConfigError(f"--per {per}: {HAVE_LAYERS}")
    recorded = find_recorded_setting(found, run.schedule, run.origin, layers, (ac,) if ac else ())
    costs = found.schedule_costs(run.schedule, recorded.counts, recorded.setting, ac=recorded.ac)
    return LoadedCosts(costs, found, recorded)


def _corrected_text(found: TraceComparison, costs: LoadedCosts | None, run: Run) -> str:
    """The text of the corrected costs file: per layer, if the costs were."""
    from zeropipe.sim.costs_file import costs_to_data
    from zeropipe.sim.layer_file import to_layer_json
    from zeropipe.sim.refit import refit

    if costs is None or costs.layers is None or costs.recorded is None:
        return json.dumps(costs_to_data(found.corrected), indent=2) + "\n"
    if run.timeline is None:
        raise ConfigError("-o: a log corrects costs of stages, not of layers; use such costs, or a timeline")
    recorded = costs.recorded
    corrected = refit(costs.layers, run.timeline, recorded.counts, recorded.setting, recorded.ac)
    return to_layer_json(corrected) + "\n"


def _compare(run: Run, costs: Costs | None) -> TraceComparison:
    from zeropipe.sim.attribution import (
        add_sharding,
        attribute_idle_time,
        correct_costs,
        replace_times,
        require_same_unit,
        residuals,
    )
    from zeropipe.sim.fit import fit
    from zeropipe.sim.megatron import costs_from_log
    from zeropipe.sim.simulate import simulate

    if run.log is not None:
        own = costs_from_log(run.log, run.schedule)
        real = simulate(run.schedule, own)
    else:
        assert run.timeline is not None
        own, real = fit(run.timeline), run.timeline
    if costs is not None:
        require_same_unit(costs, real)
        costs = add_sharding(costs, own)
    expected = costs or own
    if real.measured:  # a run records the memory of its actions, without weights
        expected = replace(expected, weights=own.weights, first_gradients=own.first_gradients)
    predicted = simulate(run.schedule, expected)
    kind = "from the log's means" if run.log else "measured" if real.measured else "recorded"
    return TraceComparison(
        label(real, kind),
        label(predicted, "simulated"),
        residuals(real, predicted, by_stage=True),
        attribute_idle_time(real) if run.log is None else None,
        own if costs is None else correct_costs(costs, real) if run.log is None else replace_times(costs, own),
        costs is not None,
        run.log,
    )
