"""CPUs without arithmetic for 16 bits: torch multiplies number by number, a hundred times slower than float32."""

from __future__ import annotations

import sys
import time
import warnings

import torch

SLOW = 20  # times slower than float32; what a CPU has kernels for is within a few times
TORCH_SAYS = "mkldnn_matmul failed, switching to BLAS gemm"  # with the frames of a C++ stack, from every rank


def tell_slow(dtype: str, device: str) -> None:
    """A warning for a dtype that this CPU is slow with, so that nobody takes the run for one that hangs."""
    if device != "cpu" or dtype in ("float32", "float64"):
        return
    times = seconds_of(getattr(torch, dtype)) / seconds_of(torch.float32)
    if times >= SLOW:
        print(
            f"warning: this CPU multiplies {dtype} {times:.0f} times slower than float32, as it has no arithmetic for "
            "it: use float32, or a GPU",
            file=sys.stderr,
        )


def seconds_of(dtype: torch.dtype) -> float:
    """The shortest of three small matrix products."""
    a, b = torch.ones(16, 128, dtype=dtype), torch.ones(128, 256, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=TORCH_SAYS)
        return min(_seconds(a, b) for _ in range(3))


def _seconds(a: torch.Tensor, b: torch.Tensor) -> float:
    begun = time.perf_counter()
    torch.mm(a, b)
    return time.perf_counter() - begun
