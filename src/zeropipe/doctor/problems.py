"""What cannot run on this machine, or will be slow, and why: each with a command that mends it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from zeropipe.core.units import count_text, gigabytes, number
from zeropipe.doctor.machine import Machine
from zeropipe.doctor.packages import Extra, parse_version

TESTED_TORCH = ("2.11", "2.13")  # the oldest and the newest that tests run with
_TORCH = f"'torch>={TESTED_TORCH[0]},<{TESTED_TORCH[1].partition('.')[0]}.{int(TESTED_TORCH[1].partition('.')[2]) + 1}'"
MIN_SHARED_MEMORY = 1e9  # of /dev/shm; Docker's default of 64 MB is too small for NCCL
BFLOAT16_CAPABILITY = (8, 0)


class Problem(NamedTuple):
    """One problem. `level`: `unusable` does not run, `untested` may not, `slow` does."""

    level: str
    text: str
    fix: str


def find_problems(machine: Machine, extras: tuple[Extra, ...]) -> list[Problem]:
    """All problems, those that stop a command first."""
    found = [problem for rule in _MACHINE_RULES for problem in rule(machine)]
    found += _outdated_packages(extras)
    return sorted(found, key=lambda problem: ("unusable", "untested", "slow").index(problem.level))


def _outdated_packages(extras: tuple[Extra, ...]) -> list[Problem]:
    """A package that is there in a version too old is a fault; one that is not there may be left out on purpose."""
    old = {package: extra for extra in reversed(extras) for package in extra.missing if package.version is not None}
    return [
        Problem("unusable", f"{p.name} {p.version} is too old: zeropipe[{extra.name}] needs {p.least}", extra.command)
        for p, extra in old.items()
    ]


def _torch(machine: Machine) -> Iterator[Problem]:
    if machine.torch_error:
        yield Problem(
            "unusable", f"torch is installed, but cannot be imported: {machine.torch_error}",
            f"pip install --force-reinstall {_TORCH}",
        )  # fmt: skip
    elif machine.torch is None:
        yield Problem(
            "unusable", "without torch no model can be run, profiled or trained", "pip install 'zeropipe[train]'"
        )
    elif not _is_tested(machine.torch.version):
        low, high = TESTED_TORCH
        yield Problem(
            "untested", f"torch {machine.torch.version}: zeropipe is tested with {low} to {high}",
            f"pip install {_TORCH}",
        )  # fmt: skip


def _is_tested(version: str) -> bool:
    low, high = map(parse_version, TESTED_TORCH)
    return low <= parse_version(version)[:2] <= high


def _unseen_gpus(machine: Machine) -> Iterator[Problem]:
    if machine.torch is None or machine.torch.gpus or not (machine.driver and machine.driver.gpus):
        return
    gpus, driver = count_text(len(machine.driver.gpus), "GPU"), machine.driver.version
    if machine.torch.build == "CPU":
        fix = f"pip install --force-reinstall --index-url https://pypi.org/simple {_TORCH}"
        yield Problem("slow", f"torch {machine.torch.version} is a build for CPUs: it uses none of {gpus}", fix)
    elif machine.visible_devices is not None:
        text = f"CUDA_VISIBLE_DEVICES={machine.visible_devices} hides {gpus} from torch"
        yield Problem("slow", text, "unset CUDA_VISIBLE_DEVICES")
    else:
        text = f"torch for {machine.torch.build} sees none of {gpus}: driver {driver} may be too old for it"
        yield Problem("slow", text, "python -c 'import torch; torch.cuda.init()'  # says why")


def _no_gpu(machine: Machine) -> Iterator[Problem]:
    if machine.torch is not None and not machine.gpus and not (machine.driver and machine.driver.gpus):
        cores = count_text(machine.cores, "CPU core")
        yield Problem(
            "slow", f"no GPU: models run on {cores}, which all local ranks share, so measured times are those of CPUs",
            "zeropipe plan MODEL --gpus 8 --batch 64 --gpu h100  # plans for GPUs that are not here",
        )  # fmt: skip


def _no_nccl(machine: Machine) -> Iterator[Problem]:
    torch = machine.torch
    if torch is not None and torch.gpus and "nccl" not in torch.backends:
        text = f"torch {torch.version} has no NCCL: messages between GPUs go through gloo and the CPU"
        yield Problem("slow", text, f"pip install --force-reinstall --index-url https://pypi.org/simple {_TORCH}")


def _slow_links(machine: Machine) -> Iterator[Problem]:
    links = machine.links or ()
    slow = [
        (a, b, link) for a, row in enumerate(links) for b, link in enumerate(row)
        if a < b and not link.startswith("NV")
    ]  # fmt: skip
    if slow:
        a, b, link = slow[0]
        text = (
            f"GPUs {a} and {b} are connected by {link}, not by NVLink, as are {count_text(len(slow), 'pair')} in all: "
            "tensor parallelism and sharding wait for PCIe; a pipeline sends the least"
        )
        number_of_gpus = len(machine.gpus)
        yield Problem("slow", text, f"zeropipe plan MODEL --gpus {number_of_gpus} --batch 64 --tp 1")


def _mixed_gpus(machine: Machine) -> Iterator[Problem]:
    names = Counter(gpu.name for gpu in machine.gpus)
    if len(names) > 1:
        most = names.most_common(1)[0][0]
        same = ",".join(str(n) for n, gpu in enumerate(machine.gpus) if gpu.name == most)
        text = f"the GPUs differ ({', '.join(names)}): ranks on the faster ones wait for the others"
        yield Problem("slow", text, f"export CUDA_VISIBLE_DEVICES={same}")


def _no_bfloat16(machine: Machine) -> Iterator[Problem]:
    old = next((gpu for gpu in machine.gpus if (0, 0) < gpu.capability < BFLOAT16_CAPABILITY), None)
    if old is not None and (machine.torch is None or not machine.torch.build.startswith("ROCm")):
        text = f"{old.name} has no bfloat16 in hardware: it is emulated"
        yield Problem("slow", text, "zeropipe train run.toml --model.dtype float32")


def _small_shared_memory(machine: Machine) -> Iterator[Problem]:
    size = machine.shared_memory
    if size is not None and size < MIN_SHARED_MEMORY and len(machine.gpus) > 1:
        text = f"/dev/shm has {gigabytes(size)}: NCCL fails, or uses the network, where GPUs have no direct link"
        yield Problem("slow", text, "docker run --shm-size=8g ...  # or: mount -o remount,size=8G /dev/shm")


def _throttled(machine: Machine) -> Iterator[Problem]:
    quota = machine.cpu_quota
    if quota is not None and quota < machine.cores:
        text = (
            f"this container may use the time of {number(quota, 2)} of {count_text(machine.cores, 'core')}: "
            "processes for the others are paused"
        )
        yield Problem("slow", text, f"taskset -c 0-{max(1, round(quota)) - 1} zeropipe ...")


def _no_compiler(machine: Machine) -> Iterator[Problem]:
    if machine.torch is not None and machine.compiler is None:
        yield Problem("unusable", "engine.compile=true needs a C++ compiler", "apt-get install g++")


_MACHINE_RULES: tuple[Callable[[Machine], Iterator[Problem]], ...] = (
    _torch, _unseen_gpus, _no_gpu, _no_nccl, _slow_links, _mixed_gpus, _no_bfloat16, _small_shared_memory, _throttled,
    _no_compiler,
)  # fmt: skip
