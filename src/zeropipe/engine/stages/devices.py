"""Devices as users name them."""

from __future__ import annotations

import torch

from zeropipe.errors import ConfigError, short


def parse_device(device: torch.device | str) -> torch.device:
    """A torch.device; ConfigError if torch has no such device on this machine."""
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device={short(device)}: must be a torch device, such as 'cpu' or 'cuda:0'") from None
    if parsed.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={short(str(device))}: torch finds no GPU on this machine; use 'cpu'")
    return parsed
