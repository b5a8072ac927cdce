"""Names that were replaced by words of the field do not come back."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "zeropipe"
# by package ("" is all of them): names of files, classes and functions that are gone
REPLACED = {
    "": """
        nursery bear _born _live Told told Team HasTeam Opened open_step KindBook unsaid speaks stayed Passes Executors
        Gauge Actor Whole Undrawn unset chance prove uncovered Workshop Hunt _Leg Judge climb Asked Few few ordering
        laps crossing Bed growing rings pen anyhow likely live_on INSIDE apart reality tries sifted AsRun _told
        Wanted Beside Kept Sole Taken _sow require_sense Hand Here Meeting Refused Seen Watched Ran MOST
        """,
    "engine": "Place Desk Board Parts Piece Lane spread Enter Leave Join Take share switch complete alive ahead",
    "searching": "Start Field Room Place way share right ready starts owed",
    "core": "shards sharding given",
    "planning": "Row Scene",
    "cli": "Cut",
    "train": "Place prepared",
    "app": "Desk Lane",
}


@cache
def defined_names(path: Path) -> set[str]:
    """The module's name, and the names of its classes, functions and constants."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.name for node in nodes if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))}
    names |= {
        target.id for node in nodes if isinstance(node, ast.Assign) for target in node.targets
        if isinstance(target, ast.Name) and target.id.isupper()
    }  # fmt: skip
    return names | {path.stem, path.parent.name}


@pytest.mark.parametrize("package", REPLACED)
def test_replaced_names_are_gone(package):
    replaced = set(REPLACED[package].split())
    found = {
        str(path.relative_to(SRC)): sorted(names)
        for path in (SRC / package).rglob("*.py")
        if (names := defined_names(path) & replaced)
    }
    assert found == {}


PHRASES = ("a whole number from", "held against", ": [^#]* (is|are) needed, ", "from 0 on is", "from 1 on is")


@pytest.mark.parametrize("phrase", PHRASES)
def test_replaced_phrases_are_gone(phrase):
    found = [
        f"{path.relative_to(SRC)}:{number}"
        for suffix in ("py", "js", "html")
        for path in SRC.rglob(f"*.{suffix}")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(phrase, line)
    ]
    assert found == []
