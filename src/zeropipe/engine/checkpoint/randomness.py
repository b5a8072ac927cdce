"""The states of random-number generators: of torch, of its GPU, of Python and of numpy, each rank's own."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Mapping

import torch
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Tensor]:
    """What the next random numbers of this process depend on."""
    _, words, spare = random.getstate()
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_spare": torch.tensor(math.nan if spare is None else spare, dtype=torch.float64),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        import numpy

        _, keys, place, has_spare, spare_value = numpy.random.get_state(legacy=True)
        found["numpy"] = torch.tensor([*keys.tolist(), place, has_spare], dtype=torch.int64)
        found["numpy_spare"] = torch.tensor(spare_value, dtype=torch.float64)
    return found


def set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on with the random numbers of `random_states`; what was not saved stays as it is."""
    torch.set_rng_state(states["torch"])
    spare = float(states["python_spare"])
    random.setstate((3, tuple(states["python"].tolist()), None if math.isnan(spare) else spare))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states:
        import numpy

        *keys, place, has_spare = states["numpy"].tolist()
        numpy.random.set_state(("MT19937", keys, place, has_spare, float(states["numpy_spare"])))
