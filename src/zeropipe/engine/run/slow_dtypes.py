"""A warning for 16-bit dtypes on CPUs without arithmetic for them: torch is then a hundred times slower."""

from __future__ import annotations

import sys
import time
import warnings

import torch

MIN_SLOWDOWN = 20  # times slower than float32; a CPU that has kernels for a dtype is within a few times
TORCH_WARNING = "mkldnn_matmul failed, switching to BLAS gemm"  # with the frames of a C++ stack, from every rank


def warn_if_slow(dtype: str, device: str) -> None:
    """Print a warning for a dtype that this CPU is slow with: the run may look like one that hangs."""
    if device != "cpu" or dtype in ("float32", "float64"):
        return
    times = time_matmul(getattr(torch, dtype)) / time_matmul(torch.float32)
    if times >= MIN_SLOWDOWN:
        print(
            f"warning: this CPU multiplies {dtype} {times:.0f} times slower than float32, as it has no arithmetic for "
            "it: use float32, or a GPU",
            file=sys.stderr,
        )


def time_matmul(dtype: torch.dtype) -> float:
    """Seconds of a small matrix product, the shortest of three."""
    a, b = torch.ones(16, 128, dtype=dtype), torch.ones(128, 256, dtype=dtype)
    times = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=TORCH_WARNING)
        for _ in range(3):
            start = time.perf_counter()
            torch.mm(a, b)
            times.append(time.perf_counter() - start)
    return min(times)
