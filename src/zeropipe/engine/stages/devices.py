"""Devices that a user names."""

from __future__ import annotations

import torch

from zeropipe.errors import ConfigError, short


def known_device(device: torch.device | str) -> torch.device:
    """The device; ConfigError for one that is not here."""
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device={short(device)}: give a device of torch's, like 'cpu' or 'cuda:0'") from None
    if known.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={short(str(device))}: torch sees no GPU here; give 'cpu'")
    return known
