"""`checkpoint inspect` and `checkpoint convert`."""

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
from zeropipe.cli.command import Group
from zeropipe.cli.options import option
from zeropipe.cli.param_types import Size
from zeropipe.cli.progress import show_steps
from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError

if TYPE_CHECKING:
    from zeropipe.engine.checkpoint.manifest import Manifest, TensorEntry


@click.group(cls=Group, short_help="Checkpoints: inspect, convert.", invoke_without_command=True)
@click.pass_context
def checkpoint(context: click.Context) -> None:
    """Inspect and convert checkpoints of `zeropipe train` and `save_checkpoint`."""
    if context.invoked_subcommand is None:
        raise ConfigError("checkpoint: no subcommand; use zeropipe checkpoint inspect PATH, or convert FROM TO")


@checkpoint.command(short_help="The contents of a checkpoint.")
@click.argument("path")
@option("--check", is_flag=True, help="Read all files, and compare them with their checksums.")
@opt.json
def inspect(path: str, check: bool, as_json: bool) -> None:
    """Show the contents of a checkpoint: tensors, step, optimizer, and the layout that wrote it.

    \b
    zeropipe checkpoint inspect runs/7/checkpoint
    zeropipe checkpoint inspect runs/7/checkpoint --check --json
    """
    from zeropipe.engine.checkpoint.manifest import read_manifest, resolve_pointer, verify_checksums

    folder = resolve_pointer(Path(path))
    manifest = read_manifest(folder)
    if check:
        with show_steps(1) as begin:
            begin(f"reading {path}")
            verify_checksums(folder, manifest)
    data = _manifest_data(manifest) | ({"checked": True} if check else {})
    if as_json:
        output.print_json(data)
    else:
        _print_manifest(str(folder), manifest, data)


@checkpoint.command(short_help="To or from a model directory.")
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
@option("--shard-size", type=Size(), default="5GB", show_default=True, help="Maximum size of a file.")
@option("--like", metavar="DIRECTORY", help="Model directory whose tokenizer is copied.")
@option("--merge", is_flag=True, help="Add an adapter to the weights of its base model, and write that model.")
@option("--base", metavar="DIRECTORY", help="Base model for --merge; by default the one of the training run.")
@opt.json
def convert(
    source: str, target: str, shard_size: float, like: str | None, merge: bool, base: str | None, as_json: bool
) -> None:
    """Convert a checkpoint to a Hugging Face model directory, or a model directory to a checkpoint.

    Only one tensor or layer is in memory at a time.

    \b
    zeropipe checkpoint convert runs/7/checkpoint my-model
    zeropipe checkpoint convert tuned/checkpoints/best my-model
    zeropipe checkpoint convert lora/checkpoints/latest my-model --merge
    zeropipe checkpoint convert my-model start
    """
    from zeropipe.engine import require_torch

    require_torch()
    from zeropipe.engine.checkpoint.convert import convert as convert_files
    from zeropipe.engine.checkpoint.manifest import MANIFEST_FILE, read_manifest, resolve_pointer

    if base is not None and not merge:
        raise ConfigError(f"--base {base}: is only for --merge; leave it out")
    folder = resolve_pointer(Path(source))
    total = (
        len(read_manifest(folder).select("model")) if (folder / MANIFEST_FILE).exists() else _read_num_layers(source)
    )
    before = _stat_files(target)
    with show_steps(total) as begin:
        kind = convert_files(source, target, shard_size=int(shard_size), like=like, begin=begin, merge=merge, base=base)
    files = [state for path, state in _stat_files(target).items() if before.get(path) != state]
    size = sum(state.size for state in files)
    if as_json:
        output.print_json({"made": kind, "path": target, "num_files": len(files), "num_bytes": size})
    else:
        what = {"model": "a model directory", "adapter": "a peft adapter", "checkpoint": "a checkpoint"}[kind]
        print(f"wrote {target}: {what}, {count_text(len(files), 'file')}, {output.size_text(size, 'B')}")


class _FileState(NamedTuple):
    """Changes when a file is written."""

    size: int
    inode: int
    modified_ns: int


def _stat_files(folder: str) -> dict[Path, _FileState]:
    """The states of all files in a folder."""
    found = {path: path.stat() for path in Path(folder).rglob("*") if path.is_file()}
    return {path: _FileState(stat.st_size, stat.st_ino, stat.st_mtime_ns) for path, stat in found.items()}


