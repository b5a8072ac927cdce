"""Overlaps whose F and B take turns: at every exchange of one of them, the other one computes."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.backward.turn_times import BACKWARD, FORWARD, TurnTimes
from zeropipe.engine.backward.turns import Stopped, Switched, Turns, taking
from zeropipe.engine.comm.threads import HelperThread
from zeropipe.engine.step.cell_runner import Call

STOP_S = 1.0  # that a backward may take to end after its forward has failed


def take_turns(
    forward: Call, backward: Call, module: nn.Module, helper: HelperThread, device: torch.device, times: TurnTimes
) -> Call:
    """One call for the F and the B of an Overlap: B on the helper thread, and first. `module` is the stage of F."""
    switched: list[Switched] = [_RandomState(device)]
    if hasattr(module, "running_state"):
        switched.append(_RunningState(module))
    return partial(_run, forward, backward, switched, helper, device, times)


def _run(
    forward: Call,
    backward: Call,
    switched: Sequence[Switched],
    helper: HelperThread,
    device: torch.device,
    times: TurnTimes,
) -> None:
    turns, ended, errors = Turns(times, switched), threading.Lock(), list[BaseException]()
    ended.acquire()

    def run_first() -> None:
        failed = True
        try:
            backward()
            failed = False
        except Stopped:
            pass
        except BaseException as error:
            errors.append(error)
        finally:
            turns.end(BACKWARD, failed)
            ended.release()

    with taking(turns):
        helper.start(_with_settings_of_this_thread(run_first, device))
        has_failed = True
        try:
            turns.wait_for_first()
            forward()
            has_failed = False
        except Stopped:  # B has the error
            has_failed = False
        finally:
            turns.end(FORWARD, has_failed)
            state = turns.get_state()
            ended.acquire(timeout=STOP_S if has_failed else -1)
            turns.set_state(state)
    if errors:
        error = errors.pop()
        try:
            raise error
        finally:
            del error  # it refers to this frame


def _with_settings_of_this_thread(call: Call, device: torch.device) -> Call:
    """A call for another thread, with this one's context, device, stream and autocast."""
    context, stream = contextvars.copy_context(), None
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
    autocasts = [
        torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=torch.is_autocast_cache_enabled())
        for kind in {"cpu", device.type}
        if torch.is_autocast_enabled(kind)
    ]

    def run() -> None:
        with ExitStack() as stack:
            if stream is not None:
                torch.cuda.set_device(device)
                stack.enter_context(torch.cuda.stream(stream))
            for autocast in autocasts:
                stack.enter_context(autocast)
            call()

    return partial(context.run, run)


class _RandomState:
    """The states of random generators: a block that is recomputed has those of its first forward."""

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index])

    def get(self) -> list[Tensor]:
        return [generator.get_state() for generator in self._generators]

    def set(self, state: Sequence[Tensor]) -> None:
        for generator, one in zip(self._generators, state):
            generator.set_state(one)


class _RunningState:
    """What a stage collects while its forward runs, which is not for blocks that a backward recomputes."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def get(self) -> Any:
        return self._module.running_state

    def set(self, state: Any) -> None:
        self._module.running_state = state
