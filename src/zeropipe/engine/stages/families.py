"""Model families: where a decoder model can be cut, and the exceptions of single model types.

A `Family` is not written by hand: `detect_family` runs a small copy of the model and records what its layers are called
with, and `verify` compares the stages with the copy. Most model types therefore need nothing here.

To support a model type that needs special treatment, add an entry to `QUIRKS`:

mask_functions  its attention masks are made by functions of its own, not by those of `transformers.masking_utils`.
                Name them ("transformers.models.x.modeling_x.create_x_mask"); each must have an optional parameter
                `position_ids` (not keyword-only), whose value `packing` sets to keep packed sequences apart.
small_sizes     config fields with which its small copy is built, where the general rules of `small_model` fail
refused         why it cannot be cut

Then run `python docs/models.py`, which writes the table in docs/models.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.cut import ArgPath, find_tensors
from zeropipe.engine.transformers_private import forward_parameters
from zeropipe.errors import ConfigError


@dataclass(frozen=True)
class Quirk:
    """What the general rules get wrong about a model type; see the module's docstring."""

    small_sizes: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None
    mask_functions: tuple[str, ...] = ()


QUIRKS: dict[str, Quirk] = {
    "blt": Quirk(refused="it is a pipeline of three models"),
    "gemma4_unified_assistant": Quirk(refused="it drafts for another model"),
    "codegen": Quirk(small_sizes={"n_head": 4}),  # its attention is written for multiples of four heads
}
# config fields that, if they are not 0, make layers depend on each other
UNSUPPORTED_FIELDS = {
    "layerdrop": "it leaves out layers at random",
    "decoder_layerdrop": "it leaves out layers at random",
    "num_kv_shared_layers": "its layers use the keys and values of others",
    "hidden_size_per_layer_input": "each of its layers has an input made of the embeddings",
}


def quirk_of(config: Any) -> Quirk:
    """The exceptions of a config's model type."""
    return QUIRKS.get(config.model_type, Quirk())


@dataclass(frozen=True)
class Family:
    """Where a decoder model can be cut: detected on a small copy of the model, and verified there."""

    layers: str  # the name of its list of layers
    num_layers: int
    before: frozenset[str]  # parameters that are used before the first layer
    carried: tuple[ArgPath, ...]  # arguments of a layer that come from the layers before it, the hidden states first
    output_length: int | None = None  # of the tuple that a layer returns, hidden states first; None: a tensor
    inputs: frozenset[str] = frozenset()  # parameter names of the model's forward
    can_pack: bool = False  # packed sequences are kept apart by position ids ...
    max_packed_row: int | None = None  # ... in rows of at most this many tokens; None: in all rows
    allows_empty_ends: bool = False  # the first and the last stage may have no layers
    has_router_loss: bool = False  # its loss has a part from the routers of all layers (output_router_logits)

    @property
    def base(self) -> str:
        """The name of the model without its head."""
        return self.layers.partition(".")[0]

    def stage_of(self, name: str, cut: Sequence[range]) -> int:
        """The stage that holds a parameter or module, by its name in the full model."""
        if name.startswith(f"{self.layers}."):
            index = int(name.removeprefix(f"{self.layers}.").partition(".")[0])
            return next(stage for stage, layers in enumerate(cut) if index in layers)
        return 0 if name in self.before else len(cut) - 1


class CannotCut(Exception):
    """A model cannot be cut into stages; the text says why."""


def refuse(config: Any, reason: str) -> ConfigError:
    """The error for a model that cannot be cut, in one line."""
    reason = " ".join(reason.split())
    return ConfigError(
        f"model_type={config.model_type!r} cannot be cut into stages: {reason}; pass the model as a list of modules to "
        "module_stages instead"
    )


def find_layer_list(model: nn.Module) -> str:
    """The name of the nn.ModuleList of a model's layers.

    Of the lists with `num_hidden_layers` entries the outermost, and of several such the one with most parameters.
    """
    lists = {name: child for name, child in model.named_modules() if isinstance(child, nn.ModuleList) and len(child)}
    if not lists:
        raise CannotCut("it has no list of layers")
    # the vision or audio part of a model has lists of its own, which may be larger
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    candidates = [name for name, child in lists.items() if len(child) == num_layers] or list(lists)
    return max(candidates, key=lambda name: (-name.count("."), sum(p.numel() for p in lists[name].parameters())))


