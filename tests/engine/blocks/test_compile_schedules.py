"""Every AC mode, eager and compiled, under real split-backward schedules on local ranks."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("transformers")

from compile_cases import cold_and_warm, worst_error, worst_toy_error
from engine_helpers import PRELOAD, largest, ranks
from full_marker import mark_rest_full

import zeropipe as zp

AC_MODES = ["none", "full", "selective:2", "selective:op", "memory_budget:0.5"]
SCHEDULES = ["1f1b", "zbv", "dualpipev", "dualpipe"]


@pytest.fixture
def compiling():
    """Two ranks that find inductor imported, unless there are GPUs: it looks at them, and ranks are forks."""
    return ranks(2, PRELOAD if torch.cuda.is_available() else (*PRELOAD, "torch._inductor.compile_fx"))


@pytest.fixture(scope="module")
def cache(compile_cache):
    """What test_compile.py compiled is taken from it."""
    return str(compile_cache)


@pytest.mark.parametrize(
    "family, name",
    mark_rest_full(product(("qwen3", "llama"), SCHEDULES), [("qwen3", "zbv")]),
)
def test_eager(family, name, cache):
    schedule = zp.build(name, ranks=2, microbatches=4)
    errors = largest(ranks(2).run(worst_error, schedule, family, AC_MODES[:4], False, "store", (9, 12, 7), cache))
    assert max(errors.values()) < 1e-10, errors


# A part of the product below, to keep `make test` short: test_compile.py has compiled this block before.
def test_compiled(compiling, cache):
    schedule = zp.build("dualpipe", ranks=2, microbatches=4)
    job = (worst_error, schedule, "llama", ["none"], True, "store", (9,), cache)
    errors = largest(compiling.run(*job, timeout=280))
    assert max(errors.values()) < 1e-6, errors


@pytest.mark.full
def test_blocks_that_inductor_computes_again(compiling, cache):
    schedule = zp.build("zbv", ranks=2, microbatches=4)
    assert max(compiling.run(worst_toy_error, schedule, "full", cache, timeout=280)) < 1e-12


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", AC_MODES)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_cold_and_warm(family, name, mode, compiling, cache):
    """The whole product with inductor, each with an empty and with a warm compile cache: `make test-full`."""
    schedule = zp.build(name, ranks=2, microbatches=4)
    found = largest(compiling.run(cold_and_warm, schedule, family, mode, cache, timeout=550))
    assert max(found["cold"], found["warm"]) < 1e-6, found
    assert found["cold misses"] > 0 == found["warm misses"]  # the ranks share the cache: one may be first


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_eager_memory_budget(family, name, cache):
    """The fifth mode of the eager half: it falls back to selective:op, with a warning."""
    schedule = zp.build(name, ranks=2, microbatches=4)
    job = (worst_error, schedule, family, AC_MODES[4:], False, "store", (9, 12, 7), cache)
    assert max(largest(ranks(2).run(*job)).values()) < 1e-10
