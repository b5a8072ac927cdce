"""The walks of docs/architecture.md are parsed out of the page: each function exists and is called in that order.

A line of a walk is "3. `folder/file.py`: `function` what it does", or `Class.method`.
"""

import ast
import importlib.util
import json
import os
import re
from pathlib import Path

import pytest
from paths import DOCS, HELPERS, SOURCE
from script_runner import torchrun
from walk_cases import COMMANDS, Call, record_engine

STEP = re.compile(r"^\d+\. `([\w/]+\.py)`: `([\w.]+)` ", re.M)
PLACE = re.compile(r"`([\w/]+\.py)`(?:: `([\w.]+)`)?")
NUM_STEPS = 10


def parse_walks() -> dict[str, list[Call]]:
    """The steps of each walk by its name."""
    text = (DOCS / "architecture.md").read_text().partition("\n## Walks\n")[2]
    sections = [section.partition("\n") for section in text.split("\n### ")[1:]]
    return {name.strip(): STEP.findall(body) for name, _, body in sections}


WALKS = parse_walks()


def defined_names(path: Path) -> set[str]:
    """Functions and methods of a file, the latter as `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member.name}" for member in node.body if isinstance(member, ast.FunctionDef)}
    return names


def missing_step(walk: list[Call], calls: list[Call]) -> Call | None:
    """The first step of a walk that is not called after the step before it; None if all are."""
    left = iter(calls)
    return next((step for step in walk if step not in left), None)


@pytest.mark.parametrize("name", WALKS)
def test_files_and_functions_exist(name):
    missing = [
        (file, function)
        for file, function in WALKS[name]
        if not (SOURCE / file).exists() or function not in defined_names(SOURCE / file)
    ]
    assert missing == []


@pytest.mark.parametrize("name", WALKS)
def test_walk_has_ten_steps(name):
    assert len(WALKS[name]) == NUM_STEPS


@pytest.mark.parametrize("name", COMMANDS)
def test_command_calls_the_functions_in_order(name, tmp_path):
    file = tmp_path / "functions.json"
    file.write_text(json.dumps(WALKS[name]))
    done = torchrun(1, [str(HELPERS / "walk_cases.py"), name, str(file)], tmp_path, os.environ)
    assert done.returncode == 0, done.stderr
    calls = [(path, function) for path, function in json.loads(done.stdout)]
    assert missing_step(WALKS[name], calls) is None


def test_engine_calls_the_functions_in_order(tmp_path):
    from zeropipe.engine import LocalRanks

    wanted = {name: set(walk) for name, walk in WALKS.items() if name not in COMMANDS}
    with LocalRanks(2) as ranks:
        calls = ranks.run(record_engine, str(tmp_path / "saved"), wanted, timeout=200)[0]
    assert {name: missing_step(WALKS[name], calls[name]) for name in wanted} == dict.fromkeys(calls)


def test_files_and_functions_of_the_table_exist():
    table = (DOCS / "architecture.md").read_text().partition("\n## Where to find it\n")[2].partition("\n## ")[0]
    places = PLACE.findall(table)
    assert len(places) >= table.count("\n|") - 2
    missing = [(file, name) for file, name in places if name and name not in defined_names(SOURCE / file)]
    assert missing == []
    assert all((SOURCE / file).exists() for file, _ in places)


def modules_without_a_word(package: Path) -> set[str]:
    """The modules and packages in a package that its docstring does not name; a built-in schedule introduces itself."""
    words = set(re.findall(r"\w+", ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""))
    files = {path.stem for path in package.glob("*.py") if "\n@register(" not in path.read_text()}
    return (files | {path.parent.name for path in package.glob("*/__init__.py")}) - words - {"__init__", "__main__"}


@pytest.mark.parametrize(
    "package", sorted(path.parent for path in SOURCE.glob("*/**/__init__.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_a_package_introduces_its_modules(package):
    assert modules_without_a_word(package) == set()


def test_the_rule_finds_a_module_without_a_word(tmp_path):
    for name in ("known", "other"):
        (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "__init__.py").write_text('"""known: a word."""')
    assert modules_without_a_word(tmp_path) == {"other"}


def test_the_rule_finds_another_order():
    walk = [("a.py", "f"), ("b.py", "g"), ("a.py", "h")]
    assert missing_step(walk, [walk[0], walk[1], walk[1], walk[2]]) is None
    assert missing_step(walk, [walk[1], walk[0], walk[2]]) == walk[1]
    assert missing_step(walk, walk[:2]) == walk[2]


def test_diagram_shows_the_imports_of_today():
    spec = importlib.util.spec_from_file_location("architecture", DOCS / "architecture.py")
    architecture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(architecture)
    assert set(architecture.PACKAGES) == {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert architecture.draw() == (DOCS / "architecture.svg").read_text(), "run `make gallery`"
