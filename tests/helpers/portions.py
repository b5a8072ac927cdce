"""A part of a large product of cases, so that a machine with little time can run it in several calls."""

import os


def portion(name: str, number: int) -> range:
    """The cases to run: all `number` of them, or those of an environment variable: `30`, the first, or `30:60`."""
    first, _, last = os.environ.get(name, str(number)).rpartition(":")
    return range(int(first or 0), int(last))
