"""Master weights: optimizers for 16-bit parameters work on float32 copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zeropipe.engine.torch_private.tensors import version
from zeropipe.errors import ConfigError


class MasterWeights:
    """Runs any of torch's optimizers over float32 copies of the parameters, and writes the results back.

        main_gradients(stage, torch.float32)                  # gradients add up in float32 ...
        optimizer = MasterWeights(torch.optim.AdamW, engine.parameters(), lr=1e-5)    # ... and are used as such
        engine.train_step(...); optimizer.step(); optimizer.zero_grad()

    `parameters` are tensors or groups of them, as torch's optimizers take them. `.optimizer` is the wrapped optimizer,
    for a learning-rate scheduler. Parameters in float32 or float64 are used as they are. The next step starts from
    values that were written into a parameter between steps (`load_state_dict`, `copy_`; not through `.data`).
    """

    def __init__(
        self,
        make: Callable[..., torch.optim.Optimizer],
        parameters: Iterable[Tensor | Mapping[str, Any]],
        **options: Any,
    ) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []  # (parameter, what the optimizer updates)
        entries = list(parameters)
        if not entries:
            raise ConfigError("MasterWeights got no parameters: pass engine.parameters()")
        inside = [
            {**entry, "params": [self._master(p) for p in _listed(entry["params"])]}
            if isinstance(entry, Mapping)
            else self._master(entry)
            for entry in entries
        ]
        self.optimizer = make(inside, **options)
        self._written = self._versions()

    def _master(self, parameter: Tensor) -> Tensor:
        master = parameter
        if parameter.dtype in (torch.bfloat16, torch.float16):
            master = parameter.detach().float().requires_grad_(parameter.requires_grad)
        self._pairs.append((parameter, master))
        return master

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter, and the tensor that the wrapped optimizer updates for it."""
        self._copy_changes()
        return list(self._pairs)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Run one step of the wrapped optimizer, on gradients of any dtype."""
        copies = [(parameter, master) for parameter, master in self._pairs if parameter is not master]
        self._copy_changes()
        for parameter, master in copies:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for parameter, master in copies:
            master.grad = None
            parameter.copy_(master)
        self._written = self._versions()

    def _versions(self) -> list[int]:
        """torch's version counters; a DTensor and its local shard each have one."""
        return [
            version(parameter) + (version(parameter.to_local()) if isinstance(parameter, DTensor) else 0)
            for parameter, _ in self._pairs
        ]

    @torch.no_grad()
    def _copy_changes(self) -> None:
        """Copy values that were written into parameters to the masters; unchanged values keep their precision."""
        written = self._versions()
        for (parameter, master), before, now in zip(self._pairs, self._written, written):
            if parameter is not master and now != before:
                is_same = parameter == master.to(parameter.dtype)
                master.copy_(torch.where(is_same, master, parameter.float()))
        self._written = written

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters."""
        for parameter, _ in self._pairs:
            if parameter.grad is None:
                continue
            if set_to_none:
                parameter.grad = None
            else:
                parameter.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state and the float32 weights."""
        return {"optimizer": self.optimizer.state_dict(), "masters": [master.detach() for _, master in self.pairs]}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`; the parameters are set to its weights."""
        if len(state["masters"]) != len(self._pairs):
            raise ConfigError(
                f"this state is of {len(state['masters'])} parameters, the optimizer has {len(self._pairs)}: "
                "load it into an optimizer of the same parameters"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        for (parameter, master), saved in zip(self._pairs, state["masters"]):
            master.copy_(saved)
            parameter.copy_(master)
        self._written = self._versions()


def _listed(params: Any) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)
