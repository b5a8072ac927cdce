"""Proves on a small copy of a model that a plan spreads it right: logits and gradients equal the whole model's.

Two threads play the processes, on the CPU and without any group. What is not proven is refused.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zeropipe.engine.mesh.spreading import Sharing
from zeropipe.engine.mesh.talk import Actor, Peers, actors, part
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.verify import (
    build_small_stage,
    format_error,
    is_close,
    isolated_torch_state,
    rounding_error,
)
from zeropipe.errors import ConfigError

NUMBER = 2  # of processes: what is right for two is right for more, as long as they divide the heads
LENGTH = 8
PATIENCE = 20.0  # seconds for a thread whose peer does not exchange what it does

_known: dict[str, str | None] = {}
_rehearsed = itertools.count()


def prove(stage: HFStage, plan: Mapping[str, str], sequence: bool) -> None:
    """ConfigError unless this plan spreads a small copy of the stage's model right. Each config is looked at once."""
    config = stage.full_config
    key = json.dumps([config.to_dict(), dict(plan), sequence], sort_keys=True, default=str)
    if key not in _known:
        try:
            small = build_small_stage(config, stage.family, NUMBER)
            with isolated_torch_state():
                _known[key] = _difference(small, plan, sequence)
        except ConfigError:
            raise
        except Exception as error:
            _known[key] = f"a small copy of it does not run ({format_error(error)})"
    if (reason := _known[key]) is not None:
        way_out = "sequence_parallel" if sequence and _is_right_without(stage, plan) else "tp"
        raise ConfigError(
            f"model_type={config.model_type!r} cannot be spread over {way_out} by this plan: {reason}; leave {way_out} "
            "out, or give a plan of your own"
        )


def _is_right_without(stage: HFStage, plan: Mapping[str, str]) -> bool:
    try:
        prove(stage, plan, False)
    except ConfigError:
        return False
    return True


def _difference(small: HFStage, plan: Mapping[str, str], sequence: bool) -> str | None:
    """What a spread copy gives differently, in words."""
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % small.lm.get_input_embeddings().weight.shape[0]
    batch = {"input_ids": ids, "position_ids": torch.arange(LENGTH)[None].expand(2, -1)}
    copies = [copy.deepcopy(small) for _ in range(NUMBER)]
    small.tie()
    logits = _logits(small(**batch))
    slope = torch.randn_like(logits)
    logits.backward(slope)
    with Rehearsal() as rehearsal:
        sharings = [Sharing(one, None) for one in rehearsal.peers]
        outputs = rehearsal.run(_run, [(*pair, plan, sequence, batch, slope) for pair in zip(copies, sharings)])
    if not is_close(_put_together(outputs, -1 if outputs[0].shape != logits.shape else None), logits):
        return "it gives other logits"
    names, rounded = small.full_names(), rounding_error(parameter.grad for parameter in small.parameters())
    for name, parameter in small.named_parameters():
        gradients = [stage.get_parameter(name).grad for stage in copies]
        if parameter.grad is None and all(gradient is None for gradient in gradients):
            continue
        pieces = [torch.zeros_like(copies[i].get_parameter(name)) if g is None else g for i, g in enumerate(gradients)]
        if name in copies[0].summed_over_tp:
            found: Tensor | None = torch.stack(pieces).sum(0)
        else:
            found = _put_together(pieces, sharings[0].dimensions.get(names[name]), rounded)
        if not is_close(found, parameter.grad, rounded):
            return f"it gives another gradient of {names[name]}"
    return None


def _run(
    stage: HFStage, sharing: Sharing, plan: Mapping[str, str], sequence: bool, batch: dict[str, Tensor], slope: Tensor
) -> Tensor:
    from zeropipe.engine.mesh.tensor import spread_stage

    stage.tie()
    spread_stage(stage, plan, sharing, sequence)
    logits = _logits(stage(**batch))
    logits.backward(slope if logits.shape == slope.shape else part(slope, -1, sharing.peers))
    return logits.detach()


def _logits(output: Any) -> Tensor:
    """The loss of routers comes from what every process has whole."""
    return output[0] if isinstance(output, tuple) else output


def _put_together(pieces: Sequence[Tensor], dimension: int | None, rounded: float = 0.0) -> Tensor | None:
    """What pieces are pieces of; without a dimension all have the same."""
    if dimension is not None:
        return torch.cat(list(pieces), dimension)
    return pieces[0] if all(is_close(piece, pieces[0], rounded) for piece in pieces) else None


class _Thread(Actor):
    """One of the threads of a rehearsal."""

    def __init__(self, rehearsal: Rehearsal, place: int) -> None:
        self._rehearsal, self._place = rehearsal, place

    def everybodys(self, x: Tensor) -> list[Tensor]:
        return self._rehearsal.exchange(self._place, x)


class Rehearsal:
    """Peers that are threads of this process."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(NUMBER, timeout=PATIENCE)
        self._given: list[Tensor] = [torch.empty(0)] * NUMBER
        number = next(_rehearsed)
        self.peers = [Peers(f"rehearsal {number}, {place}", place, NUMBER) for place in range(NUMBER)]

    def __enter__(self) -> Rehearsal:
        for one in self.peers:
            actors[one.group] = _Thread(self, one.place)
        return self

    def __exit__(self, *error: object) -> None:
        for one in self.peers:
            del actors[one.group]

    def exchange(self, place: int, x: Tensor) -> list[Tensor]:
        self._given[place] = x.detach()
        self._barrier.wait()
        everybodys = list(self._given)
        self._barrier.wait()
        return everybodys

    def run(self, function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a function in threads, one for each set of arguments; the first error of any, if there is one."""
        results: list[Any] = [None] * len(calls)
        errors: list[Exception] = []

        def run(place: int) -> None:
            try:
                results[place] = function(*calls[place])
            except threading.BrokenBarrierError as error:
                errors.append(error)
            except Exception as error:
                errors.insert(0, error)
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results
