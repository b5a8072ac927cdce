"""Context parallelism: every process of `cp` has a part of every sequence, of all layers of its stages.

Weights are the same on all of them. Each process has the gradients of its own tokens, which the engine sums once per
step (`COPY_DIMENSIONS`).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from zeropipe.core.model.cp_exchange import GATHER, RING
from zeropipe.engine.mesh import ring_attention
from zeropipe.engine.mesh.cp_attention import has_copied_keys, require_exchange
from zeropipe.engine.mesh.cp_check import check_parts, explain_refusal
from zeropipe.engine.mesh.cp_stage import split_stage
from zeropipe.engine.mesh.tp_collectives import TPGroup
from zeropipe.engine.stages import slice_attention
from zeropipe.engine.stages.hf import HFStage
from zeropipe.errors import ConfigError


def has_graph_breaks(stage: Any) -> bool:
    """Whether attention of a stage cannot be compiled with its blocks: in slices, and round a ring."""
    if not isinstance(stage, HFStage):
        return False
    return stage.slices is not None or (stage.context is not None and stage.context.exchange == RING)


def enable_graph_breaks() -> None:
    """Let blocks be compiled around attention in slices and round a ring."""
    slice_attention.attend.enable()
    ring_attention.attend_around_ring.enable()


def apply_cp(stages: Iterable[Any], mesh: DeviceMesh, exchange: str, tp: int, sequence: int | None = None) -> None:
    """Let stages run this process's part of every sequence, in place. It is checked on a small copy first.

    `exchange`: how attention gets what it needs of the other tokens; "auto" chooses by the length of a `sequence`.
    `tp`: over how many processes heads are divided.
    """
    group = TPGroup.from_mesh(mesh)
    for stage in stages:
        if not isinstance(stage, HFStage):
            raise ConfigError(f"cp={mesh.size()} needs stages of a Hugging Face model (hf_stages); leave out cp")
        if stage.context is not None:
            raise ConfigError("a stage is already divided over cp; call parallelize() once")
        split_stage(stage, group, find_exchange(stage, exchange, tp, group.size, sequence))


def find_exchange(stage: HFStage, exchange: str, tp: int, cp: int, sequence: int | None) -> str:
    """The exchange of a stage, checked. Where "auto" would choose a ring that the model cannot have, keys are gathered.

    A warning says why.
    """
    config = stage.full_config
    crosses = cp * tp > int(os.environ.get("LOCAL_WORLD_SIZE", cp * tp))
    name, no_ring = require_exchange(exchange, config, tp, cp, sequence, crosses=crosses)
    if name == RING and exchange == "auto":
        no_ring = explain_refusal(stage, RING)
        name = GATHER if no_ring else RING
    if no_ring:
        warnings.warn(
            f"model_type={config.model_type!r}: keys and values of cp={cp} are gathered, not passed round a ring: "
            f"{no_ring}",
            stacklevel=2,
        )
    check_parts(stage, name, has_copied_keys(config, tp, cp))
    return name