def _read_num_layers(directory: str) -> int:
    """The number of layers in a model directory's config, for the progress bar; 1 if it cannot be read."""
    with suppress(OSError, ValueError, AttributeError):
        return int(json.loads((Path(directory) / "config.json").read_text()).get("num_hidden_layers", 1))
    return 1


def _manifest_data(manifest: Manifest) -> dict[str, Any]:
    optimizer = manifest.optimizer
    return {
        "step": manifest.step,
        "written_by": manifest.written_by,
        "num_parameters": sum(tensor.num_elements for tensor in manifest.select("model").values()),
        "num_bytes": sum(tensor.num_bytes for tensor in manifest.tensors.values()),
        "files": manifest.files,
        "ties": manifest.model["ties"],
        "model_type": (manifest.model["config"] or {}).get("model_type"),
        "optimizer": optimizer and {"kind": optimizer["kind"], "groups": _groups(optimizer)},
        "extra": manifest.extra,
        "tensors": {
            name: {
                "shape": tensor.shape, "dtype": tensor.dtype, "num_bytes": tensor.num_bytes,
                "num_pieces": len(tensor.shards),
            }
            for name, tensor in manifest.tensors.items()
        },
    }  # fmt: skip


def _groups(optimizer: dict[str, Any]) -> list[dict[str, Any]]:
    numbers = Counter(optimizer["group_of"].values())
    return [{"num_parameters": numbers[i], "options": options} for i, options in enumerate(optimizer["groups"])]


def _print_manifest(path: str, manifest: Manifest, data: dict[str, Any]) -> None:
    weights, states = manifest.select("model"), manifest.select("optim")
    step = "no step" if manifest.step is None else f"step {manifest.step}"
    kind = f" of {data['model_type']}" if data["model_type"] else ""
    print(
        f"{path}: {step}, {count_text(len(weights), 'tensor')}{kind}, "
        f"{count_text(data['num_parameters'], 'parameter')}, {_size(weights)}"
    )
    writer = manifest.written_by
    mesh = ", ".join(f"{name}={size}" for name, size in writer["mesh"].items())
    where = (
        f"written by {writer['schedule']} ({writer['placement']}) on {mesh}"
        if mesh
        else "converted from a model directory"
    )
    print(f"{where}, stages: {writer['num_stages']}; zeropipe {writer['zeropipe']}, torch {writer['torch']}")
    if data["optimizer"]:
        kinds = ", ".join(sorted({name.rpartition(".")[2] for name in states})) or "no tensors yet"
        print(f"optimizer {data['optimizer']['kind']}: {kinds}; {count_text(len(states), 'tensor')}, {_size(states)}")
        for group in data["optimizer"]["groups"]:
            options = ", ".join(f"{key}={_plain(value)}" for key, value in group["options"].items())
            print(f"  {count_text(group['num_parameters'], 'parameter')}: {options}")
    for name, target in data["ties"].items():
        print(f"{name} is tied to {target}")
    if data["extra"] is not None:
        keys = sorted(map(str, data["extra"])) if isinstance(data["extra"], dict) else [type(data["extra"]).__name__]
        print(f"extra: {', '.join(keys)}")
    if data.get("checked"):
        print("all files match their checksums")
    table = output.create_table("name", "number", "shape", "dtype", "size", left=("name", "dtype"))
    for (name, shape, dtype), tensors in _group_alike(weights).items():
        sizes = " x ".join(map(str, shape)) or "1"
        table.add_row(name, str(len(tensors)), sizes, dtype, _size(tensors))
    output.console().print(table)


def _group_alike(tensors: dict[str, TensorEntry]) -> dict[tuple[str, tuple[int, ...], str], dict[str, TensorEntry]]:
    """Group tensors of different layers by name without the layer, shape and dtype."""
    found: dict[tuple[str, tuple[int, ...], str], dict[str, TensorEntry]] = {}
    for name, tensor in tensors.items():
        key = (re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name), tensor.shape, tensor.dtype)
        found.setdefault(key, {})[name] = tensor
    return found


def _size(tensors: dict[str, TensorEntry]) -> str:
    return output.size_text(sum(tensor.num_bytes for tensor in tensors.values()), "B")


def _plain(value: Any) -> Any:
    """An option's value without the manifest's type marks."""
    return tuple(value["value"]) if isinstance(value, dict) and isinstance(value.get("value"), list) else value
