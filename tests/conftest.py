"""Fixtures and hooks of all tests; see README.md in this folder."""

import gc
import os
import sys
from pathlib import Path

import cpu_times
import fork_server
import pytest
from browser import browser, fold_skips, pages, watched  # noqa: F401
from page_fixtures import address, visit  # noqa: F401
from worst_errors import print_worst, report_error  # noqa: F401

from zeropipe.schedules import registry

# Workers run in parallel, and so do the ranks in them: more threads would only compete for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels without vector instructions compile in half the time; set TORCHINDUCTOR_VEC_ISA_OK=1 to use them.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# The longest files run first, so that no worker is left with one of them at the end; files that use no compiled kernels
# precede them (helpers/compile_kernels.py). Files that compile with torch are far apart: the second finds the cache of
# the first.
LONGEST_FILES = (
    "compile", "models_table", "faults", "setup_faults", "mesh", "families_exact", "tensor", "engine_hf", "engine",
    "docs", "browser_app", "pipelining_use", "checkpoint", "adapters", "browser_looks", "run", "search",
    "compile_schedules", "engine_examples", "save", "pipelining", "weights", "train_resume", "browser_plan",
    "profile", "stages", "plan", "laws", "bounds", "app_load", "balance", "browser_picture", "train_saving",
    "dynamic", "chaos", "app_fuzz", "gradients", "viz_files", "viz_robust", "train", "mesh_faults",
    "browser_viewer", "browser_trace",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    gpu = os.path.exists("/dev/nvidiactl") and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    if len(specs) > 1 and sys.platform == "linux" and not gpu:  # no CUDA in forks
        server = fork_server.ForkServer(config.args)
        config.add_cleanup(server.close)
        os.environ[fork_server.ADDRESS] = server.address
        for spec in specs:
            spec.python = server.python


def pytest_addoption(parser):
    parser.addoption("--cpu-times", action="store_true", help="print the CPU time of files, with what they start")


def pytest_configure(config):
    if config.getoption("--cpu-times"):
        config.pluginmanager.register(cpu_times.CpuTimes())
    if fork_server.ADDRESS in os.environ and hasattr(config, "workerinput"):
        from zeropipe.engine.run import forkserver

        forkserver.start_process = lambda code, file: fork_server.Fork(code, [1, 2, file])


def pytest_collection_modifyitems(items):
    order = {f"test_{name}": number for number, name in enumerate(LONGEST_FILES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish():
    """Exclude imported objects from garbage collection: scanning them takes a tenth of the tests' time."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Close the local ranks after the last test of a file."""
    if "engine_helpers" in sys.modules and (nextitem is None or nextitem.path != item.path):
        sys.modules["engine_helpers"].close_pools()


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory) -> Path:
    """One compile cache for all workers of a test run, empty at its start."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if base.name.startswith("popen-") else base) / "inductor"


def pytest_terminal_summary(terminalreporter):
    """Print the figures that tests recorded with `record_property("says", text)`; one line for a missing browser."""
    fold_skips(terminalreporter.stats.get("skipped", []))
    print_worst(terminalreporter)
    for report in terminalreporter.stats.get("passed", []):
        for name, text in report.user_properties:
            if name == "says":
                terminalreporter.write_line(text)


@pytest.fixture
def run(capsys, monkeypatch):
    """The command line: run("list") -> (status, stdout, stderr)."""
    from zeropipe.cli import main

    monkeypatch.setenv("COLUMNS", "120")

    def call(*args):
        status = 0
        try:
            main([str(arg) for arg in args])
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return call


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """Remove the schedules that a test registers."""
    registry.names()  # load the built-in ones first
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
