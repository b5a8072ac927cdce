"""Random numbers for first values, from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

CPU = torch.device("cpu")


@contextmanager
def seeded(seed: int, device: torch.device = CPU) -> Iterator[None]:
    """Random numbers of the CPU and of a device come from `seed` inside; afterwards they go on as before.

    For the CPU only its own generator is touched: `torch.manual_seed` would seed the GPUs as well, which nobody would
    undo, or note that for later together with a stack trace, which takes longer than filling a small layer.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if device.type in ("cpu", "meta"):
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield
