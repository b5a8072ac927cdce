"""A stage made of a user's own modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from zeropipe.engine.stages.contract import require_inputs


class PlainStage(nn.Module):
    """Modules run one after the other; a tuple returned by one becomes the arguments of the next.

    The first stage starts from `microbatch["inputs"]` (a tensor or a tuple). A module whose forward names another key
    of the microbatch as a parameter gets it too, on whatever stage it is. A stage without modules hands on its input.
    """

    tied_pairs: tuple[tuple[str, int, str], ...] = ()

    def __init__(self, modules: Sequence[nn.Module], layers: range, *, is_first: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(modules)
        self.layers, self.is_first = layers, is_first
        self._parameters_of = [_parameters_of(module) for module in modules]

    def pick(self, microbatch: dict[str, Any]) -> dict[str, Any]:
        """What this stage needs of a microbatch."""
        names = {name for names in self._parameters_of for name in names}
        picked = {key: value for key, value in microbatch.items() if key in names}
        return {**picked, "inputs": require_inputs(microbatch)} if self.is_first else picked

    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        output: Any = kwargs["inputs"] if self.is_first else args if len(args) > 1 else args[0]
        args = _tuple(output)
        for module, names in zip(self.blocks, self._parameters_of):
            output = module(*args, **{name: kwargs[name] for name in names[len(args) :] if name in kwargs})
            args = _tuple(output)
        return output

    def full_name(self, name: str) -> str:
        """The name of one of this stage's parameters in an nn.ModuleList of all modules."""
        index, _, rest = name.removeprefix("blocks.").partition(".")
        return f"{int(index) + self.layers.start}.{rest}"

    def full_names(self) -> dict[str, str]:
        """This stage's parameters, by their name here: their name in an nn.ModuleList of all modules."""
        return {name: self.full_name(name) for name, _ in self.named_parameters(remove_duplicate=False)}


def _parameters_of(module: nn.Module) -> tuple[str, ...]:
    """The names of forward's parameters; those of the module inside where torch's wrappers hand everything on."""
    inside = (getattr(module, name, None) for name in ("_orig_mod", "_checkpoint_wrapped_module"))
    if (wrapped := next(filter(None, inside), None)) is not None:
        return _parameters_of(wrapped)
    try:
        names = inspect.signature(module.forward).parameters
    except ValueError:  # one that torch.jit has traced does not tell
        return ()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values()):
        names = inspect.signature(functools.partial(type(module).forward, module)).parameters  # a forward put before it
    return tuple(names)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
