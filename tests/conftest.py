"""What every test gets."""

import gc
import os
import sys
from pathlib import Path

import forks
import pytest
from browser import browser, pages, watched  # noqa: F401
from visits import address, visit  # noqa: F401

from zeropipe.schedules import registry

# Workers run side by side, and so do the ranks in them: threads of their own would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Kernels without vector instructions are compiled in half the time; TORCHINDUCTOR_VEC_ISA_OK=1 gives them back.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

# The files that take longest begin first, so that no worker is left alone with one of them at the end; before them
# those that need no compiled kernels (warm.py). Those that compile are far apart: what the first one compiled the
# second finds in the cache.
LONG = (
    "compile", "models_table", "faults", "mesh", "families_exact", "tensor", "engine_hf", "engine", "docs",
    "browser_app", "pipelining_use", "checkpoint", "adapters", "browser_looks", "run", "search", "compile_schedules",
    "engine_examples", "save", "pipelining", "weights", "train_resume", "browser_plan", "profile", "stages", "plan",
    "laws", "bounds", "app_load", "balance", "browser_picture", "train_saving", "dynamic", "chaos", "app_fuzz",
    "gradients", "viz_files", "viz_robust", "train", "mesh_faults", "browser_viewer", "browser_trace",
)  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config, specs):
    gpu = os.path.exists("/dev/nvidiactl") and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    if len(specs) > 1 and sys.platform == "linux" and not gpu:  # no CUDA in forks
        stock = forks.Stock(config.args)
        config.add_cleanup(stock.close)
        os.environ[forks.ADDRESS] = stock.address
        for spec in specs:
            spec.python = stock.python


def pytest_configure(config):
    if forks.ADDRESS in os.environ and hasattr(config, "workerinput"):
        from zeropipe.engine.run import nursery

        nursery.start = lambda code, file: forks.Fork(code, [1, 2, file])


def pytest_collection_modifyitems(items):
    place = {f"test_{name}": number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish():
    """What was imported stays: to look through it for garbage again and again takes a tenth of the time of tests."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """After the last test of a file."""
    if "engine_helpers" in sys.modules and (nextitem is None or nextitem.path != item.path):
        sys.modules["engine_helpers"].close_pools()


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory) -> Path:
    """One compile cache for all workers of this test run, empty at its start."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if base.name.startswith("popen-") else base) / "inductor"


def pytest_terminal_summary(terminalreporter):
    """What tests want to be read, whichever worker ran them."""
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
    """Schedules that a test registers are gone after it."""
    registry.names()  # load ours first
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
