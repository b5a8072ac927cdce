"""Steps of Adam and AdamW that read and write each number once, for bfloat16 parameters with compressed copies.

For optimizers that torch would step with `fused=True`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.low_bits import LowBits, Part, join
from zeropipe.engine.torch_private.optimizers import has_step_hooks, mark_stepped

KINDS = (torch.optim.Adam, torch.optim.AdamW)
_STEPS, _TOLERANCE = 3, 1e-6  # of the comparison with torch's own

UpdateParameter = Callable[..., None]  # as adam_kernel.step


class FusedAdam:
    """Does the steps of one of torch's optimizers, whose state and options it uses."""

    def __init__(self, optimizer: torch.optim.Optimizer, update: UpdateParameter) -> None:
        self._optimizer, self._update = optimizer, update

    @staticmethod
    def find(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> FusedAdam | None:
        """That of an optimizer over copies of these parameters; None if torch must do the steps."""
        if type(optimizer) not in KINDS or not parameters:
            return None
        if any(p.device.type != "cuda" or not p.is_contiguous() for p in parameters):
            return None
        update = _find_kernel(parameters[0].device)
        return None if update is None else FusedAdam(optimizer, update)

    @property
    def is_usable(self) -> bool:
        """Whether the optimizer's present options are those that the kernel knows, and it has no hooks."""
        return not has_step_hooks(self._optimizer) and all(
            group["fused"]
            and not (group["amsgrad"] or group["maximize"] or group["differentiable"])
            and not any(isinstance(number, Tensor) for number in (group["lr"], *group["betas"]))
            for group in self._optimizer.param_groups
        )

    @torch.no_grad()
    def step(self, parts: Sequence[Part], factor: float) -> None:
        """Update the parameters that have a gradient, with `factor` times it."""
        for group in self._optimizer.param_groups:
            copies = {id(copy) for copy in group["params"]}
            own = [part for part in parts if id(part.copy) in copies and part.parameter.grad is not None]
            if own:
                self._step_group(group, own, factor)
        mark_stepped(self._optimizer)

    def _step_group(self, group: Mapping[str, Any], parts: Sequence[Part], factor: float) -> None:
        states = [self._state(part) for part in parts]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        corrections, options = _corrections(torch.stack(steps), *group["betas"]), _options(group)
        with torch.cuda.device_of(parts[0].parameter):
            for part, state, numbers in zip(parts, states, corrections):
                grad: Any = part.parameter.grad
                self._update(
                    part.parameter.detach().view(torch.int16), part.low, grad.contiguous(), state["exp_avg"],
                    state["exp_avg_sq"], numbers, factor=factor, **options,
                )  # fmt: skip

    def _state(self, part: Part) -> dict[str, Any]:
        """The optimizer's state of a parameter, made as torch makes it with `fused`, and contiguous."""
        state = self._optimizer.state[part.copy]
        kind: dict[str, Any] = {"dtype": torch.float32, "device": part.parameter.device}
        if not state:
            state["step"] = torch.zeros((), **kind)
            state["exp_avg"], state["exp_avg_sq"] = (torch.zeros(part.parameter.shape, **kind) for _ in range(2))
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].contiguous()
        return state


def _corrections(steps: Tensor, beta1: float, beta2: float) -> Tensor:
    """1 - beta1**t and sqrt(1 - beta2**t) for each number of steps."""
    numbers = steps.double()
    return torch.stack([1 - beta1**numbers, (1 - beta2**numbers).sqrt()], 1).float()


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "lr": float(group["lr"]), "betas": tuple(group["betas"]), "eps": group["eps"],
        "weight_decay": group["weight_decay"], "decoupled": bool(group.get("decoupled_weight_decay")),
    }  # fmt: skip


@cache
def _find_kernel(device: torch.device) -> UpdateParameter | None:
    """The kernel, if it is here and has torch's results."""
    if torch.version.hip is not None or find_spec("triton") is None:
        return None
    from zeropipe.engine.adam_kernel import step

    return step if all(has_torchs_results(step, kind, device) for kind in KINDS) else None


def has_torchs_results(update: UpdateParameter, kind: type[torch.optim.Optimizer], device: torch.device) -> bool:
    """Whether parameters and state after some steps are those of torch's optimizer, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    size, options = 3001, {"lr": 1e-2, "weight_decay": 0.1, "fused": True}
    weight = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(device)
    parameter, theirs, copy = weight.bfloat16(), *(weight.bfloat16().float().requires_grad_() for _ in range(2))
    chunk = LowBits([parameter], [copy])
    wanted, optimizer = kind([theirs], **options), kind([copy], **options)
    ours = FusedAdam(optimizer, update)
    for _ in range(_STEPS):
        parameter.grad = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(parameter)
        theirs.grad = parameter.grad.float() * 0.5
        ours.step(chunk.parts(), 0.5)
        wanted.step()
    full = join(parameter.view(torch.int16), chunk.low)
    states = (optimizer.state[copy], wanted.state[theirs])
    pairs = [(full, theirs.detach()), *((states[0][name], states[1][name]) for name in ("exp_avg", "exp_avg_sq"))]
    return all(bool((one - other).abs().max() <= _TOLERANCE * other.abs().max()) for one, other in pairs)
