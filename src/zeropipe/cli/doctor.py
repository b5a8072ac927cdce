"""`doctor`: what is installed, what this machine has, and what will be slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeropipe import __version__
from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.core.units import count_text, gigabytes

if TYPE_CHECKING:
    from zeropipe.doctor.machine import Machine
    from zeropipe.doctor.packages import Extra
    from zeropipe.doctor.problems import Problem


@opt.command(short_help="What is installed, and what will be slow.")
@opt.json
def doctor(as_json: bool) -> None:
    """Report what is installed, what this machine has, and what will be slow and why, each with a remedy.

    Needs neither torch nor a GPU, changes nothing, and ends with status 0 whatever it finds.
    """
    from zeropipe.doctor.machine import examine
    from zeropipe.doctor.packages import list_extras
    from zeropipe.doctor.problems import find_problems

    machine, extras = examine(), list_extras()
    problems = find_problems(machine, extras)
    if as_json:
        output.print_json(_report_data(machine, extras, problems))
        return
    console = output.console()
    for name, value in _machine_rows(machine):
        console.print(f"{name:<10}{value}", markup=False, soft_wrap=True)
    _print_extras(extras)
    for problem in problems:
        console.print(f"{problem.level}: {problem.text}", style="yellow", markup=False, soft_wrap=True)
        console.print(f"    {problem.fix}", markup=False, soft_wrap=True)
    if not problems:
        output.print_note("no problem found")


def _machine_rows(machine: Machine) -> list[tuple[str, str]]:
    torch = machine.torch
    gpus = (f"{n}: {gpu.name}, {gigabytes(gpu.memory)}" for n, gpu in enumerate(machine.gpus))
    return [
        ("zeropipe", __version__),
        ("Python", f"{machine.python} on {machine.system}, {count_text(machine.cores, 'CPU core')}"),
        ("torch", f"{torch.version} for {torch.build}" if torch else machine.torch_error or "not installed"),
        ("GPUs", "; ".join(gpus) or "none"),
        ("links", _links_text(machine)),
        ("backends", _backends_text(machine)),
    ]


def _links_text(machine: Machine) -> str:
    if len(machine.gpus) < 2:
        return "none: fewer than 2 GPUs"
    if machine.links is None:
        return "unknown: nvidia-smi topo -m does not tell"
    kinds = sorted({link for a, row in enumerate(machine.links) for link in row[a + 1 :]})
    return ", ".join(f"{kind} (NVLink)" if kind.startswith("NV") else kind for kind in kinds)


def _backends_text(machine: Machine) -> str:
    names = machine.torch.backends if machine.torch else ()
    nccl = machine.torch.nccl if machine.torch else None
    return ", ".join(f"nccl {nccl}" if name == "nccl" and nccl else name for name in names) or "none"


def _print_extras(extras: tuple[Extra, ...]) -> None:
    from rich.markup import escape

    from zeropipe.doctor.packages import USES

    if not extras:
        output.print_note("zeropipe is not installed, but imported from a folder: its extras are unknown")
        return
    columns = ("extra", "for", "packages", "to install")
    table = output.create_table(*columns, left=columns)
    for extra in extras:
        if extra.name == "all":  # repeats the others
            continue
        packages = ", ".join(f"{p.name} {p.version or 'missing'}" for p in extra.packages)
        table.add_row(extra.name, USES[extra.name], packages, escape(extra.command) if extra.missing else "")
    output.console().print(table)


def _report_data(machine: Machine, extras: tuple[Extra, ...], problems: list[Problem]) -> dict[str, Any]:
    torch = machine.torch
    return {
        "zeropipe": __version__, "python": machine.python, "system": machine.system, "cores": machine.cores,
        "torch": None if torch is None else {
            "version": torch.version, "build": torch.build, "backends": torch.backends, "nccl": torch.nccl,
        },
        "torch_error": machine.torch_error,
        "driver": machine.driver.version if machine.driver else None,
        "gpus": [{"name": gpu.name, "memory": gpu.memory} for gpu in machine.gpus],
        "links": machine.links,
        "extras": {
            extra.name: {
                "packages": {p.name: p.version for p in extra.packages}, "missing": [p.name for p in extra.missing],
                "install": extra.command,
            }
            for extra in extras
        },
        "problems": [problem._asdict() for problem in problems],
    }  # fmt: skip
