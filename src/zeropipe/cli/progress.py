"""What is shown while a command works."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer

PATIENCE = 0.5  # seconds until the bar appears


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on a terminal's stderr once the work takes long. Call what it gives with the name of each piece begun."""
    if not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("", total=total, completed=-1)
    late = Timer(PATIENCE, bar.start)
    late.start()
    try:
        yield lambda name: bar.update(task, description=escape(name), advance=1)
    finally:
        late.cancel()
        late.join()
        bar.stop()
