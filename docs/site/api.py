"""Pages of the API reference, made from signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from enum import Enum
from importlib import import_module
from types import ModuleType
from typing import Any, ForwardRef

MODULES = {
    "zeropipe": "Schedules, simulation, search and plans: `import zeropipe as zp`",
    "zeropipe.engine": "Run schedules on torch.distributed; [the guide](../engine.md) explains how these work together",
    "zeropipe.pipelining": "torch.distributed.pipelining's interface; [the guide](../drop-in.md) says what differs",
    "zeropipe.errors": "Exceptions, all of them subclasses of `ZeropipeError`",
}
MAX_WIDTH = 100  # of a signature on one line


def write_pages() -> dict[str, str]:
    """File name -> Markdown of each page."""
    return {f"{name}.md": _write_module(import_module(name), title) for name, title in MODULES.items()}


def _write_module(module: ModuleType, title: str) -> str:
    names = getattr(module, "__all__", None) or _defined_names(module)
    parts = [f"# {module.__name__}\n\n{title}."]
    parts += [_write_member(name, getattr(module, name)) for name in sorted(names, key=str.lower)]
    return "\n\n".join(parts) + "\n"


def _defined_names(module: ModuleType) -> list[str]:
    """The public classes of a module without `__all__`."""
    return [
        name for name, value in vars(module).items()
        if inspect.isclass(value) and not name.startswith("_") and value.__module__.startswith(module.__name__)
    ]  # fmt: skip


def _write_member(name: str, value: Any) -> str:
    parts = [f"## {name}"]
    if callable(value) and not (inspect.isclass(value) and issubclass(value, (Enum, Exception))):
        parts.append(f"```python\n{_signature(name, value)}\n```")
    elif inspect.isclass(value) and issubclass(value, Enum):
        parts.append(", ".join(f"`{name}.{member}`" for member in value.__members__))
    doc = value.__doc__ if inspect.isclass(value) or callable(value) else None
    if doc and not doc.startswith(f"{name}("):  # a dataclass or a named tuple without a docstring repeats its signature
        parts.append(_as_markdown(inspect.cleandoc(doc)))
    if inspect.isclass(value):
        parts += _write_methods(name, value)
    return "\n\n".join(parts)


def _write_methods(owner: str, value: type) -> list[str]:
    """Public methods and properties that are the class's own and have a docstring."""
    parts = []
    for name, member in vars(value).items():
        function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if name.startswith("_") or (not isinstance(function, property) and not inspect.isfunction(function)):
            continue
        doc = inspect.getdoc(function)
        if not doc:
            continue
        text = f"{owner}.{name}" if isinstance(function, property) else _signature(f"{owner}.{name}", function)
        parts.append(f"```python\n{text}\n```\n\n{_as_markdown(doc)}")
    return parts


def _signature(name: str, value: Any) -> str:
    """The call with its parameters, one a line if they are long, without the modules of their types."""
    signature = inspect.signature(value)
    shown: list[str] = []
    is_keyword_only = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            is_keyword_only = True
        elif parameter.kind is parameter.KEYWORD_ONLY and not is_keyword_only:
            shown.append("*")
            is_keyword_only = True
        if parameter.name != "self":
            shown.append(_parameter_text(parameter))
    returned = signature.return_annotation
    result = "" if inspect.isclass(value) or returned is inspect.Signature.empty else f" -> {_type_text(returned)}"
    text = f"{name}({', '.join(shown)}){result}"
    if len(text) <= MAX_WIDTH:
        return text
    return f"{name}(\n" + "".join(f"    {line},\n" for line in shown) + f"){result}"


def _parameter_text(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    text = stars + parameter.name
    has_type = parameter.annotation is not parameter.empty
    if has_type:
        text += f": {_type_text(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        default = "..." if repr(parameter.default).startswith("<") else repr(parameter.default)
        text += f" = {default}" if has_type else f"={default}"
    return text


def _type_text(annotation: Any) -> str:
    """A type as written in the source, without modules."""
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text)


def _as_markdown(doc: str) -> str:
    """A docstring as Markdown: indented examples become code blocks."""
    lines: list[str] = []
    is_code = False
    for line in doc.splitlines():
        starts_code = line.startswith("    ") and not is_code and (not lines or not lines[-1])
        if starts_code:
            lines.append("```python")
            is_code = True
        elif is_code and line and not line.startswith("    "):
            lines.insert(len(lines) - (not lines[-1]), "```")
            is_code = False
        lines.append(line[4:] if is_code else line.replace("<", "&lt;"))
    return "\n".join([*lines, "```"] if is_code else lines)
