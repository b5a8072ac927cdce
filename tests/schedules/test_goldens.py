"""One small example of every schedule, as torch's CSV: a change of an order must be meant."""

from pathlib import Path

import pytest

import zeropipe as zp
from zeropipe.schedules.registry import entries

GOLDENS = Path(__file__).parent / "goldens"


@pytest.mark.parametrize("entry", entries(), ids=str)
def test_golden(entry):
    """To renew one: `zeropipe draw NAME --ranks 4 --microbatches 8 -o tests/schedules/goldens/NAME.csv`.

    Those that are made for slices have `--slices 4`.
    """
    schedule = zp.build(entry.name, ranks=4, microbatches=8, **({"slices": 4} if entry.sliced else {}))
    assert zp.to_csv(schedule) == (GOLDENS / f"{entry.name}.csv").read_text()
