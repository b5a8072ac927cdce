"""Steps of Adam as one kernel, on GPUs; what surrounds the kernel is tested with the same formula in torch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import zeropipe.engine.low_bits as low_bits
from zeropipe.engine import MasterWeights
from zeropipe.engine.adam import KINDS, FusedAdam, has_torchs_results
from zeropipe.engine.low_bits import join, split
from zeropipe.errors import ConfigError

SIZES = [(7, 9), (64,), (3, 5, 4), (1,), (40, 2)]
STEPS = 6


def update(
    high, low, grad, average, square, corrections, *, factor, lr, betas, eps, weight_decay, decoupled, worse=1.0
):
    """The kernel's formula."""
    weight, gradient = join(high, low), grad.float() * factor
    if decoupled:
        weight -= lr * weight_decay * weight
    else:
        gradient = gradient + weight_decay * weight
    average.lerp_(gradient, 1 - betas[0])
    square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
    weight -= worse * lr / corrections[0] * average / (square.sqrt() / corrections[1] + eps)
    for target, found in zip((high, low), split(weight)):
        target.copy_(found)


def slightly_wrong(*tensors: Tensor, **options: Any) -> None:
    update(*tensors, **options, worse=1.01)


def parameters_on(device: str) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).bfloat16().to(device)) for size in SIZES]


def groups_of(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "weight_decay": 0.0, "lr": 3e-3}]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step + 1)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        dtype = torch.bfloat16 if number == 0 else torch.float32
        parameter.grad_dtype = None  # any
        parameter.grad = None if number == 2 and step < 2 else gradient.to(dtype)  # one has none at first


def masters_of(optimizer: MasterWeights) -> list[Tensor]:
    found = [master.detach().clone() for _, master in optimizer.pairs]
    optimizer.compress()
    return found


def both(kind: type[torch.optim.Optimizer], device: str) -> tuple[MasterWeights, MasterWeights, list[Any], list[Any]]:
    """An optimizer that steps with the kernel (on a CPU: with its formula), and one with torch's own steps."""
    ours, theirs = parameters_on(device), parameters_on(device)
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6, "fused": True}
    one = MasterWeights(kind, groups_of(ours), low_bits=True, **options)
    other = MasterWeights(kind, groups_of(theirs), low_bits=True, **options)
    if device == "cpu":
        assert one._fused is None
        one._fused = FusedAdam(one.optimizer, update)
    assert one._fused is not None
    other._fused = None
    return one, other, ours, theirs


def require_equal(one: MasterWeights, other: MasterWeights) -> None:
    for a, b in zip(masters_of(one), masters_of(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"))])  # fmt: skip
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(low_bits, "CHUNK_SIZE", 100)
    return str(request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_torch(device: str, kind: type[torch.optim.Optimizer]) -> None:
    one, other, ours, theirs = both(kind, device)
    for step in range(STEPS):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        factor = 0.25 if step % 2 else 1.0
        one.step(factor)
        other.step(factor)
        require_equal(one, other)
    states = zip(one.state_dict()["optimizer"]["state"].values(), other.state_dict()["optimizer"]["state"].values())
    for mine, wanted in states:
        assert mine.keys() == wanted.keys()
        for name in mine:
            torch.testing.assert_close(mine[name].cpu(), wanted[name].cpu(), rtol=1e-5, atol=1e-8)


def test_state_goes_from_one_to_the_other(device: str) -> None:
    one, other, ours, theirs = both(torch.optim.AdamW, device)
    for step in range(3):
        give_gradients(ours, step)
        one.step()
    other.load_state_dict(deepcopy(one.state_dict()))
    one.load_state_dict(deepcopy(other.state_dict()))
    for step in range(3, STEPS):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        one.step()
        other.step()
    require_equal(one, other)


def test_options_that_the_kernel_does_not_know_are_left_to_torch() -> None:
    parameters = parameters_on("cpu")
    for options in ({"amsgrad": True}, {"maximize": True}, {"lr": torch.tensor(1e-3)}, {"fused": None}):
        optimizer = torch.optim.AdamW([p.detach().float() for p in parameters], **{"fused": True} | options)
        assert not FusedAdam(optimizer, update).is_usable
    optimizer = torch.optim.AdamW([p.detach().float() for p in parameters], fused=True)
    assert FusedAdam(optimizer, update).is_usable
    hook = register_optimizer_step_pre_hook(lambda *args: None)
    assert not FusedAdam(optimizer, update).is_usable
    hook.remove()
    assert FusedAdam(optimizer, update).is_usable
    optimizer.register_step_pre_hook(lambda *args: None)
    assert not FusedAdam(optimizer, update).is_usable


@pytest.mark.filterwarnings("error:.*lr_scheduler.step.*")
def test_a_scheduler_of_rates_knows_of_the_steps() -> None:
    one, *_, ours, _ = both(torch.optim.AdamW, "cpu")
    scheduler = torch.optim.lr_scheduler.LinearLR(one.optimizer)
    give_gradients(ours, 0)
    one.step()
    scheduler.step()


def test_state_is_that_of_torch_whatever_the_defaults_are() -> None:
    one, *_, ours, _ = both(torch.optim.AdamW, "cpu")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        give_gradients(ours, 0)
        one.step()
        assert has_torchs_results(update, torch.optim.AdamW, torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    states = [state for state in one.optimizer.state.values() if state]
    assert {value.dtype for state in states for value in state.values()} == {torch.float32}


def test_a_parameter_in_two_groups_is_refused() -> None:
    (parameter, *_) = parameters_on("cpu")
    with pytest.raises(ConfigError, match="got a parameter twice"):
        MasterWeights(torch.optim.AdamW, [{"params": [parameter]}, {"params": [parameter]}])


def test_a_kernel_with_other_results_is_not_used() -> None:
    device = torch.device("cpu")
    assert all(has_torchs_results(update, kind, device) for kind in KINDS)
    assert not any(has_torchs_results(slightly_wrong, kind, device) for kind in KINDS)
