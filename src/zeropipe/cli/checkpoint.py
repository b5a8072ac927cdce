"""`checkpoint inspect` and `checkpoint convert`: what a run has saved."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from zeropipe.cli import options as opt
from zeropipe.cli import output
from zeropipe.cli.progress import progress
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from zeropipe.engine.checkpoint.manifest import Manifest, Saved


@click.group(short_help="Saved runs: inspect, convert.", invoke_without_command=True)
@click.pass_context
def checkpoint(context: click.Context) -> None:
    """Checkpoints that save_checkpoint has written."""
    if context.invoked_subcommand is None:
        raise ConfigError("checkpoint: say what to do with one: zeropipe checkpoint inspect PATH, or convert FROM TO")


@checkpoint.command(short_help="What a checkpoint holds.")
@click.argument("path")
@click.option("--check", is_flag=True, help="Read all of it, and compare it with its checksums.")
@opt.json_option
def inspect(path: str, check: bool, as_json: bool) -> None:
    """Show what a checkpoint holds: tensors, step, optimizer, and the layout that wrote it.

    \b
    zeropipe checkpoint inspect runs/7/checkpoint
    zeropipe checkpoint inspect runs/7/checkpoint --check --json
    """
    from zeropipe.engine.checkpoint.manifest import check_contents, followed, read_manifest

    folder = followed(Path(path))
    manifest = read_manifest(folder)
    if check:
        with progress(1) as begin:
            begin(f"reading {path}")
            check_contents(folder, manifest)
    facts = _facts(manifest) | ({"checked": True} if check else {})
    if as_json:
        output.print_json(facts)
    else:
        _show(str(folder), manifest, facts)


@checkpoint.command(short_help="To or from a model directory.")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@click.option("--shard-size", type=opt.Size("shard_size"), default="5GB", show_default=True, help="Of a file, at most.")
@click.option("--like", metavar="DIRECTORY", help="A model directory whose tokenizer is copied.")
@opt.json_option
def convert(source: str, target: str, shard_size: float, like: str | None, as_json: bool) -> None:
    """Make a Hugging Face model directory of a checkpoint, or a checkpoint of a model directory.

    One tensor, or one layer, is in memory at a time.

    \b
    zeropipe checkpoint convert runs/7/checkpoint my-model
    zeropipe checkpoint convert tuned/checkpoints/best my-model
    zeropipe checkpoint convert my-model start
    """
    from zeropipe.engine import require_torch

    require_torch()
    from zeropipe.engine.checkpoint.convert import convert as run
    from zeropipe.engine.checkpoint.manifest import FILE, followed, read_manifest

    folder = followed(Path(source))
    total = len(read_manifest(folder).under("model")) if (folder / FILE).exists() else _layers(source)
    before = _files(target)
    with progress(total) as begin:
        made = run(source, target, shard_size=int(shard_size), like=like, begin=begin)
    files = [state for path, state in _files(target).items() if before.get(path) != state]
    size = sum(state.size for state in files)
    if as_json:
        output.print_json({"made": made, "path": target, "num_files": len(files), "num_bytes": size})
    else:
        what = {"model": "a model directory", "adapter": "an adapter of peft's", "checkpoint": "a checkpoint"}[made]
        print(f"wrote {target}: {what}, {count_text(len(files), 'file')}, {output.size_text(size, 'B')}")


class _File(NamedTuple):
    """What tells whether a file was written."""

    size: int
    number: int
    changed: int


def _files(folder: str) -> dict[Path, _File]:
    """All files in a folder, as they are now."""
    states = {path: path.stat() for path in Path(folder).rglob("*") if path.is_file()}
    return {path: _File(state.st_size, state.st_ino, state.st_mtime_ns) for path, state in states.items()}


def _layers(directory: str) -> int:
    """How many layers a model directory seems to have: for the progress bar."""
    with suppress(OSError, ValueError, AttributeError):
        return int(json.loads((Path(directory) / "config.json").read_text()).get("num_hidden_layers", 1))
    return 1


def _facts(manifest: Manifest) -> dict[str, Any]:
    """All of it as plain data."""
    optimizer = manifest.optimizer
    return {
        "step": manifest.step,
        "written_by": manifest.written_by,
        "num_parameters": sum(tensor.num_elements for tensor in manifest.under("model").values()),
        "num_bytes": sum(tensor.num_bytes for tensor in manifest.tensors.values()),
        "files": manifest.files,
        "ties": manifest.model["ties"],
        "model_type": (manifest.model["config"] or {}).get("model_type"),
        "optimizer": optimizer and {"kind": optimizer["kind"], "groups": _groups(optimizer)},
        "extra": manifest.extra,
        "tensors": {
            name: {
                "shape": tensor.shape, "dtype": tensor.dtype, "num_bytes": tensor.num_bytes,
                "num_pieces": len(tensor.pieces),
            }
            for name, tensor in manifest.tensors.items()
        },
    }  # fmt: skip


def _groups(optimizer: dict[str, Any]) -> list[dict[str, Any]]:
    numbers = Counter(optimizer["group_of"].values())
    return [{"num_parameters": numbers[i], "options": options} for i, options in enumerate(optimizer["groups"])]


def _show(path: str, manifest: Manifest, facts: dict[str, Any]) -> None:
    weights, states = manifest.under("model"), manifest.under("optim")
    step = "no step" if manifest.step is None else f"step {manifest.step}"
    kind = f" of {facts['model_type']}" if facts["model_type"] else ""
    print(
        f"{path}: {step}, {count_text(len(weights), 'tensor')}{kind}, "
        f"{count_text(facts['num_parameters'], 'parameter')}, {_size(weights)}"
    )
    there = manifest.written_by
    mesh = ", ".join(f"{name}={size}" for name, size in there["mesh"].items())
    where = f"written by {there['schedule']} ({there['placement']}) on {mesh}" if mesh else "made of a model directory"
    print(f"{where}, stages: {there['num_stages']}; zeropipe {there['zeropipe']}, torch {there['torch']}")
    if facts["optimizer"]:
        kept = ", ".join(sorted({name.rpartition(".")[2] for name in states})) or "no tensors yet"
        print(f"optimizer {facts['optimizer']['kind']}: {kept}; {count_text(len(states), 'tensor')}, {_size(states)}")
        for group in facts["optimizer"]["groups"]:
            options = ", ".join(f"{key}={_plain(value)}" for key, value in group["options"].items())
            print(f"  {count_text(group['num_parameters'], 'parameter')}: {options}")
    for name, counted in facts["ties"].items():
        print(f"{name} is {counted}")
    if facts["extra"] is not None:
        keys = sorted(map(str, facts["extra"])) if isinstance(facts["extra"], dict) else [type(facts["extra"]).__name__]
        print(f"extra: {', '.join(keys)}")
    if facts.get("checked"):
        print("every byte is as it was written")
    table = output.table("name", "number", "shape", "dtype", "size", left=("name", "dtype"))
    for (name, shape, dtype), tensors in _alike(weights).items():
        sizes = " x ".join(map(str, shape)) or "1"
        table.add_row(name, str(len(tensors)), sizes, dtype, _size(tensors))
    output.console().print(table)


def _alike(tensors: dict[str, Saved]) -> dict[tuple[str, tuple[int, ...], str], dict[str, Saved]]:
    """Tensors of different layers that are alike, together."""
    found: dict[tuple[str, tuple[int, ...], str], dict[str, Saved]] = {}
    for name, tensor in tensors.items():
        key = (re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name), tensor.shape, tensor.dtype)
        found.setdefault(key, {})[name] = tensor
    return found


def _size(tensors: dict[str, Saved]) -> str:
    return output.size_text(sum(tensor.num_bytes for tensor in tensors.values()), "B")


def _plain(value: Any) -> Any:
    """Without the marks of the file."""
    return tuple(value["value"]) if isinstance(value, dict) and isinstance(value.get("value"), list) else value
