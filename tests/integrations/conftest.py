"""Tests of a framework run in the virtual environment that has it: `make test-torchtitan`, and others."""

import os
from collections import Counter
from importlib.util import find_spec

import pytest

FRAMEWORKS = {
    "test_torchtitan.py": "torchtitan", "test_archon.py": "areal", "test_trainer_integration.py": "trl",
    "test_automodel.py": "nemo_automodel", "test_verl.py": "verl",
}  # fmt: skip
collect_ignore = [file for file, framework in FRAMEWORKS.items() if find_spec(framework) is None]

# ranks run side by side: threads of their own would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")


# frameworks do not close the process groups that they make: the threads of many groups leave ranks little time
TESTS_PER_POOL = 10


@pytest.fixture(scope="module")
def pools(request):
    """`pools(number)`: local ranks that some tests of a file share, and new ones after a test that failed on them."""
    from zeropipe.engine import LocalRanks

    pools, uses = {}, Counter()

    def ranks(number):
        if number in pools and uses[number] % TESTS_PER_POOL == 0:
            pools[number].close()
        if number not in pools or pools[number].closed:
            pools[number] = LocalRanks(number, preload=[request.module.CASES])
        uses[number] += 1
        return pools[number]

    yield ranks
    for pool in pools.values():
        pool.close()


@pytest.fixture
def two(pools):
    return pools(2)


@pytest.fixture
def four(pools):
    return pools(4)
