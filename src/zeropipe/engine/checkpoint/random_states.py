"""The states of random-number generators of one rank: of torch, its GPU, Python and numpy."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping

import torch
from torch import Tensor


def get_random_states(device: torch.device) -> dict[str, Tensor]:
    """The states of all generators of this process."""
    _, state, gauss = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(state, dtype=torch.int64),
        "python_spare": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        import numpy

        _, keys, position, has_gauss, cached_gauss = numpy.random.get_state(legacy=True)
        found["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
        found["numpy_spare"] = torch.tensor(cached_gauss, dtype=torch.float64)
    return found


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the states of `get_random_states`; generators that were not saved stay as they are."""
    torch.set_rng_state(states["torch"])
    gauss = float(states["python_spare"])
    random.setstate((3, tuple(states["python"].tolist()), None if math.isnan(gauss) else gauss))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states:
        import numpy

        *keys, position, has_gauss = states["numpy"].tolist()
        numpy.random.set_state(("MT19937", keys, position, has_gauss, float(states["numpy_spare"])))
