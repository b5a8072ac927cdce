"""What frozen weights do not need: no input is kept for their gradient, and none is computed."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("transformers")

import torch
from engine_helpers import TOLERANCE, error_of
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from zeropipe.engine import WeightStore, defer

TOKENS, HIDDEN, INNER, EXPERTS = 12, 8, 16, 4


class Kept:
    """The bytes that a forward keeps for its backward, without parameters; each memory once."""

    def __init__(self, module: nn.Module) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._kept: dict[int, Tensor] = {}

    def __enter__(self) -> Kept:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _keep(self, tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in self._own:
            self._kept[pointer] = tensor
        return tensor

    @property
    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self._kept.values())


def make_experts(kind: str) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    config = (MixtralConfig if kind == "mixtral" else GptOssConfig)(**sizes)
    config._experts_implementation = "eager"
    made = (MixtralExperts if kind == "mixtral" else GptOssExperts)(config).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def run(experts: nn.Module) -> tuple[Tensor, Tensor, Kept, int]:
    """The output and the gradient of a trained input; what was kept; the products that wait for W."""
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    x, index, weights = 2 * hidden, torch.randint(EXPERTS, (TOKENS, 2)), torch.rand(TOKENS, 2, dtype=torch.float64)
    store = WeightStore()
    with Kept(experts) as kept:
        y = experts(x, index, weights)
    with store.collect(0, 0):
        y.sin().sum().backward()
    return y.detach(), hidden.grad, kept, len(store.pending_parameters(0, 0))


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_frozen_experts_keep_no_inputs_and_compute_no_gradient(kind):
    plain = make_experts(kind)
    trained, frozen = copy.deepcopy(plain), copy.deepcopy(plain).requires_grad_(False)
    for module in (trained, frozen):
        defer(module)
    wanted, wanted_gradient, *_ = run(plain.requires_grad_(False))
    y, gradient, kept, products = run(frozen)
    assert max(error_of(y, wanted), error_of(gradient, wanted_gradient)) < TOLERANCE
    *_, kept_for_training, trained_products = run(trained)
    assert (products, trained_products) == (0, 2)
    rows = 2 * TOKENS
    inputs = rows * (HIDDEN + INNER) * 8  # of the two products
    assert kept_for_training.bytes - kept.bytes >= inputs


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_frozen_linear_layer_keeps_nothing(needs_gradient):
    layer = nn.Linear(HIDDEN, INNER).requires_grad_(False)
    defer(layer)
    x = 2 * torch.randn(TOKENS, HIDDEN, requires_grad=needs_gradient)
    with Kept(layer) as kept:
        y = layer(x)
    assert kept.bytes == 0
    assert y.requires_grad == needs_gradient
