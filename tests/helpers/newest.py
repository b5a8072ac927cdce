"""What changed with the installed torch and transformers: versions, and rows of docs/models.md (`make test-newest`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from paths import ROOT


def version_lines() -> Iterator[str]:
    """The installed versions beside those of constraints.txt."""
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for name in ("torch", "transformers"):
        installed = version(name)
        known = installed.partition("+")[0] == pinned[name]
        yield f"{name} {installed}, {'as in' if known else pinned[name] + ' in'} constraints.txt"


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A line for each model type that is new, gone, or has another row."""
    for model_type in sorted(before.keys() | now.keys()):
        old, new = before.get(model_type), now.get(model_type)
        if old is None:
            yield f"new: {model_type}: {new.cut}"
        elif new is None:
            yield f"gone: {model_type}"
        elif old != new:
            fields = zip(old._fields, old, new, strict=True)
            yield f"changed: {model_type}: " + ", ".join(f"{name} {a!r} -> {b!r}" for name, a, b in fields if a != b)


def main() -> None:
    """Print all of it."""
    from family_models import TABLE, models_table

    print(*version_lines(), sep="\n")
    lines = list(differences(TABLE, {name: models_table.row(name) for name in sorted(models_table.CAUSAL_TYPES)}))
    print(*lines or ["no model type differs from docs/models.md"], sep="\n", flush=True)


if __name__ == "__main__":
    main()
