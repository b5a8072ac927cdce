"""Gradients of a step, compared with those of the full model in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zeropipe.engine.engine import Engine
from zeropipe.engine.stages.contract import Microbatch
from zeropipe.engine.step.losses import CausalLMLoss
from zeropipe.errors import EngineError

# the largest difference that rounding may cause, relative to a gradient's largest entry
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.2}


def compare_gradients(
    engine: Engine, model: nn.Module, own: Sequence[Microbatch], all_microbatches: Sequence[Microbatch]
) -> float:
    """The largest difference of any gradient from that of the full model, relative to its largest entry.

    `own` are the microbatches of this process's pipeline, `all_microbatches` those of all pipelines. EngineError if
    rounding cannot explain the difference. Gradients are cleared afterwards.
    """
    loss_fn = CausalLMLoss()
    engine.train_step(own, loss_fn)
    total = sum(loss_fn.count(microbatch) for microbatch in all_microbatches)
    for microbatch in all_microbatches:
        logits = model(input_ids=microbatch["input_ids"], use_cache=False).logits
        (loss_fn(logits, microbatch)[0] / total).backward()
    expected = {name: p.grad for name, p in model.named_parameters(remove_duplicate=False)}
    worst = max((_compare_stage(stage, expected) for _, stage in sorted(engine.stages.items())), default=(0.0, ""))
    for stage in engine.stages.values():  # after all comparisons: two stages may share a weight
        stage.zero_grad()
    with engine.together("the comparison of gradients") as team:
        error, name = max(team.comm.exchange(worst))
    dtype = next(model.parameters()).dtype
    if not error <= TOLERANCES[dtype]:
        raise EngineError(f"the gradient of {name} differs by {error:.1e} from that of the full model")
    return float(error)


def _compare_stage(stage: Any, expected: Mapping[str, Tensor | None]) -> tuple[float, str]:
    """The largest relative difference of a gradient of the stage, and the name of its parameter."""
    worst, names = (0.0, ""), stage.full_names()
    for name, parameter in stage.named_parameters():
        found, wanted = parameter.grad, expected[names[name]]
        found = found.full_tensor() if isinstance(found, DTensor) else found
        if found is not None and wanted is not None:
            scale = wanted.abs().max().clamp_min(torch.finfo(wanted.dtype).tiny)
            worst = max(worst, (float((found - wanted).abs().max() / scale), names[name]))
        elif found is not None or wanted is not None:
            worst = (float("inf"), names[name])
    return worst
