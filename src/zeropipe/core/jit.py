"""One source for small and large inputs: kernels are plain Python, and numba compiles them when that pays.

A kernel is a function of lists (or arrays), tuples of them and numbers, without other Python objects. `arrays(size)`
returns the namespace that creates its arguments and calls it: `Plain`, with lists and the kernel as written, or
`Compiled`, with numpy arrays and the compiled kernel.

Compiled kernels are about forty times faster. But loading numba and its cached kernels takes half a second, and
compiling them, once per installation, some seconds. So a process starts with plain kernels, and small commands start at
once. It switches to compiled ones when one input is large, or when its inputs add up to many actions, as in the page
and in a search. Then it uses them for all but the smallest inputs. Where numba is not installed, as in a browser, all
kernels stay plain.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from types import CodeType, FunctionType
from typing import Any

COMPILE_FROM_SIZE = 200_000  # actions: one input of this size pays for loading the compiled kernels
COMPILE_AFTER_ACTIONS = 500_000  # actions processed by plain kernels, in half a second, before the process switches
MIN_COMPILED_SIZE = 200  # actions: smaller inputs always use plain kernels

Ints = Any  # list[int] or numpy int64 array
Floats = Any  # list[float] or numpy float64 array


class Plain:
    """Python lists, and kernels as written."""

    @staticmethod
    def ints(data: bytes) -> Ints:
        return memoryview(data).cast("q").tolist()

    @staticmethod
    def floats(data: bytes) -> Floats:
        return memoryview(data).cast("d").tolist()

    @staticmethod
    def full_ints(size: int, value: int = 0) -> Ints:
        return [value] * size

    @staticmethod
    def full_floats(size: int, value: float = 0.0) -> Floats:
        return [value] * size

    @staticmethod
    def list_ints(values: Any) -> Ints:
        return list(values)

    @staticmethod
    def list_floats(values: Any) -> Floats:
        return list(values)

    @staticmethod
    def int_bytes(values: Ints) -> bytes:
        return array("q", values).tobytes()

    @staticmethod
    def float_bytes(values: Floats) -> bytes:
        return array("d", values).tobytes()

    @staticmethod
    def small_bytes(values: Any, typecode: str) -> bytes:
        return array(typecode, values).tobytes()

    @staticmethod
    def call(kernel: Callable[..., Any], *args: Any) -> Any:
        return kernel(*args)


class Compiled:
    """numpy arrays, and kernels compiled by numba."""

    @staticmethod
    def ints(data: bytes) -> Ints:
        return _numpy().frombuffer(data, "int64")

    @staticmethod
    def floats(data: bytes) -> Floats:
        return _numpy().frombuffer(data, "float64")

    @staticmethod
    def full_ints(size: int, value: int = 0) -> Ints:
        return _numpy().full(size, value, "int64")

    @staticmethod
    def full_floats(size: int, value: float = 0.0) -> Floats:
        return _numpy().full(size, value, "float64")

    @staticmethod
    def list_ints(values: Any) -> Ints:
        return _numpy().array(values, "int64")

    @staticmethod
    def list_floats(values: Any) -> Floats:
        return _numpy().array(values, "float64")

    @staticmethod
    def int_bytes(values: Ints) -> bytes:
        return bytes(values.tobytes())

    @staticmethod
    def float_bytes(values: Floats) -> bytes:
        return bytes(values.tobytes())

    @staticmethod
    def small_bytes(values: Any, typecode: str) -> bytes:
        return bytes(values.astype(typecode).tobytes())

    @staticmethod
    def call(kernel: Callable[..., Any], *args: Any) -> Any:
        return compiled(kernel)(*args)


Arrays = type[Plain] | type[Compiled]


@cache
def _numpy() -> Any:
    import numpy

    return numpy


@cache
def _has_compiler() -> bool:
    return find_spec("numba") is not None


class _Process:
    """What this process has done so far."""

    plain_actions = 0  # processed by plain kernels
    is_compiled = False


def arrays(size: int) -> Arrays:
    """The namespace for an input of `size` actions that a kernel will process."""
    is_large = size >= COMPILE_FROM_SIZE and _has_compiler()
    if is_large or (_Process.is_compiled and size >= MIN_COMPILED_SIZE):
        _Process.is_compiled = True
        return Compiled
    _Process.plain_actions += size
    if _Process.plain_actions >= COMPILE_AFTER_ACTIONS and _has_compiler():
        _Process.is_compiled = True
    return Plain


def use_compiled() -> None:
    """Use compiled kernels from now on: for a process that will process many actions."""
    _Process.is_compiled = True


_entry_points: set[Callable[..., Any]] = set()


def entry_point(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a kernel that both Python and other kernels call: it is compiled once for both."""
    _entry_points.add(kernel)
    return kernel


@cache
def compiled(kernel: Callable[..., Any], /) -> Callable[..., Any]:
    """The kernel, compiled together with the functions that it calls. It releases the GIL."""
    return _dispatcher(kernel, inner=False)


@cache
def _inner(kernel: Callable[..., Any], /) -> Callable[..., Any]:
    return compiled(kernel) if kernel in _entry_points else _dispatcher(kernel, inner=True)


def _dispatcher(kernel: Callable[..., Any], *, inner: bool) -> Callable[..., Any]:
    import numba

    named = {name: kernel.__globals__.get(name) for name in kernel.__code__.co_names}
    helpers = {name: _inner(value) for name, value in named.items() if isinstance(value, FunctionType)}
    own = FunctionType(kernel.__code__, {**kernel.__globals__, **helpers}, argdefs=kernel.__defaults__)
    own.__qualname__ += "_" + sha256(_fingerprint(kernel).encode()).hexdigest()[:12] + "_inner" * inner  # its file name
    # A kernel creates no arrays, so it needs no reference counts. No C code calls it, and Python calls no inner kernel.
    wrappers = {"no_cfunc_wrapper": True, "no_cpython_wrapper": inner}
    options = {"nogil": True, "_nrt": False, "forceinline": inner, **wrappers}
    try:
        dispatcher = numba.njit(own, cache=True, **options)
    except RuntimeError:  # there is no writable folder for the cache
        dispatcher = numba.njit(own, **options)
    dispatcher.get_call_template = _without_literals(dispatcher.get_call_template)
    return dispatcher  # type: ignore[no-any-return]


def _without_literals(template: Callable[..., Any]) -> Callable[..., Any]:
    """Keep numba from compiling a function once more for arguments that are still the literal 0."""
    from numba.core.types.misc import unliteral

    return lambda args, kws: template(tuple(map(unliteral, args)), {name: unliteral(kws[name]) for name in kws})


def _fingerprint(kernel: Callable[..., Any]) -> str:
    """A text that changes with the kernel, the functions that it calls and the constants that it uses.

    numba's cache finds a kernel by its name and file, and would miss a change in a helper of another file.
    """
    code = kernel.__code__
    parts = [code.co_code.hex(), *(repr(value) for value in code.co_consts if not isinstance(value, CodeType))]
    for name in code.co_names:
        value = kernel.__globals__.get(name)
        if isinstance(value, FunctionType):
            parts.append(_fingerprint(value))
        elif isinstance(value, (int, float)):
            parts.append(f"{name}={value}")
    return " ".join(parts)
