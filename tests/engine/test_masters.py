"""float32 copies of 16-bit parameters, whole and as the lower bits only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zeropipe.engine.low_bits as low_bits
from zeropipe.engine import MasterWeights

STEPS = 12


def make_parameters() -> list[nn.Parameter]:
    """Parameters of several shapes and dtypes; most are in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    kinds = [((7, 5), torch.bfloat16), ((3,), torch.float32), ((), torch.bfloat16), ((40, 4), torch.bfloat16),
             ((6,), torch.float16), ((2, 3, 4), torch.bfloat16), ((9,), torch.bfloat16)]  # fmt: skip
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape, dtype in kinds]


def gradients(step: int, parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return (torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters)


def train(optimizer: MasterWeights, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters, gradients(step, parameters)):
            parameter.grad = gradient if parameter.numel() != 9 or step > 3 else None  # one has none at first
        optimizer.step()
        optimizer.zero_grad()


def masters_of(optimizer: MasterWeights, parameters: list[nn.Parameter]) -> list[Tensor]:
    found = {id(parameter): master.detach().clone() for parameter, master in optimizer.pairs}
    optimizer.compress()
    return [found[id(parameter)] for parameter in parameters]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bits, "CHUNK_SIZE", 50)


KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1}, "SGD": {"lr": 1e-2, "momentum": 0.9}, "Adafactor": {"lr": 1e-2},
}  # fmt: skip


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("kind", KINDS)
def test_lower_bits_are_enough(kind: str) -> None:
    """The copies have the same bits in every step, and the parameters are the copies rounded to nearest."""
    whole, split = make_parameters(), make_parameters()
    one = MasterWeights(getattr(torch.optim, kind), whole, **KINDS[kind])
    other = MasterWeights(getattr(torch.optim, kind), split, low_bits=True, **KINDS[kind])
    for step in range(STEPS):
        train(one, whole, range(step, step + 1))
        train(other, split, range(step, step + 1))
        for a, b, p in zip(masters_of(one, whole), masters_of(other, split), split):
            assert torch.equal(a, b)
            # halves of a unit in the last place are rounded up here, and to even by torch
            assert torch.equal(p, b.to(p.dtype)) or torch.equal(p, torch.nextafter(b, b * 2).to(p.dtype))


def test_memory_between_steps() -> None:
    parameters = [nn.Parameter(torch.randn(64, 64).bfloat16()) for _ in range(3)]
    optimizer = MasterWeights(torch.optim.AdamW, parameters, low_bits=True)
    train(optimizer, parameters, range(1))
    copies = [p for group in optimizer.param_groups for p in group["params"]]
    assert sum(c.untyped_storage().nbytes() for c in copies) < 64
    optimizer.pairs  # noqa: B018  (gives the copies their values)
    assert all(c.untyped_storage().nbytes() >= 64 * 64 * 4 for c in copies)
    optimizer.compress()
    assert sum(c.untyped_storage().nbytes() for c in copies) < 64


@pytest.mark.usefixtures("small_chunks")
def test_state_continues_a_run() -> None:
    straight, resumed = make_parameters(), make_parameters()
    one = MasterWeights(torch.optim.AdamW, straight, low_bits=True, lr=1e-2)
    train(one, straight, range(STEPS))
    first = MasterWeights(torch.optim.AdamW, resumed, low_bits=True, lr=1e-2)
    train(first, resumed, range(5))
    second = MasterWeights(torch.optim.AdamW, resumed, low_bits=True, lr=1e-2)
    second.load_state_dict(first.state_dict())
    train(second, resumed, range(5, STEPS))
    assert all(map(torch.equal, masters_of(one, straight), masters_of(second, resumed)))


def test_a_parameter_that_is_written_between_steps() -> None:
    parameters = [nn.Parameter(torch.randn(8, 8).bfloat16()) for _ in range(2)]
    optimizer = MasterWeights(torch.optim.SGD, parameters, low_bits=True, lr=1e-4)
    train(optimizer, parameters, range(3))
    before = masters_of(optimizer, parameters)
    new = torch.randn(8, 8).bfloat16()
    with torch.no_grad():
        parameters[0].copy_(new)
    after = masters_of(optimizer, parameters)
    assert torch.equal(after[0], new.float())
    assert torch.equal(after[1], before[1])


def test_extreme_values_survive() -> None:
    bits = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0x3F7FFFFF, 0x7F7FFFFF, 0x7F800000, -0x80000000, -1 - 0x7FFFFF],
                        dtype=torch.int32)  # fmt: skip
    high, low = low_bits.split(bits.view(torch.float32))
    assert torch.equal(low_bits.join(high, low).view(torch.int32), bits)
