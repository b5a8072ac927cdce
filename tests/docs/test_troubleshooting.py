"""docs/troubleshooting.md: every message that it quotes is in the code. `...` stands for a value."""

import ast
import re

import pytest
from paths import DOCS, SOURCE

PAGE = (DOCS / "troubleshooting.md").read_text().partition("## Slow, but no error")[0]
MESSAGES = re.findall(r"^\| `([^`]+)` \|", PAGE, re.M)
VALUE = "\0"


def template(node: ast.AST) -> str:
    """A string of the code with VALUE for each expression inside."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else VALUE
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) for part in node.values)
    return VALUE


def code_strings() -> list[str]:
    nodes = [node for path in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    return [template(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr)]


STRINGS = code_strings()


def is_in_code(message: str) -> bool:
    parts = [re.escape(part) for part in re.split(r"\s*\.\.\.\s*", message)]
    pattern = re.compile(f".*?{VALUE}.*?".join(parts), re.S)
    return any(pattern.search(text) for text in STRINGS)


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_in_the_code(message):
    assert is_in_code(message)


def test_the_rule_finds_an_unknown_message():
    assert len(MESSAGES) > 30
    assert not is_in_code("the frobnicator is out of order")
    assert is_in_code("this needs ..., which is not installed")
    assert not is_in_code("this needs ..., which is out of order")
