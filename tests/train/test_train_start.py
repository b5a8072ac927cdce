"""What `zeropipe train` sets for the processes that it starts."""

from __future__ import annotations

import os

import pytest

from zeropipe.train.start import ALLOCATOR_SETTINGS, use_expandable_segments


@pytest.mark.parametrize("name", [None, *ALLOCATOR_SETTINGS])
def test_the_allocators_segments_are_expandable_unless_the_user_sets_another_way(monkeypatch, name):
    for each in ALLOCATOR_SETTINGS:
        monkeypatch.setenv(each, "")  # so that it is restored
        monkeypatch.delenv(each)
    if name is not None:
        monkeypatch.setenv(name, "backend:cudaMallocAsync")
    use_expandable_segments()
    found = {each: os.environ[each] for each in ALLOCATOR_SETTINGS if each in os.environ}
    assert found == ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if name is None else {name: os.environ[name]})
