"""What every test gets."""

import pytest
from visits import address, visit  # noqa: F401

from zeropipe.schedules import registry


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    """Schedules that a test registers are gone after it."""
    registry.names()  # load ours first
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
