"""What the local ranks run in test_frozen.py."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from mesh_cases import llama, mesh_of, shard
from torch import Tensor, nn

import zeropipe as zp
from zeropipe.engine import Engine, hf_stages, load_checkpoint, module_stages, parallelize, save_checkpoint
from zeropipe.engine.checkpoint import fingerprint, save
from zeropipe.engine.checkpoint.manifest import read_manifest
from zeropipe.errors import ConfigError


class Beside(nn.Module):
    """A frozen layer beside one that is trained, of odd sizes."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.fixed = nn.Linear(5, 6).requires_grad_(False)
        self.learned = nn.Linear(5, 6, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.fixed(x) + self.learned(x))[..., 1:]


def modules_on(sizes: dict[str, int], dtype: torch.dtype, change: str | None) -> tuple[Any, Any, Any]:
    mesh = mesh_of(sizes)
    schedule = zp.build("1f1b", ranks=sizes.get("pp", 1), microbatches=2)
    blocks = [Beside(seed, dtype) for seed in range(4)]
    if change is not None:
        changed(dict(nn.ModuleList(blocks).named_parameters()), "0.fixed.weight", "2.fixed.weight", change)
    stages = module_stages(blocks, schedule, mesh["pp"].get_local_rank() if "pp" in sizes else 0)
    if "dp_shard" in sizes:
        shard(stages, mesh)
    return schedule, stages, mesh


def llama_on(sizes: dict[str, int], dtype: torch.dtype, change: str | None) -> tuple[Any, Any, Any]:
    mesh = mesh_of(sizes)
    schedule = zp.build("1f1b", ranks=sizes.get("pp", 1), microbatches=2)
    rank = mesh["pp"].get_local_rank() if "pp" in sizes else 0
    stages = hf_stages(llama(tie_word_embeddings=True), schedule, rank, dtype=dtype)
    for stage in stages.values():
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_("norm" in name)
        if change is not None and 0 in stage.layers:
            names = [f"lm.model.layers.0.self_attn.{one}_proj.weight" for one in "kv"]
            changed(dict(stage.named_parameters()), *names, change)
    return schedule, parallelize(stages, mesh), mesh


MODELS = {"modules": modules_on, "llama": llama_on}


def changed(parameters: dict[str, Tensor], name: str, other: str, how: str) -> None:
    """The same numbers in another order, with other signs, or one number a little different."""
    with torch.no_grad():
        values = parameters[name].clone()
        if how == "rows":
            parameters[name].copy_(values.flip(0))
        elif how == "columns":
            parameters[name].copy_(values.flip(1))
        elif how == "signs":
            parameters[name].neg_()
        elif how == "swapped":
            parameters[name].copy_(parameters[other])
            parameters[other].copy_(values)
        elif how == "one":
            parameters[name].view(torch.uint8)[-1, -1] ^= 1


def saved(model: str, sizes: dict[str, int], dtype: torch.dtype, path: str, old: bool = False) -> str:
    """Save without the frozen weights; their fingerprint. `old`: as older versions wrote it."""
    schedule, stages, mesh = MODELS[model](sizes, dtype, None)
    with Engine(schedule, stages, mesh=mesh) as engine:
        with mock.patch.object(save, "compute_fingerprint", in_version_1 if old else fingerprint.compute_fingerprint):
            save_checkpoint(path, engine, frozen=False)
        dist.barrier()
        return str(read_manifest(Path(path)).model["base"])


def in_version_1(comm: Any, catalog: Any) -> str:
    """A plain sum of the bits of each piece, as integers of 32 bits where they divide."""

    def bits(piece: Tensor, offsets: Any) -> int:
        flat = piece.detach().contiguous().reshape(-1).view(torch.uint8)
        whole = flat.view(torch.int32) if flat.numel() % 4 == 0 else flat.view(torch.int16)
        return int(whole.sum(dtype=torch.int64))

    sums = fingerprint._sum_over_ranks(comm, catalog, bits)
    facts = [(d.name, d.shape, d.dtype, sums[d.name]) for d in catalog.infos.values() if d.is_frozen]
    return fingerprint._digest(facts)


def loaded(model: str, sizes: dict[str, int], dtype: torch.dtype, path: str, change: str | None) -> str:
    """What is said about a checkpoint of the same model, or of one that was changed: an error, a warning or nothing."""
    schedule, stages, mesh = MODELS[model](sizes, dtype, change)
    with Engine(schedule, stages, mesh=mesh) as engine, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            load_checkpoint(path, engine)
        except ConfigError as error:
            return f"refused: {error}"
        return "; ".join(str(one.message) for one in told if "fingerprint" in str(one.message))
