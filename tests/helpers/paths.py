"""Folders of the repository, for tests that read its files."""

from pathlib import Path

TESTS = Path(__file__).parent.parent
HELPERS = TESTS / "helpers"
ROOT = TESTS.parent
SOURCE = ROOT / "src" / "zeropipe"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
