"""Progress on a terminal's stderr; nothing where stderr is not a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

BAR_DELAY_S = 0.5


@contextmanager
def show_steps(total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar of `total` steps once the work takes long; call the result with the name of each step."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=total, completed=-1)
    timer = Timer(BAR_DELAY_S, bar.start)
    timer.start()
    try:
        yield lambda name: bar.update(task, description=escape(name), advance=1)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


@contextmanager
def show_fraction(text: str) -> Iterator[Callable[[str, float], None] | None]:
    """Show a bar; call the result with a text and the fraction done."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=1.0)
        yield lambda what, fraction: bar.update(task, description=what, completed=fraction)


@contextmanager
def show_line(text: str) -> Iterator[Callable[[str], None] | None]:
    """Show a line; call the result with the next one."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update
