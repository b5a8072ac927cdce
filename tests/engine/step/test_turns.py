"""Two computations of one process that take turns, without an engine."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from zeropipe.engine.backward import turn_times, turns
from zeropipe.engine.backward.splitters import BackwardPass, StoreSplitter
from zeropipe.engine.backward.turn_times import (
    BACKWARD,
    COMBINE,
    DISPATCH,
    FORWARD,
    WEIGHTS,
    TurnTimes,
    share_to_delay,
)
from zeropipe.engine.backward.vectors import VectorGradients
from zeropipe.engine.comm.threads import HelperThread
from zeropipe.engine.step.overlaps import take_turns

CPU = torch.device("cpu")


@pytest.fixture
def helper():
    thread = HelperThread()
    yield thread
    thread.close()
    for one in thread.threads:
        one.join(10)
        assert not one.is_alive()


def talk(log, name, number):
    """A computation with a number of turns."""

    def run():
        for index in range(number):
            log.append(f"{name}{index}")
            turns.turn()
        log.append(f"{name}!")

    return run


@pytest.mark.parametrize(
    "f, b, words",
    [
        (2, 2, "b0 f0 b1 f1 b! f!"), (0, 2, "b0 f! b1 b!"), (3, 1, "b0 f0 b! f1 f2 f!"), (1, 3, "b0 f0 b1 f! b2 b!"),
        (2, 0, "b! f0 f1 f!"),
    ],
)  # fmt: skip
def test_one_computes_at_a_time_and_the_backward_is_first(helper, f, b, words):
    log = []
    call = take_turns(talk(log, "f", f), talk(log, "b", b), nn.Identity(), helper, CPU, TurnTimes(CPU))
    for _ in range(3):
        log.clear()
        call()
        assert " ".join(log) == words
    assert turns.running() is None
    assert len(helper.threads) == 1


def test_the_forward_is_on_the_main_thread(helper):
    threads = []

    def run():
        threads.append(threading.current_thread())
        turns.turn()

    take_turns(run, run, nn.Identity(), helper, CPU, TurnTimes(CPU))()
    assert threads == [helper.threads[0], threading.main_thread()]


@pytest.mark.parametrize("when", range(3))
@pytest.mark.parametrize("culprit", ["forward", "backward"])
def test_an_error_ends_both(helper, culprit, when):
    log = []

    def fail():
        for _ in range(when):
            turns.turn()
        raise ValueError("no way on")

    ended = []

    def other():
        try:
            talk(log, "o", 5)()
        finally:
            ended.append(True)

    sides = (fail, other) if culprit == "forward" else (other, fail)
    with pytest.raises(ValueError, match="no way on"):
        take_turns(*sides, nn.Identity(), helper, CPU, TurnTimes(CPU))()
    assert "o!" not in log
    assert turns.running() is None
    if log:
        assert ended == [True]
    log.clear()
    take_turns(talk(log, "f", 1), talk(log, "b", 1), nn.Identity(), helper, CPU, TurnTimes(CPU))()
    assert log == ["b0", "f0", "b!", "f!"]


def test_without_turns_nothing_comes_in_between(helper):
    log = []

    def backward():
        with turns.without_turns():
            talk(log, "b", 2)()
        turns.turn()
        log.append("end")

    take_turns(talk(log, "f", 1), backward, nn.Identity(), helper, CPU, TurnTimes(CPU))()
    assert log == ["b0", "b1", "b!", "f0", "end", "f!"]


def test_each_has_its_own_random_numbers(helper):
    """A backward that recomputes a block restores the state of its forward, and may hand over inside."""

    def draw(found, number=3):
        for _ in range(number):
            found.append(float(torch.rand(())))
            turns.turn()

    def recompute(found):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            draw(found)

    expected, found = ([], []), ([], [])
    torch.manual_seed(3)
    recompute(expected[1])
    draw(expected[0])
    after = torch.rand(())
    torch.manual_seed(3)
    take_turns(lambda: draw(found[0]), lambda: recompute(found[1]), nn.Identity(), helper, CPU, TurnTimes(CPU))()
    assert found == expected
    assert torch.equal(torch.rand(()), after)


def test_what_a_running_forward_collects_is_its_own(helper):
    module = nn.Identity()
    module.running_state = None
    seen = []

    def forward():
        module.running_state = ["f"]
        turns.turn()
        seen.append(module.running_state)
        module.running_state = None

    def backward():
        seen.append(module.running_state)
        turns.turn()
        seen.append(module.running_state)

    take_turns(forward, backward, module, helper, CPU, TurnTimes(CPU))()
    assert seen == [None, None, ["f"]]


class Exchange(torch.autograd.Function):
    """The identity; its backward hands over as if it waited for a message."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        turns.turn()
        return dy


