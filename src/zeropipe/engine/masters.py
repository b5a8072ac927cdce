"""Master weights: optimizers for 16-bit parameters work on float32 copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from zeropipe.engine.adam import FusedAdam
from zeropipe.engine.backward.gradients import scale_grads, stash_gradients
from zeropipe.engine.low_bits import LowBits, make_chunks
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

    `low_bits`: between steps keep only those 16 bits of the copies of bfloat16 parameters that the parameters do not
    have, which needs 2 bytes per parameter less. The optimizer steps some of the parameters at a time, so it must treat
    each by itself, as AdamW, Adam, SGD and Adafactor do. A parameter that was written between steps loses these bits.
    With `fused=True`, one kernel of a GPU does the whole step of AdamW and Adam for a parameter.
    """

    def __init__(
        self,
        make: Callable[..., torch.optim.Optimizer],
        parameters: Iterable[Tensor | Mapping[str, Any]],
        *,
        low_bits: bool = False,
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
        if len({id(parameter) for parameter, _ in self._pairs}) < len(self._pairs):
            raise ConfigError("MasterWeights got a parameter twice: list each once")
        self.optimizer = make(inside, **options)
        self._chunks = self._make_chunks() if low_bits else []
        self._fused = FusedAdam.find(self.optimizer, [p for chunk in self._chunks for p, _ in chunk.pairs])
        self._written = self._versions()

    def _master(self, parameter: Tensor) -> Tensor:
        master = parameter
        if parameter.dtype in (torch.bfloat16, torch.float16):
            master = parameter.detach().float().requires_grad_(parameter.requires_grad)
        self._pairs.append((parameter, master))
        return master

    def _make_chunks(self) -> list[LowBits]:
        """The chunks of all parameters whose copies are compressed between steps."""
        pairs = [(p, m) for p, m in self._pairs if p.dtype == torch.bfloat16 and not isinstance(p, DTensor)]
        return list(make_chunks([p for p, _ in pairs], [m for _, m in pairs]))

    @property
    def _uncompressed(self) -> list[tuple[Tensor, Tensor]]:
        """The pairs that are in no chunk."""
        in_chunks = {id(parameter) for chunk in self._chunks for parameter, _ in chunk.pairs}
        return [pair for pair in self._pairs if id(pair[0]) not in in_chunks]

    @property
    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Each parameter, and the tensor that the wrapped optimizer updates for it; `compress` frees it."""
        self._copy_changes()
        for chunk in self._chunks:
            chunk.expand()
        return list(self._pairs)

    @property
    def kept(self) -> list[Tensor]:
        """What is kept of the float32 copies between steps: all bits, or the lower ones."""
        self.compress()
        masters = [master for parameter, master in self._uncompressed if parameter is not master]
        return [chunk.low for chunk in self._chunks] + masters

    def compress(self) -> None:
        """Free the float32 copies that `pairs` has made, if only their lower bits are kept between steps."""
        self._copy_changes()
        for chunk in self._chunks:
            chunk.compress()
        self._written = self._versions()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        """Run one step of the wrapped optimizer, on `factor` times the gradients, which may have any dtype.

        Gradients may be scaled in place.
        """
        self._copy_changes()
        uncompressed = self._uncompressed
        if uncompressed or not self._chunks:
            self._step_pairs(uncompressed, factor)
            for parameter, master in uncompressed:
                if parameter is not master:
                    parameter.copy_(master)
        with stash_gradients([parameter for parameter, master in uncompressed if parameter is master]):
            if self._fused is not None and self._fused.is_usable:
                for chunk in self._chunks:
                    chunk.compress()
                    self._fused.step(chunk.parts(), factor)
            else:
                for chunk in self._chunks:
                    chunk.expand()
                    self._step_pairs(chunk.pairs, factor)
                    chunk.compress()
        self._written = self._versions()

    def _step_pairs(self, pairs: Sequence[tuple[Tensor, Tensor]], factor: float) -> None:
        """Step the optimizer for those parameters only that are in `pairs`; no other one has a gradient in it."""
        copies = [(parameter, master) for parameter, master in pairs if parameter is not master]
        for parameter, master in copies:
            master.grad = None if parameter.grad is None else parameter.grad.float()
        if factor != 1:
            scale_grads([master for _, master in pairs], factor)
        self.optimizer.step()
        for _, master in copies:
            master.grad = None

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
        versions = zip(self._pairs, self._written, written)
        changed = {id(parameter) for (parameter, _), before, now in versions if now != before}
        for chunk in self._chunks:
            if not chunk.is_expanded:
                changed -= chunk.restart(changed)
        for parameter, master in self._pairs:
            if id(parameter) in changed and parameter is not master:
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
        masters = [master.detach() for _, master in self.pairs]
        return {"optimizer": self.optimizer.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict`; the parameters are set to its weights."""
        if len(state["masters"]) != len(self._pairs):
            raise ConfigError(
                f"this state is of {len(state['masters'])} parameters, the optimizer has {len(self._pairs)}: "
                "load it into an optimizer of the same parameters"
            )
        self.optimizer.load_state_dict(state["optimizer"])
        for (parameter, master), saved in zip(self.pairs, state["masters"]):
            master.copy_(saved)
            parameter.copy_(master)
        self.compress()


def _listed(params: Any) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)
