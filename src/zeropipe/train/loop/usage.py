"""How much of the machine a run uses."""

from __future__ import annotations

import os
import resource

import torch

from zeropipe.errors import ZeropipeError
from zeropipe.estimating.estimate import estimate
from zeropipe.estimating.gpus import GPUS
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.inputs import open_shapes


def peak_memory(device: torch.device) -> int:
    """The most bytes this process has had: of the GPU's tensors, or of the process itself."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Utilization:
    """MFU: FLOPs of the model's F, I and W over what the GPUs could do meanwhile."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self._share = _flops(config, torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self._num_gpus = config.mesh.num_processes
        if device.type == "cuda":  # processes may share GPUs
            here = int(os.environ.get("LOCAL_WORLD_SIZE", config.mesh.num_processes))
            self._num_gpus //= max(1, here // torch.cuda.device_count())

    def of(self, num_positions: int, seconds: float) -> float | None:
        """Of a step; None where the model's FLOPs or the GPU's peak are not known."""
        return None if self._share is None else self._share * num_positions / seconds / self._num_gpus


def _flops(config: RunConfig, name: str) -> float | None:
    """Of a position, as a part of what a GPU does in a second."""
    words = name.lower().replace("-", " ").split()
    gpu = max((gpu for gpu in GPUS if set(gpu.split("-")) <= set(words)), key=len, default=None)
    if gpu is None or config.model.dtype == "float64":
        return None
    sequence = config.data.sequence
    try:
        costs = estimate(open_shapes(config), gpu=gpu, sequence=sequence, dtype=config.model.dtype)
    except ZeropipeError:
        return None
    (setting,) = costs.settings
    flops = 3 * sum(setting.kinds[kind].flops for kind in (*costs.layers, *costs.before, *costs.after))
    return flops / sequence / GPUS[gpu].peak_of(config.model.dtype)