def test_weight_gradients_are_computed_while_a_message_is_under_way(helper):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    model, plain = nn.Module(), [nn.Linear(4, 4, bias=False) for _ in range(3)]
    model.layers = nn.ModuleList(layers)
    for one, other in zip(plain, layers):
        one.weight.data.copy_(other.weight.data)
    splitter, x = StoreSplitter(deferring=True), torch.randn(5, 4)
    splitter.prepare(0, model)
    there = []

    def run(layers):
        y = x.clone().requires_grad_()
        for layer in layers:
            y = layer(Exchange.apply(y))
        return y.square().sum()

    def forward():
        for _ in range(3):
            there.append([layer.weight.grad is not None for layer in layers])
            turns.turn()

    run(plain).backward()
    splitter_pass = BackwardPass(0, 0, model, [run(layers)], None, [], VectorGradients(model.parameters))
    take_turns(forward, lambda: splitter.backward(splitter_pass), nn.Identity(), helper, CPU, TurnTimes(CPU))()
    assert there == [[False, False, True], [False, True, True], [True, True, True]]
    for one, other in zip(plain, layers):
        assert torch.equal(one.weight.grad, other.weight.grad)


def test_weight_gradients_that_are_delayed_run_at_the_next_message(helper):
    torch.manual_seed(0)
    model, plain = (nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4))) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    splitter, x, seen = StoreSplitter(deferring=True), torch.randn(5, 4), []
    splitter.prepare(0, model)
    times = TurnTimes(CPU)
    times.delayed = 0.5

    class Message(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            return x.view_as(x)

        @staticmethod
        def backward(ctx, dy):
            turns.turn(message=ctx.name)
            seen.append([layer.weight.grad is not None for layer in model])
            return dy, None

    def run(layers):
        y = Message.apply(x.clone().requires_grad_(), COMBINE)
        y = Message.apply(layers[1](layers[0](y)), DISPATCH)
        return layers[3](layers[2](y)).square().sum()

    run(plain).backward()
    seen.clear()
    backward = BackwardPass(0, 0, model, [run(model)], None, [], VectorGradients(model.parameters))
    take_turns(lambda: None, lambda: splitter.backward(backward), nn.Identity(), helper, CPU, times)()
    assert seen == [[False, False, False, True], [True] * 4]
    for one, other in zip(plain, model):
        assert torch.equal(one.weight.grad, other.weight.grad)


@pytest.mark.parametrize(
    "experts, weights, attention, share",
    [(9.0, 9.0, 0.3, 1.0), (4.6, 3.54, 16.1, 0.02), (5.0, 5.0, 13.0, 0.47), (1.0, 1.0, 9.0, 0.0), (5.0, 0.0, 1.0, 0.0)],
)
def test_weight_gradients_of_experts_go_where_less_is_computed(experts, weights, attention, share):
    forward, backward, own = attention * 0.3, attention * 0.5, attention * 0.2
    seconds = {
        (FORWARD, DISPATCH): experts, (WEIGHTS, DISPATCH): weights, (FORWARD, COMBINE): forward,
        (BACKWARD, DISPATCH): backward, (WEIGHTS, COMBINE): own,
    }  # fmt: skip
    assert share_to_delay(seconds) == pytest.approx(share, abs=0.01)


def test_computations_between_messages_are_measured_in_the_second_step(helper, monkeypatch):
    times, now = TurnTimes(CPU), [0.0]
    monkeypatch.setattr(turn_times, "mark_time", lambda device: now[0])

    def side(seconds):
        def run():
            for message in (DISPATCH, COMBINE):
                turns.turn(message=message)
                turns.resume(message)
                now[0] += seconds
            turns.turn()

        return run

    for step in range(3):
        times.begin_step()
        assert (times.seconds != {}) == (step == 2)
        take_turns(side(0.02), side(0.05), nn.Identity(), helper, CPU, times)()
    assert times.seconds == pytest.approx(
        {(side, message): 0.05 if side == BACKWARD else 0.02 for side in (BACKWARD, FORWARD)
         for message in (DISPATCH, COMBINE)}
    )  # fmt: skip
