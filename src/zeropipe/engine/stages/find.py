"""Finds the shape of a decoder model: its layers, and what goes from one to the next, by watching it run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.calls import Place, tensors_in
from zeropipe.engine.stages.families import Family
from zeropipe.engine.stages.small import is_per_layer
from zeropipe.engine.transformers_private import forward_keys


class NotFound(Exception):
    """A model that has not the common shape; the text says what is different."""


def layers_of(model: nn.Module) -> str:
    """The name of the list that holds the model's layers: as many as its config says, outermost, and the largest."""
    lists = {name: child for name, child in model.named_modules() if isinstance(child, nn.ModuleList) and len(child)}
    if not lists:
        raise NotFound("it has no list of layers")
    # a model that also sees or hears has other lists, which may be larger
    wanted = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    fitting = [name for name, child in lists.items() if len(child) == wanted] or list(lists)
    return max(fitting, key=lambda name: (-name.count("."), sum(p.numel() for p in lists[name].parameters())))


def per_layer(model: nn.Module, layers: str) -> list[str]:
    """The entries of a model's config that have one value for each layer."""
    total = len(model.get_submodule(layers))
    return [name for name, value in model.config.to_dict().items() if is_per_layer(name, value, total)]


def kinds(model: nn.Module, layers: str, lists: Sequence[str]) -> list[int]:
    """A number for each layer: layers that are built and configured alike have the same, counted as they come up."""
    numbers: dict[Any, int] = {}
    config = model.config.to_dict()
    return [
        numbers.setdefault((_signature(layer), repr([config[name][i] for name in lists])), len(numbers))
        for i, layer in enumerate(model.get_submodule(layers).children())
    ]


def _signature(layer: nn.Module) -> frozenset[Any]:
    """Every module in a layer, with the plain attributes that decide what it does."""
    return frozenset(
        (_unnumbered(name), type(module).__qualname__, _attributes(module)) for name, module in layer.named_modules()
    )


def _attributes(module: nn.Module) -> frozenset[Any]:
    return frozenset(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, bool | int | str | type(None))
        and not name.startswith("_")
        and not (type(value) is int and _is_place(name))
    )


@cache
def _unnumbered(name: str) -> str:
    return re.sub(r"\d+", "*", name)


@cache
def _is_place(name: str) -> bool:
    """Whether an attribute says which layer this is."""
    return re.search("layer|idx|index", name) is not None


def find(model: nn.Module, name: str, inputs: Mapping[str, Any], ties: Sequence[Sequence[str]] = ()) -> Family:
    """The shape of a small model with these layers, all its weights random and none tied to another.

    `ties` are the names that are one parameter in the model that is cut.
    """
    layers = model.get_submodule(name)
    calls, output = _watch(model, layers, inputs)
    order = [index for index, *_ in calls]
    if order != list(range(len(layers))):
        twice = len(order) != len(set(order))
        raise NotFound(f"{name} are {'run more than once' if twice else 'not run one after the other'}")
    carried = _carried(calls)
    return Family(
        layers=name,
        num_layers=len(layers),
        before=_before(
            model, name, [calls[0][1][place] for place in carried if place in calls[0][1]], output.logits, ties
        ),
        carried=carried,
        form=_form(calls, name),
        keys=forward_keys(model),
        balances=getattr(output, "aux_loss", None) is not None,
    )


Seen = tuple[int, dict[Place, Tensor], Any]  # a layer's number, the tensors it was called with, what it returned


def _watch(model: nn.Module, layers: nn.ModuleList, inputs: Mapping[str, Any]) -> tuple[list[Seen], Any]:
    calls: list[Seen] = []
    hooks = []
    for index, layer in enumerate(layers):
        hooks.append(
            layer.register_forward_hook(
                lambda _, args, kwargs, output, i=index: calls.append((i, tensors_in(args, kwargs), output)),
                with_kwargs=True,
            )
        )
    try:
        output = model(**inputs, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls, output


def _carried(calls: list[Seen]) -> tuple[Place, ...]:
    """Where layers take what came out of earlier ones: with a gradient, or the very tensor that one returned."""
    places, made = [], set()
    for _, tensors, output in calls:
        places.append(tuple(place for place, tensor in tensors.items() if tensor.requires_grad or id(tensor) in made))
        made |= {id(tensor) for tensor in tensors_in((output,), {}).values()}
    if len(set(places[1:])) > 1:
        raise NotFound("its layers hand different things on to each other")
    if not places[-1]:
        raise NotFound("its layers hand nothing on to each other")
    return places[-1]


def _form(calls: list[Seen], layers: str) -> int | None:
    forms = {None if isinstance(output, Tensor) else _length(output) for _, _, output in calls}
    if len(forms) != 1 or -1 in forms:
        raise NotFound(f"{layers} return different things")
    return forms.pop()


def _length(output: Any) -> int:
    return len(output) if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor) else -1


def _before(
    model: nn.Module, layers: str, handed: list[Tensor], logits: Tensor, ties: Sequence[Sequence[str]]
) -> frozenset[str]:
    """The parameters that belong to the first stage: those that what the first layer is called with depends on.

    So do those that have no gradient at all: tables of positions, parts for other kinds of input. But a second name of
    a parameter that the last stage uses (the bias of some heads has two) belongs to that stage.
    """
    named = dict(model.named_parameters())
    early = _reached(handed, named)
    if not early:
        raise NotFound("its first layer does not depend on an embedding")
    inside = sorted(name for name in early if name.startswith(f"{layers}."))
    if inside:
        raise NotFound(f"{inside[0]} is used before the layers")
    outside = {name: p for name, p in named.items() if not name.startswith(f"{layers}.") and name not in early}
    late = _reached([logits], outside)
    late |= {name for names in ties if late.intersection(names) and not early.intersection(names) for name in names}
    return frozenset(early | (outside.keys() - late))


def _reached(roots: list[Tensor], named: Mapping[str, nn.Parameter]) -> set[str]:
    """The parameters that some tensors depend on."""
    total = sum(tensor.float().square().sum() for tensor in roots if tensor.requires_grad)
    if not isinstance(total, Tensor) or not named:
        return set()
    gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True, retain_graph=True)
    return {name for name, gradient in zip(named, gradients) if gradient is not None}
