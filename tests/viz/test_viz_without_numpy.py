"""The viewer's data without numpy and numba, as a browser makes it."""

import json
import subprocess
import sys

import pytest

import zeropipe as zp
from zeropipe.sim.compare import compare
from zeropipe.viz.payload import payload

COSTS = {"f": [1, 1, 1, 1.3], "i": 1.1, "w": 0.7, "p2p": 0.15, "memory_limit": 3.5, "full_weights": 4}
SHARDS = {"shards": "keep", "unshard": 0.1, "reduce": 0.2}
BLOCKED = ("numpy", "numba", "rich", "click", "pydantic")
SCRIPT = f"""
import json, sys
sys.modules.update(dict.fromkeys({BLOCKED}))
import zeropipe as zp
from zeropipe.sim.compare import compare
from zeropipe.viz.payload import payload
schedules = [zp.build(name, ranks=4, microbatches=8) for name in zp.names()]
print(json.dumps(payload(compare(schedules, zp.Costs(**{COSTS | SHARDS})))))
"""


def test_the_payload_needs_no_numpy():
    plain = json.loads(subprocess.check_output([sys.executable, "-c", SCRIPT], text=True, timeout=120))
    schedules = [zp.build(name, ranks=4, microbatches=8) for name in zp.names()]
    expected = payload(compare(schedules, zp.Costs(**COSTS, **SHARDS)))
    assert plain == json.loads(json.dumps(expected))


LARGE = """
import sys
sys.modules["numba"] = None
from zeropipe.core import jit
jit.COMPILE_FROM_SIZE, jit.COMPILE_AFTER_ACTIONS = 100, 100
import zeropipe as zp
print(zp.simulate(zp.build("1f1b", ranks=4, microbatches=100)).makespan)
"""


def test_large_inputs_stay_plain_without_numba():
    shown = subprocess.check_output([sys.executable, "-c", LARGE], text=True, timeout=120)
    assert float(shown) == pytest.approx(3 * (100 + 3))
