"""`zeropipe doctor`: GPUs, links and torch are fakes, as reported by nvidia-smi on real machines."""

import json
import os
import subprocess
import sys
import tomllib
from dataclasses import replace
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from paths import ROOT, SOURCE

from zeropipe.doctor import machine as machine_module
from zeropipe.doctor.machine import Driver, Gpu, Machine, Torch, parse_links, read_cpu_quota, read_driver, read_torch
from zeropipe.doctor.packages import USES, Extra, Package, list_extras, parse_version, read_requirements
from zeropipe.doctor.problems import TESTED_TORCH, find_problems

H100, V100 = Gpu("NVIDIA H100", 80 * 2**30, (9, 0)), Gpu("Tesla V100", 32 * 2**30, (7, 0))
CUDA_TORCH = Torch("2.13.0", "CUDA 12.8", (H100, H100), ("gloo", "nccl"), "2.27.5")
CPU_TORCH = Torch("2.13.0+cpu", "CPU", (), ("gloo",), None)
NVLINK, PCIE = (("X", "NV18"), ("NV18", "X")), (("X", "PHB"), ("PHB", "X"))
GOOD = Machine(
    "Linux x86_64", "3.12.1", 64, shared_memory=10**11, compiler="/usr/bin/g++",
    driver=Driver("570.1", (H100, H100), NVLINK), torch=CUDA_TORCH,
)  # fmt: skip
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPXB\t0-47\t0\tN/A
GPU1\tNV18\t X \tSYS\t48-95\t1\tN/A
NIC0\tPXB\tSYS\t X

Legend:
  X    = Self