def detect_family(model: nn.Module, name: str, inputs: Mapping[str, Any], ties: Sequence[Sequence[str]] = ()) -> Family:
    """Run a small model once and record how its layers, in the list `name`, are called.

    Its weights must be random and untied. `ties`: groups of names that are one parameter in the model to be cut.
    """
    layers = model.get_submodule(name)
    calls, output = _record_calls(model, layers, inputs)
    order = [index for index, *_ in calls]
    if order != list(range(len(layers))):
        repeats = len(order) != len(set(order))
        raise CannotCut(f"{name} are {'run more than once' if repeats else 'not run one after the other'}")
    carried = _find_carried(calls)
    first_args = calls[0][1]
    return Family(
        layers=name,
        num_layers=len(layers),
        before=_find_before(model, name, [first_args[path] for path in carried if path in first_args], output, ties),
        carried=carried,
        output_length=_find_output_length(calls, name),
        inputs=forward_parameters(model),
        has_router_loss=getattr(output, "aux_loss", None) is not None,
    )


LayerCall = tuple[int, dict[ArgPath, Tensor], Any]  # a layer's index, its tensor arguments, its output


def _record_calls(model: nn.Module, layers: nn.ModuleList, inputs: Mapping[str, Any]) -> tuple[list[LayerCall], Any]:
    calls: list[LayerCall] = []
    hooks = []
    for index, layer in enumerate(layers):
        hooks.append(
            layer.register_forward_hook(
                lambda _, args, kwargs, output, i=index: calls.append((i, find_tensors(args, kwargs), output)),
                with_kwargs=True,
            )
        )
    try:
        output = model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls, output


def _find_carried(calls: list[LayerCall]) -> tuple[ArgPath, ...]:
    """The arguments that come from earlier layers: they have a gradient, or are a tensor that a layer returned."""
    paths, returned = [], set()
    for _, tensors, output in calls:
        paths.append(tuple(path for path, tensor in tensors.items() if tensor.requires_grad or id(tensor) in returned))
        returned |= {id(tensor) for tensor in find_tensors((output,), {}).values()}
    if len(set(paths[1:])) > 1:
        raise CannotCut("its layers pass different tensors to each other")
    if not paths[-1]:
        raise CannotCut("its layers pass no tensors to each other")
    return paths[-1]


def _find_output_length(calls: list[LayerCall], layers: str) -> int | None:
    lengths = {None if isinstance(output, Tensor) else _length(output) for _, _, output in calls}
    if len(lengths) != 1 or -1 in lengths:
        raise CannotCut(f"{layers} return outputs of different structures")
    return lengths.pop()


def _length(output: Any) -> int:
    return len(output) if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor) else -1


def _find_before(
    model: nn.Module, layers: str, first_inputs: list[Tensor], output: Any, ties: Sequence[Sequence[str]]
) -> frozenset[str]:
    """The parameters of the first stage: those that the arguments of the first layer depend on.

    Parameters without any gradient (tables of positions, parts for other kinds of input) belong to it too, except a
    second name of a parameter that the last stage uses: the bias of some heads has two.
    """
    parameters = dict(model.named_parameters())
    early = _used_by(first_inputs, parameters)
    if not early:
        raise CannotCut("its first layer does not depend on an embedding")
    inside = sorted(name for name in early if name.startswith(f"{layers}."))
    if inside:
        raise CannotCut(f"{inside[0]} is used before the layers")
    outside = {name: p for name, p in parameters.items() if not name.startswith(f"{layers}.") and name not in early}
    late = _used_by([output.logits], outside)
    late |= {name for names in ties if late.intersection(names) and not early.intersection(names) for name in names}
    return frozenset(early | (outside.keys() - late))


def _used_by(tensors: list[Tensor], parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """The parameters that some tensors depend on."""
    total = sum(tensor.float().square().sum() for tensor in tensors if tensor.requires_grad)
    if not isinstance(total, Tensor) or not parameters:
        return set()
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True, retain_graph=True)
    return {name for name, gradient in zip(parameters, gradients) if gradient is not None}
