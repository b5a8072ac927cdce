"""What this machine has: cores and memory, GPUs and their links, and what torch sees of them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeropipe.core.workers import count_cores

NVIDIA_SMI_TIMEOUT_S = 20
_MIB = 1024 * 1024
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")


@dataclass(frozen=True)
class Gpu:
    """A GPU; `memory` is in bytes."""

    name: str
    memory: int
    capability: tuple[int, int]  # CUDA's compute capability


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi reports. `links[a][b]` connects GPUs a and b, as `NV18` or `PHB`; None if that is unknown."""

    version: str
    gpus: tuple[Gpu, ...]
    links: tuple[tuple[str, ...], ...] | None


@dataclass(frozen=True)
class Torch:
    """The installed torch and what it can use."""

    version: str
    build: str  # `CUDA 12.8`, `ROCm 6.4`, `CPU`
    gpus: tuple[Gpu, ...]
    backends: tuple[str, ...]  # of torch.distributed
    nccl: str | None  # its version


@dataclass(frozen=True)
class Machine:
    """Everything that the rules of `problems` read."""

    system: str
    python: str
    cores: int
    cpu_quota: float | None = None  # cores' worth of time that a container may use
    shared_memory: int | None = None  # bytes of /dev/shm
    compiler: str | None = None  # path of a C++ compiler
    visible_devices: str | None = None  # CUDA_VISIBLE_DEVICES
    driver: Driver | None = None
    torch: Torch | None = None
    torch_error: str | None = None  # why an installed torch cannot be imported

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that torch sees; without a torch, those of nvidia-smi."""
        if self.torch is not None:
            return self.torch.gpus
        return self.driver.gpus if self.driver else ()

    @property
    def links(self) -> tuple[tuple[str, ...], ...] | None:
        """The links between `gpus`; None if unknown, as where torch sees other GPUs than nvidia-smi."""
        links = self.driver.links if self.driver else None
        return links if links and len(links) == len(self.gpus) else None


def examine() -> Machine:
    """Examine this machine."""
    torch, error = read_torch()
    compilers = filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "c++", "clang++")))
    shm = Path("/dev/shm")
    return Machine(
        system=f"{platform.system()} {platform.machine()}", python=platform.python_version(), cores=count_cores(),
        cpu_quota=read_cpu_quota(), shared_memory=shutil.disk_usage(shm).total if shm.is_dir() else None,
        compiler=next(compilers, None), visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        driver=read_driver(), torch=torch, torch_error=error,
    )  # fmt: skip


def read_cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The cores' worth of CPU time that the container may use; None without a limit."""
    with suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    return None


def read_driver() -> Driver | None:
    """The report of nvidia-smi; None without one, or if it fails."""
    rows = _nvidia_smi("--query-gpu=driver_version,memory.total,compute_cap,name", "--format=csv,noheader,nounits")
    found = [row.split(", ", 3) for row in rows.splitlines()]
    if not found or any(len(row) != 4 for row in found):
        return None
    gpus = tuple(Gpu(name, _bytes_of(memory), _capability(number)) for _, memory, number, name in found)
    return Driver(found[0][0], gpus, parse_links(_nvidia_smi("topo", "-m")))


def _nvidia_smi(*words: str) -> str:
    """What nvidia-smi prints; empty if it is not there or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
        return done.stdout if done.returncode == 0 else ""
    return ""


def _bytes_of(mebibytes: str) -> int:
    return int(mebibytes) * _MIB if mebibytes.isdigit() else 0  # `[N/A]` where memory is shared with the CPU


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def parse_links(matrix: str) -> tuple[tuple[str, ...], ...] | None:
    """The links between GPUs in the matrix of `nvidia-smi topo -m`; None if there is none."""
    lines = [_ESCAPE.sub("", line).split() for line in matrix.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"]), [])
    number = sum(re.fullmatch(r"GPU\d+", word) is not None for word in header)
    rows = [tuple(words[1 : number + 1]) for words in lines if words and re.fullmatch(r"GPU\d+", words[0])]
    square = tuple(row for row in rows if "X" in row)  # the header may begin with GPU0, too
    return square if number and len(square) == number and all(len(row) == number for row in square) else None


def read_torch() -> tuple[Torch | None, str | None]:
    """What torch reports, and why it cannot be imported; (None, None) if it is not installed."""
    try:
        import torch
    except ModuleNotFoundError as error:
        return None, None if error.name == "torch" else _first_line(error)
    except Exception as error:  # a library of CUDA is missing or broken
        return None, _first_line(error)
    backends = tuple(name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if _has_backend(torch, name))
    nccl = _nccl_version(torch) if "nccl" in backends else None
    return Torch(str(torch.__version__), _build_of(torch), tuple(_gpus_of(torch)), backends, nccl), None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _has_backend(torch: Any, name: str) -> bool:
    return torch.distributed.is_available() and torch.distributed.is_backend_available(name)


def _nccl_version(torch: Any) -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else None


def _build_of(torch: Any) -> str:
    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"ROCm {torch.version.hip}" if torch.version.hip else "CPU"


def _gpus_of(torch: Any) -> list[Gpu]:
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    every = (torch.cuda.get_device_properties(index) for index in range(number))
    return [Gpu(p.name, p.total_memory, (p.major, p.minor)) for p in every]
