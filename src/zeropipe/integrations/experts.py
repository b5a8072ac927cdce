"""Experts of torchtitan and of AReaL's Archon, registered so that split backward defers their weight gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.backward.gated import GatedExperts, register_gated_experts

COMPUTE_DTYPE = torch.bfloat16  # of both, whatever their mixed precision is


def _cast_twice(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """torchtitan casts x for gate and for up, so the two gradients of x are added in its own dtype."""
    return x.to(COMPUTE_DTYPE), x.to(COMPUTE_DTYPE)


def _cast_once(module: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Archon casts x once, and not at all where it runs one expert after the other."""
    x = x.to(COMPUTE_DTYPE) if module.use_grouped_mm else x
    return x, x


register_gated_experts(
    "torchtitan.models.common.moe",
    "GroupedExperts",
    GatedExperts(
        names=("w1_EFD", "w2_EDF", "w3_EFD"),
        calls={"forward": {"bfloat16", "silu", "type_as"}},
        cast_inputs=_cast_twice,
    ),
)
register_gated_experts(
    "areal.experimental.models.archon.moe.grouped_experts",
    "GroupedExperts",
    GatedExperts(
        names=("w1", "w2", "w3"),
        calls={
            "forward": {"use_grouped_mm", "_run_experts_for_loop", "_run_experts_grouped_mm"},
            "_run_experts_for_loop": {"matmul", "silu"},
            "_run_experts_grouped_mm": {"bfloat16", "_grouped_mm", "silu", "type_as"},
        },
        cast_inputs=_cast_once,
    ),
)