"""


def changed(**values) -> Machine:
    return replace(GOOD, **values)


def test_a_good_machine_has_no_problem():
    assert find_problems(GOOD, ()) == []


@pytest.mark.parametrize(
    "machine, level, text, fix",
    [
        (changed(torch=None), "unusable", "without torch", "pip install 'zeropipe[train]'"),
        (changed(torch=None, torch_error="libcudart.so.12: cannot open"), "unusable", "libcudart", "--force-reinstall"),
        (changed(torch=CPU_TORCH), "slow", "a build for CPUs: it uses none of 2 GPUs", "--index-url"),
        (changed(torch=replace(CUDA_TORCH, gpus=()), visible_devices=""), "slow",
         "CUDA_VISIBLE_DEVICES= hides 2 GPUs", "unset CUDA_VISIBLE_DEVICES"),
        (changed(torch=replace(CUDA_TORCH, gpus=())), "slow", "driver 570.1", "cuda.init"),
        (changed(torch=CPU_TORCH, driver=None), "slow", "no GPU", "zeropipe plan"),
        (changed(torch=replace(CUDA_TORCH, version="2.10.1")), "untested", "2.10.1",
         "'torch>=2.11,<2.14'"),
        (changed(torch=replace(CUDA_TORCH, version="2.14.0")), "untested", "2.14.0",
         "'torch>=2.11,<2.14'"),
        (changed(torch=replace(CUDA_TORCH, backends=("gloo",))), "slow", "no NCCL", "pip"),
        (changed(driver=Driver("570.1", (H100, H100), PCIE)), "slow", "GPUs 0 and 1 are connected by PHB", "--tp 1"),
        (changed(torch=replace(CUDA_TORCH, gpus=(V100, H100, H100))), "slow",
         "the GPUs differ", "CUDA_VISIBLE_DEVICES=1,2"),
        (changed(torch=replace(CUDA_TORCH, gpus=(V100,))), "slow", "bfloat16", "float32"),
        (changed(shared_memory=64 * 2**20), "slow", "/dev/shm has 67 MB", "--shm-size"),
        (changed(cpu_quota=2.0), "slow", "the time of 2 of 64 cores", "taskset -c 0-1"),
        (changed(compiler=None), "unusable", "C++ compiler", "apt-get install g++"),
    ],
)  # fmt: skip
def test_each_problem_has_its_cause_and_a_remedy(machine, level, text, fix):
    (problem,) = [p for p in find_problems(machine, ()) if text in p.text]
    assert problem.level == level
    assert fix in problem.fix


def test_one_gpu_needs_neither_links_nor_shared_memory():
    one = Torch("2.11.0", "CUDA 12.8", (H100,), ("gloo", "nccl"), None)
    assert find_problems(changed(torch=one, shared_memory=1, driver=Driver("1", (H100,), (("X",),))), ()) == []


def test_links_of_gpus_that_torch_does_not_see_are_unknown():
    one = replace(CUDA_TORCH, gpus=(H100,))
    assert changed(torch=one).links is None


def test_a_package_that_is_too_old_is_a_problem_and_a_missing_one_is_not():
    extras = (Extra("app", (Package("fastapi", "0.115", "0.99.9"), Package("uvicorn", "0.30", None))),)
    (problem,) = find_problems(GOOD, extras)
    assert problem.text == "fastapi 0.99.9 is too old: zeropipe[app] needs 0.115"
    assert problem.fix == "pip install 'zeropipe[app]'"


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """Puts a program of that name first on the PATH, which runs these lines of shell."""

    def install(*lines: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("\n".join(("#!/bin/sh", *lines)))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def test_nvidia_smi_tells_gpus_and_links(nvidia_smi, tmp_path):
    (tmp_path / "topology").write_text(TOPOLOGY)
    nvidia_smi(
        f"if [ $1 = topo ]; then cat {tmp_path}/topology; exit; fi",
        "echo '570.124.06, 143771, 9.0, NVIDIA H200'", "echo '570.124.06, [N/A], [N/A], NVIDIA GB10'",
    )  # fmt: skip
    gpus = Gpu("NVIDIA H200", 143771 * 2**20, (9, 0)), Gpu("NVIDIA GB10", 0, (0, 0))
    assert read_driver() == Driver("570.124.06", gpus, (("X", "NV18"), ("NV18", "X")))


@pytest.mark.parametrize("lines", [["exit 9"], ["echo 'No devices were found'"], ["sleep 5"]])
def test_nvidia_smi_that_fails_or_hangs_is_left_out(nvidia_smi, monkeypatch, lines):
    monkeypatch.setattr(machine_module, "NVIDIA_SMI_TIMEOUT_S", 1)
    nvidia_smi(*lines)
    assert read_driver() is None


@pytest.mark.parametrize("matrix", ["", "No devices were found\n", "\tGPU0\tGPU1\nGPU0\t X \n"])
def test_links_that_cannot_be_read_are_unknown(matrix):
    assert parse_links(matrix) is None


def test_one_gpu_has_a_matrix_of_one():
    assert parse_links("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") == (("X",),)


def test_cpu_quota_of_a_container(tmp_path):
    assert read_cpu_quota(tmp_path) is None
    for text, quota in (("max 100000\n", None), ("250000 100000\n", 2.5)):
        (tmp_path / "cpu.max").write_text(text)
        assert read_cpu_quota(tmp_path) == quota


def test_what_torch_reports_of_its_gpus(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 * 2**30, major=9, minor=0)
    cuda = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, get_device_properties=lambda index: properties,
        nccl=SimpleNamespace(version=lambda: (2, 27, 5)),
    )  # fmt: skip
    distributed = SimpleNamespace(is_available=lambda: True, is_backend_available=lambda name: name in ("gloo", "nccl"))
    version = SimpleNamespace(cuda="12.8", hip=None)
    fake = SimpleNamespace(__version__="2.13.0", cuda=cuda, distributed=distributed, version=version)
    monkeypatch.setitem(sys.modules, "torch", fake)
    assert read_torch() == (CUDA_TORCH, None)


def test_the_real_torch_agrees():
    import torch

    found, error = read_torch()
    assert error is None
    assert (found.version, len(found.gpus)) == (torch.__version__, torch.cuda.device_count())
    assert ("gloo" in found.backends) == torch.distributed.is_gloo_available()


def test_extras_are_those_of_the_package_with_the_same_requirements():
    extras = PYPROJECT["optional-dependencies"]
    assert {*USES} == {*extras} - {"dev", "docs"}  # for people who change zeropipe
    lines = [f"{line} ; extra == '{extra}'" for extra, listed in extras.items() for line in listed]
    needs = read_requirements(lines)
    for extra in USES:
        for own in map(Requirement, extras[extra]):
            if own.name == "zeropipe":
                assert all(needs[other].items() <= needs[extra].items() for other in own.extras)
            else:
                assert str(own.specifier) == f">={needs[extra][own.name]}"


def test_installed_extras_are_found():
    from importlib.metadata import version

    by_name = {extra.name: extra for extra in list_extras()}
    torch = next(package for package in by_name["train"].packages if package.name == "torch")
    assert torch.version == version("torch")
    assert by_name["engine"].missing == ()


@pytest.mark.parametrize("text", ["2.13.0+cpu", "2.11", "2.14.0.dev20260101", "0.163.0rc1"])
def test_versions_have_the_release_that_packaging_reads(text):
    assert parse_version(text) == Version(text).release


def test_the_tested_range_of_torch_is_that_of_the_package():
    low, high = TESTED_TORCH
    (torch,) = [line for line in PYPROJECT["optional-dependencies"]["engine"] if line.startswith("torch")]
    assert torch == f"torch>={low}"
    assert f"torch=={high}." in (ROOT / "constraints.txt").read_text()
    assert f"{low} and {high}" in (ROOT / "CONTRIBUTING.md").read_text()


def test_command_prints_the_remedies(run, monkeypatch):
    monkeypatch.setattr(machine_module, "examine", lambda: changed(driver=Driver("570.1", (H100, H100), PCIE)))
    status, out, _ = run("doctor")
    assert status == 0
    assert "0: NVIDIA H100, 85.9 GB; 1: NVIDIA H100, 85.9 GB" in out
    assert "nccl 2.27.5" in out
    assert "PHB" in out
    assert "    zeropipe plan MODEL --gpus 2 --batch 64 --tp 1" in out
    assert "engine" in out


@pytest.mark.parametrize("torch", ["raise OSError('libcudart.so.12: no such file')", None])
def test_command_works_where_torch_does_not(tmp_path, torch):
    """In a new process: torch is missing there, or breaks at import."""
    blocker = "import sys\nsys.modules['torch'] = None\n" if torch is None else ""
    if torch:
        (tmp_path / "torch.py").write_text(torch)
    code = f"{blocker}from zeropipe.cli import main\nmain(['doctor', '--json'])"
    path = os.pathsep.join([str(tmp_path), str(SOURCE.parent)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["torch"] is None
    assert report["torch_error"] == (None if torch is None else "libcudart.so.12: no such file")
    assert report["problems"][0]["level"] == "unusable"
