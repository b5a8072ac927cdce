"""Costs of layers as a table, a file or JSON: the output of `estimate` and `profile`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeropipe.cli import output
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from zeropipe.sim.layer_costs import LayerCosts, Setting


def require_costs_file(out: str | None) -> None:
    """ConfigError for a costs file that could not be written, before anything is computed."""
    from zeropipe.core.files import has_suffix, require_writable

    if out:
        if not has_suffix(out, ".json"):
            raise ConfigError(f"-o {out}: its name must end in .json")
        require_writable(out)


def print_costs(found: LayerCosts, note: str, out: str | None, as_json: bool) -> None:
    """Write the costs to `out`, and print them: as JSON, or a table for each setting with `note` below."""
    from zeropipe.core.files import write_whole
    from zeropipe.sim.layer_file import to_layer_data, to_layer_json

    if out:
        write_whole(out, to_layer_json(found))
    if as_json:
        output.print_json({**to_layer_data(found), "file": out})
        return
    for setting in found.settings:
        _print_setting(found, setting)
    output.print_note(note)
    if out:
        output.print_written(out)


def _print_setting(found: LayerCosts, setting: Setting) -> None:
    console = output.console()
    machine = found.machine
    device = machine.get("gpu") or f"{machine.get('cpu', 'a CPU')} ({count_text(machine.get('ranks', 1), 'rank')})"
    how = "an estimate" if found.source == "estimate" else "measured"
    tokens = count_text(found.sequence, "token") + (f" in samples of {found.sample}" if found.sample else "")
    console.print(
        f"{found.model} on {device}, {found.dtype}, {tokens}, {setting}: {how}",
        style="bold", markup=False, soft_wrap=True,
    )  # fmt: skip
    table = output.create_table(
        "name", "number", "F", "I", "W", "held\nF to I", "kept\nI to W", "parameters", left=("name",)
    )  # fmt: skip
    parts = [*found.before, *dict.fromkeys(found.layers), *found.after, *found.after_full, *found.each]
    for kind in parts:
        cost = setting.kinds[kind]
        number = "each" if kind in found.each else str(found.layers.count(kind) or 1)
        table.add_row(
            kind, number, *(output.time_text(time, "s") for time in (cost.f, cost.i, cost.w)),
            *(output.size_text(size, "B") for size in (cost.activation, cost.stash)), _parameters(cost.parameters),
        )  # fmt: skip
    console.print(output.narrow_to_width(table, console))


def _parameters(count: float) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count:,.0f}"
