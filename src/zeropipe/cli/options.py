"""Options shared by several commands, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zeropipe.core.placement import MAX_WEIGHT_PARTS
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from zeropipe.core.schedule import Schedule
    from zeropipe.core.timeline import Timeline
    from zeropipe.sim.costs import Costs

Command = TypeVar("Command", bound=Callable[..., Any])


class Finite(click.FloatRange):
    """A number in a range, and a number: nan and inf lie in every range otherwise."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for machines.")

# flag -> (type, help); a str is one number or one per stage
_COSTS: dict[str, tuple[type, str]] = {
    "f": (str, "Time of a forward: one number, or one per stage like 1,1,2."),
    "i": (str, "Time of an input gradient."),
    "w": (str, "Time of a weight gradient."),
    "b": (str, "Time of a whole backward; i + w by default."),
    "overlap": (str, "Time of an F and a B as one step; f + b by default."),
    "p2p": (float, "Latency of a message between ranks."),
    "bandwidth": (float, "Bytes per unit of time; no limit by default."),
    "message": (str, "Bytes of a message."),
    "node_size": (int, "Ranks per machine."),
    "inter_p2p": (float, "Latency between machines."),
    "inter_bandwidth": (float, "Bandwidth between machines."),
    "blocking": (bool, "A sender waits for its transfer."),
    "serial_links": (bool, "One transfer at a time in each direction of a link."),
    "activation": (str, "Memory a forward takes."),
    "stash": (str, "Memory kept from I until W; all of it by default."),
    "weights": (str, "Constant memory of a stage: parameters, gradients, optimizer."),
    "memory_limit": (float, "Memory of a rank, for the limit line."),
}


def size_options(command: Command) -> Command:
    """--ranks, --microbatches, --stages-per-rank and --option."""
    for decorate in reversed(
        (
            click.option("--ranks", "-p", type=int, help="Pipeline ranks."),
            click.option("--microbatches", "-m", type=int, help="Microbatches."),
            click.option(
                "--stages-per-rank", "-v", type=int, help="Stages on each rank; the schedule's own by default."
            ),
            click.option("--option", "-O", "knobs", multiple=True, help="A schedule's own knob, like group_size=4."),
        )
    ):
        command = decorate(command)
    return command


def cost_options(command: Command) -> Command:
    """--costs FILE, --weight-parts, and one flag per cost, which reach the command as keywords for `costs_of`."""
    for name, (kind, text) in reversed(_COSTS.items()):
        flag = "--" + name.replace("_", "-")
        if kind is bool:
            command = click.option(flag, name, is_flag=True, default=None, help=text)(command)
        else:
            command = click.option(flag, name, type=kind, help=text)(command)
    command = click.option(
        "--weight-parts",
        type=click.IntRange(1, MAX_WEIGHT_PARTS),
        help="Cut every W into parts and fill gaps with them.",
    )(command)
    text = "A .toml or .json file of costs, or a recorded timeline (run --timeline x.json); flags override it."
    return click.option("--costs", "costs_file", help=text)(command)


def costs_of(costs_file: str | None, **flags: Any) -> Costs:
    """The costs of a file, overridden by flags."""
    from zeropipe.core.limits import require_costs
    from zeropipe.sim.costs import Costs, Link

    costs = Costs()
    if costs_file:
        from zeropipe.sim.fit import load_costs

        costs = load_costs(costs_file)
    given: dict[str, Any] = {
        name: _numbers(name, value) if _COSTS[name][0] is str else value
        for name, value in flags.items()
        if value is not None
    }
    require_costs(given)
    inter = Link(given.pop("inter_p2p", costs.inter_node.p2p), given.pop("inter_bandwidth", costs.inter_node.bandwidth))
    return replace(costs, inter_node=inter, **given)


def _numbers(name: str, text: str) -> float | tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--{name} {text!r}: write a number, or one per stage like 1,1,2") from None
    return values[0] if len(values) == 1 else values


def knobs_of(pairs: tuple[str, ...]) -> dict[str, Any]:
    """`("group_size=4",)` as {"group_size": 4}."""
    knobs: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (equals and name and text):
            raise ConfigError(f"--option {pair!r}: write it as name=value, like group_size=4")
        knobs[name.replace("-", "_")] = _value(text)
    return knobs


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def schedule_of(
    spec: str, ranks: int | None, microbatches: int | None, stages_per_rank: int | None, knobs: tuple[str, ...]
) -> Schedule:
    """The schedule a command line names."""
    from zeropipe.schedules.user import load

    return load(spec, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank, **knobs_of(knobs))


def work_of(
    spec: str, sizes: tuple[int | None, int | None, int | None, tuple[str, ...]], costs: dict[str, Any]
) -> tuple[Schedule, Costs, Timeline | None]:
    """What a command line names: a schedule, and its costs; and the recorded timeline, where the costs are its own."""
    from zeropipe.core.timeline import Timeline
    from zeropipe.schedules.user import load_any

    given = costs_of(**costs)  # first: a mistake in it is told before anything is built
    ranks, microbatches, stages_per_rank, knobs = sizes
    found = load_any(
        spec, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank, **knobs_of(knobs)
    )  # fmt: skip
    if not isinstance(found, Timeline):
        return found, given, None
    if any(value is not None for value in costs.values()):
        return found.schedule, given, None
    from zeropipe.sim.fit import fit

    return found.schedule, fit(found), found


def fill(schedule: Schedule, costs: Costs, weight_parts: int | None) -> Schedule:
    """The schedule with its W in parts, where parts are asked for."""
    from zeropipe.sim.fill import fill_gaps

    return schedule if weight_parts is None else fill_gaps(schedule, costs, weight_parts=weight_parts)
