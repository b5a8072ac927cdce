"""A whole model reduced to one of its stages, in place.

A stage is the piece of the model's own forward that lies between the calls of two layers: from the call of its first
layer up to the call of the first layer of the next stage. What the model does before its layers (masks, rotary
embeddings) is done on every stage; what it makes there of the embeddings is replaced by what the stage before sent.
Each layer keeps its place and its number, so that whatever a model looks up by a layer's number stays right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.calls import Call, Place, replaced, tensors_in
from zeropipe.engine.transformers_private import leave_alone
from zeropipe.errors import EngineError

if TYPE_CHECKING:
    from zeropipe.engine.stages.families import Family


class Reached(Exception):
    """Raised where a stage ends: the model's forward has nothing more to do here."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        super().__init__("the end of a stage")
        self.values = tuple(values)


class Border:
    """Where a stage begins: puts what the stage before sent in the place of what this one made up."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places
        self.received: Sequence[Tensor] | None = None
        self._constant: list[tuple[Tensor, Tensor]] = []

    def clear(self) -> None:
        self.received, self._constant = None, []

    def enter(self, layer: nn.Module, args: Any, kwargs: Any) -> Call:
        """A hook of the stage's first layer."""
        if self.received is None:
            raise EngineError(
                f"{type(layer).__name__} runs outside its stage's forward: for activation checkpointing use "
                "Engine(ac=...), not the model's own"
            )
        made_up = tensors_in(args, kwargs)
        self._constant = [
            (made_up[place], value) for place, value in list(zip(self._places, self.received))[1:] if place in made_up
        ]
        return replaced(args, kwargs, dict(zip(self._places, self.received)))

    def follow(self, layer: nn.Module, args: Any, kwargs: Any) -> Call | None:
        """A hook of the layers after it, for what the model hands to every layer alike."""
        if not self._constant:
            return None
        values = {
            place: value
            for place, tensor in tensors_in(args, kwargs).items()
            for made_up, value in self._constant
            if tensor is made_up
        }
        return replaced(args, kwargs, values) if values else None


class Absent(nn.Module):
    """Stands where a layer of another stage would: it has what the model reads off its layers, and no weights."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        own = type(layer).__mro__[: type(layer).__mro__.index(nn.Module)]  # a kind may be told by the class
        said = {name: getattr(layer, name) for kind in own for name, value in vars(kind).items() if _is_plain(value)}
        for name, value in (said | vars(layer)).items():
            if not name.startswith("_") and not isinstance(value, Tensor | nn.Module):
                setattr(self, name, value)


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | tuple)


class Skipped(Absent):
    """Returns its input in the form in which the layer returns its output."""

    def __init__(self, layer: nn.Module, place: Place, form: int | None, border: Border | None = None) -> None:
        super().__init__(layer)
        self.place, self.form, self.border = place, form, border

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if self.place == ("args", 0) else tensors_in(args, kwargs)[self.place]
        if self.border is not None and self.border.received is not None:
            hidden = self.border.received[0]
        return hidden if self.form is None else (hidden, *[None] * (self.form - 1))


class Exit(Absent):
    """Ends the stage: what this layer is called with goes to the next one."""

    def __init__(self, layer: nn.Module, places: Sequence[Place]) -> None:
        super().__init__(layer)
        self.places = places

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = tensors_in(args, kwargs)
        raise Reached([found[place] for place in self.places])


def _leave(layer: nn.Module, args: Any, output: Any) -> None:
    """A hook of the model's last layer, where norm and head are a stage of their own."""
    raise Reached([output if isinstance(output, Tensor) else output[0]])


def cut_layers(
    layers: nn.ModuleList, family: Family, kept: range, border: Border, *, is_first: bool, is_last: bool
) -> None:
    """Keep some layers, and let forward run from the first of them to the end of the last."""
    total = len(layers)
    for index in range(total):
        if index in kept:
            continue
        if index == kept.stop:
            layers[index] = Exit(layers[index], family.carried)
        else:
            gives = index == total - 1 and kept.start == total
            layers[index] = Skipped(layers[index], family.carried[0], family.form, border if gives else None)
    if not is_first and kept.start < total:
        layers[kept.start].register_forward_pre_hook(border.enter, with_kwargs=True)
        for layer in layers[kept.start + 1 : kept.stop + 1]:
            layer.register_forward_pre_hook(border.follow, with_kwargs=True)
    if kept.stop == total and not is_last and kept:
        layers[total - 1].register_forward_hook(_leave)


class Blanks:
    """Weights of other stages that the model reads on its way to this stage's layers: zeros that need no memory.

    What is computed with them is thrown away at the border; only its shape and dtype matter.
    """

    def __init__(self) -> None:
        self._places: list[tuple[nn.Module, str, torch.Size]] = []
        self._kind: tuple[torch.device, torch.dtype] | None = None

    def put(self, lm: nn.Module, name: str) -> None:
        """Take a parameter out of a model."""
        owner, _, leaf = name.rpartition(".")
        module = lm.get_submodule(owner)
        parameter = module._parameters.pop(leaf)
        self._places.append((module, leaf, parameter.shape))
        self._lay(parameter.device, parameter.dtype, self._places[-1:])
        self._kind = None

    def match(self, tensor: Tensor) -> None:
        """Have the zeros of the device and dtype of `tensor`."""
        if self._kind != (tensor.device, tensor.dtype):
            self._lay(tensor.device, tensor.dtype, self._places)
            self._kind = (tensor.device, tensor.dtype)

    def _lay(self, device: torch.device, dtype: torch.dtype, places: Sequence[tuple[nn.Module, str, Any]]) -> None:
        for module, leaf, shape in places:
            blank = torch.zeros((), device=device, dtype=dtype).expand(shape)
            setattr(module, leaf, leave_alone(blank))
