"""One source for small and large inputs: kernels are plain Python, and numba compiles them when that pays.

A kernel is a function of lists (or arrays) and numbers, with no Python objects inside. `arrays(size)` gives the place
to make its arguments and to call it: plain lists with the kernel as written, or numpy arrays with the compiled kernel.

Compiled kernels are some forty times faster, but loading numba and its cached kernels takes about half a second, and
compiling them, once per installation, some seconds. So a process begins with plain ones, and small commands start at
once. It loads the compiled ones when one input is large, or when all it has walked together shows that it lives on, as
the page and a search do; from then on it takes them for all but the smallest inputs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any

JIT_FROM = 200_000  # actions: one input this large pays for loading the compiled kernels
LIVES_ON_FROM = 500_000  # actions walked in plain Python, in half a second: a process that did so will do more
SMALL = 200  # actions: below this the plain kernels are fast enough, whatever is loaded

Ints = Any  # list[int] or numpy int64 array
Floats = Any  # list[float] or numpy float64 array


class Plain:
    """Python lists and the kernel as written."""

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
    def call(kernel: Callable[..., Any], *args: Any) -> Any:
        return kernel(*args)


class Jitted:
    """numpy arrays and the kernel compiled by numba."""

    @staticmethod
    def ints(data: bytes) -> Ints:
        import numpy as np

        return np.frombuffer(data, np.int64)

    @staticmethod
    def floats(data: bytes) -> Floats:
        import numpy as np

        return np.frombuffer(data, np.float64)

    @staticmethod
    def full_ints(size: int, value: int = 0) -> Ints:
        import numpy as np

        return np.full(size, value, np.int64)

    @staticmethod
    def full_floats(size: int, value: float = 0.0) -> Floats:
        import numpy as np

        return np.full(size, value, np.float64)

    @staticmethod
    def list_ints(values: Any) -> Ints:
        import numpy as np

        return np.array(values, np.int64)

    @staticmethod
    def list_floats(values: Any) -> Floats:
        import numpy as np

        return np.array(values, np.float64)

    @staticmethod
    def int_bytes(values: Ints) -> bytes:
        return bytes(values.tobytes())

    @staticmethod
    def float_bytes(values: Floats) -> bytes:
        return bytes(values.tobytes())

    @staticmethod
    def call(kernel: Callable[..., Any], *args: Any) -> Any:
        return compiled(kernel)(*args)


Arrays = type[Plain] | type[Jitted]


class _Process:
    """What this process has done so far."""

    walked = 0  # actions, by plain kernels
    lives_on = False


def arrays(size: int) -> Arrays:
    """Where to make arrays for an input of `size` actions that a kernel will walk."""
    if size >= JIT_FROM or (_Process.lives_on and size >= SMALL):
        _Process.lives_on = True
        return Jitted
    _Process.walked += size
    if _Process.walked >= LIVES_ON_FROM:
        _Process.lives_on = True
    return Plain


def live_on() -> None:
    """Use the compiled kernels from now on: for a process that knows at its start that it will do a lot."""
    _Process.lives_on = True


_both_ways: set[Callable[..., Any]] = set()


def called_both_ways(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a kernel that Python calls, and other kernels too: it is compiled once for both."""
    _both_ways.add(kernel)
    return kernel


@cache
def compiled(kernel: Callable[..., Any], /) -> Callable[..., Any]:
    """The kernel compiled, and with it the functions that it calls. Threads run it side by side."""
    return _dispatcher(kernel, inner=False)


@cache
def _inner(kernel: Callable[..., Any], /) -> Callable[..., Any]:
    return compiled(kernel) if kernel in _both_ways else _dispatcher(kernel, inner=True)


def _dispatcher(kernel: Callable[..., Any], *, inner: bool) -> Callable[..., Any]:
    import numba

    named = {name: kernel.__globals__.get(name) for name in kernel.__code__.co_names}
    helpers = {name: _inner(value) for name, value in named.items() if isinstance(value, FunctionType)}
    own = FunctionType(kernel.__code__, {**kernel.__globals__, **helpers}, argdefs=kernel.__defaults__)
    own.__qualname__ += "_" + sha256(_meaning(kernel).encode()).hexdigest()[:12] + "_inner" * inner  # names its file
    # A kernel makes no arrays, so it counts no references; nobody calls it from C, nor an inner one from Python.
    options = {"nogil": True, "_nrt": False, "no_cfunc_wrapper": True, "no_cpython_wrapper": inner}
    try:
        made = numba.njit(own, cache=True, **options)
    except RuntimeError:  # no folder to keep the cache in can be written
        made = numba.njit(own, **options)
    made.get_call_template = _without_literals(made.get_call_template)
    return made  # type: ignore[no-any-return]


def _without_literals(template: Callable[..., Any]) -> Callable[..., Any]:
    """numba compiles a function once more where a variable still has the 0 that it began with: not ours."""
    from numba.core.types.misc import unliteral

    return lambda args, kws: template(tuple(map(unliteral, args)), {name: unliteral(kws[name]) for name in kws})


def _meaning(kernel: Callable[..., Any]) -> str:
    """A text that changes with the kernel, the functions that it calls and the numbers that it names.

    numba looks for a kernel in its cache by name and file, and would not see that a helper in another file has changed.
    """
    code = kernel.__code__
    words = [code.co_code.hex(), *(repr(value) for value in code.co_consts if not isinstance(value, CodeType))]
    for name in code.co_names:
        value = kernel.__globals__.get(name)
        if isinstance(value, FunctionType):
            words.append(_meaning(value))
        elif isinstance(value, (int, float)):
            words.append(f"{name}={value}")
    return " ".join(words)
