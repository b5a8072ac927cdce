"""How much of the machine a run uses."""

from __future__ import annotations

import functools
import resource

import torch

from zeropipe.errors import ZeropipeError
from zeropipe.search.estimate.estimate import estimate
from zeropipe.search.estimate.gpus import GPUS
from zeropipe.train.config.models import RunConfig
from zeropipe.train.shape import model_data


def peak_memory(device: torch.device) -> int:
    """The most bytes this process has had: of the GPU's tensors, or of the process itself."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def utilization(config: RunConfig, device: torch.device, num_positions: int, seconds: float) -> float | None:
    """MFU: FLOPs of the model's F, I and W over what the GPUs could do meanwhile; None where that is not known."""
    if device.type != "cuda":
        return None
    speed = _flops(config, torch.cuda.get_device_name(device))
    return None if speed is None else speed * num_positions / seconds / config.mesh.num_processes


@functools.lru_cache(maxsize=1)
def _flops(config: RunConfig, name: str) -> float | None:
    """Of a position, as a part of a GPU's peak."""
    words = name.lower().replace("-", " ").split()
    gpu = max((gpu for gpu in GPUS if set(gpu.split("-")) <= set(words)), key=len, default=None)
    if gpu is None or config.model.dtype == "float64":
        return None
    sequence = config.data.sequence
    try:
        costs = estimate(model_data(config), gpu=gpu, sequence=sequence, dtype=config.model.dtype)
    except ZeropipeError:
        return None
    (setting,) = costs.settings
    flops = 3 * sum(setting.kinds[kind].flops for kind in (*costs.layers, *costs.before, *costs.after))
    return flops / sequence / GPUS[gpu].peak_of(config.model.dtype)
