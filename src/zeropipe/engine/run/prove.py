"""A step of a run held against the same model in one process."""

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

# the largest difference that rounding may make, of a gradient's largest entry
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-2, torch.bfloat16: 0.2}


def gradient_error(
    engine: Engine, plain: nn.Module, mine: Sequence[Microbatch], everybodys: Sequence[Microbatch]
) -> float:
    """The largest difference of any gradient from the plain model's, in parts of its largest entry.

    `mine` are the microbatches of this process's pipeline, `everybodys` those of all pipelines. EngineError if rounding
    cannot explain the difference. Gradients are gone afterwards.
    """
    loss_fn = CausalLMLoss()
    engine.train_step(mine, loss_fn)
    total = sum(loss_fn.count(microbatch) for microbatch in everybodys)
    for microbatch in everybodys:
        logits = plain(input_ids=microbatch["input_ids"], use_cache=False).logits
        (loss_fn(logits, microbatch)[0] / total).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)}
    found = max((_of_stage(stage, wanted) for _, stage in sorted(engine.stages.items())), default=(0.0, ""))
    for stage in engine.stages.values():  # when all are compared: two of them may share a weight
        stage.zero_grad()
    with engine.together("the comparison of gradients") as team:
        error, name = max(team.comm.exchange(found))
    dtype = next(plain.parameters()).dtype
    if not error <= TOLERANCES[dtype]:
        raise EngineError(f"the gradient of {name} differs by {error:.1e} from that of the plain model")
    return float(error)


def _of_stage(stage: Any, wanted: Mapping[str, Tensor | None]) -> tuple[float, str]:
    worst, names = (0.0, ""), stage.full_names()
    for name, parameter in stage.named_parameters():
        found, right = parameter.grad, wanted[names[name]]
        found = found.full_tensor() if isinstance(found, DTensor) else found
        if found is not None and right is not None:
            scale = right.abs().max().clamp_min(torch.finfo(right.dtype).tiny)
            worst = max(worst, (float((found - right).abs().max() / scale), names[name]))
        elif found is not None or right is not None:
            worst = (float("inf"), names[name])
    return worst
