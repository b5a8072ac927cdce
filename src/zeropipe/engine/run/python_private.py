"""Private functions of Python's multiprocessing, in one file: what to check when Python changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import process, util


def interpreter_flags() -> list[str]:
    """The command-line flags (-O, -W, -X ...) that this interpreter was started with."""
    return util._args_from_interpreter_flags()  # type: ignore[attr-defined,no-any-return]


def is_importing_main() -> bool:
    """Whether this process is a child that imports the parent's main script."""
    return getattr(process.current_process(), "_inheriting", False)


@contextmanager
def importing_main() -> Iterator[None]:
    """Let `is_importing_main` be true inside."""
    process.current_process()._inheriting = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del process.current_process()._inheriting  # type: ignore[attr-defined]


def run_exit_functions() -> None:
    """Run the finalizers of multiprocessing, as at the end of its own processes."""
    util._exit_function()  # type: ignore[attr-defined]
