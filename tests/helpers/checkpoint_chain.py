"""A chain of layouts, each of which loads the checkpoint of the one before it."""

from __future__ import annotations

import math

import checkpoint_cases as cases
from engine_helpers import ranks

import zeropipe as zp


def chain(tmp_path, model, layouts, asynchronous=False, run=None) -> list[float]:
    """Every layout loads what the one before it saved, built with another seed; differences from one process."""
    (tmp_path / "oracle").mkdir()
    cases.oracle(model, len(layouts), tmp_path / "oracle")
    seen = []
    for step, (name, sizes) in enumerate(layouts):
        microbatches = 8 if name == "dualpipev" else cases.BATCHES
        schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=microbatches)
        args = (schedule, sizes, model, str(tmp_path / "checkpoint"), step, str(tmp_path / "oracle"), asynchronous)
        found = run(*args) if run is not None else ranks(math.prod(sizes.values())).run(cases.link, *args)
        seen.append(max(found))
    return seen
