"""A stage of a user's own modules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from zeropipe.engine.stages.contract import require_inputs


class PlainStage(nn.Module):
    """Runs modules one after the other; a tuple returned by one becomes the arguments of the next.

    The first stage is called with `microbatch["inputs"]` (a tensor or a tuple). A module whose forward has a parameter
    with the name of another key of the microbatch gets its value, on any stage. A stage without modules returns its
    input.
    """

    tied_pairs: tuple[tuple[str, int, str], ...] = ()

    def __init__(self, modules: Sequence[nn.Module], layers: range, *, is_first: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(modules)
        self.layers, self.is_first = layers, is_first
        self._forward_names = [_forward_names(module) for module in modules]

    def pick(self, microbatch: dict[str, Any]) -> dict[str, Any]:
        """The inputs that this stage takes from a microbatch."""
        names = {name for names in self._forward_names for name in names}
        picked = {key: value for key, value in microbatch.items() if key in names}
        return {**picked, "inputs": require_inputs(microbatch)} if self.is_first else picked

    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        output: Any = kwargs["inputs"] if self.is_first else args if len(args) > 1 else args[0]
        args = _tuple(output)
        for module, names in zip(self.blocks, self._forward_names):
            output = module(*args, **{name: kwargs[name] for name in names[len(args) :] if name in kwargs})
            args = _tuple(output)
        return output

    def full_name(self, name: str) -> str:
        """The name of one of this stage's parameters in an nn.ModuleList of all modules."""
        index, _, rest = name.removeprefix("blocks.").partition(".")
        return f"{int(index) + self.layers.start}.{rest}"

    def full_names(self) -> dict[str, str]:
        """Parameter name in this stage -> name in an nn.ModuleList of all modules."""
        return {name: self.full_name(name) for name, _ in self.named_parameters(remove_duplicate=False)}


def _forward_names(module: nn.Module) -> tuple[str, ...]:
    """The parameter names of a module's forward, or of the module inside a wrapper of torch."""
    inner = (getattr(module, name, None) for name in ("_orig_mod", "_checkpoint_wrapped_module"))
    if (wrapped := next(filter(None, inner), None)) is not None:
        return _forward_names(wrapped)
    try:
        names = inspect.signature(module.forward).parameters
    except ValueError:  # a traced module of torch.jit has no signature
        return ()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in names.values()):
        names = inspect.signature(
            functools.partial(type(module).forward, module)
        ).parameters  # forward was replaced on the instance
    return tuple(names)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
