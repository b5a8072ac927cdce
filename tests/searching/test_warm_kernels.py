"""Kernels are compiled or loaded before the time of a search starts."""

import subprocess
import sys

import pytest

import zeropipe as zp
from zeropipe.searching import driver, local_search, warm_kernels

CODE = """
from numba.core.caching import FunctionCache
import zeropipe as zp
from zeropipe.searching.warm_kernels import warm_kernels

loads, load = [], FunctionCache.load_overload
def record_load(self, *args):
    loads.append(self._name)
    return load(self, *args)
FunctionCache.load_overload = record_load  # called whenever a kernel is called with arguments of new types
warm_kernels(num_actions=10_000)
assert loads
loads.clear()

costs = {"f": 1.0, "i": 1.2, "w": 0.7, "p2p": 0.05}
zp.search(ranks=6, microbatches=24, costs=zp.Costs(**costs, memory_limit=5, stash=0.5), steps=2500)
zp.search(ranks=6, microbatches=20, costs=zp.Costs(**costs), weight_parts=3, objective="span", steps=300)
zp.search(ranks=4, microbatches=12, stages_per_rank=2, rank_limits=[5, 6, 7, 8], costs=zp.Costs(**costs), steps=300)
uneven = zp.Costs(f=[1, 2, 1, 1, 1, 1, 1, 1, 3], message=1.0, bandwidth=2.0, memory_limit=7)
zp.search(ranks=3, microbatches=9, stages_per_rank=3, placement="loop", costs=uneven, steps=300)
zp.search(ranks=8, microbatches=96, costs=zp.Costs(**costs, memory_limit=16), steps=20)
print("more:", *sorted(set(loads)))
"""


def test_searches_load_no_kernel_that_was_not_warmed():
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=250)
    assert (ran.stdout, ran.stderr) == ("more:\n", "")


@pytest.mark.parametrize("part", [(driver.SearchDriver, "_search_all"), (local_search, "_wait")])
def test_ctrl_c_while_kernels_are_warmed_ends_the_search(part, monkeypatch):
    """The small searches that warm them catch Ctrl-C: it must not be lost with them."""

    def pressed(*args):
        if isinstance(args[-1], local_search.Effort):  # what _wait does with it
            args[-1].stop[0], args[-1].interrupted = 1, True
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(*part, pressed)
    warm_kernels._warm_search_kernels.cache_clear()
    with pytest.raises(KeyboardInterrupt):
        zp.search(ranks=4, microbatches=8, costs=zp.Costs(p2p=0.1, memory_limit=3), seconds=1)
