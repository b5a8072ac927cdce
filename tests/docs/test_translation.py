"""README.zh-CN.md says what README.md says: the same commands, code, links and figures, section by section."""

import re

import pytest
from paths import ROOT

ENGLISH, CHINESE = ((ROOT / name).read_text() for name in ("README.md", "README.zh-CN.md"))
CODE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)


def code_blocks(text: str) -> list[tuple[str, str]]:
    """The blocks of code, without comments, which are translated."""
    return [(language, re.sub(r" *#.*$", "", code, flags=re.M)) for language, code in CODE.findall(text)]


def sections(text: str) -> list[str]:
    """The text of each section, without blocks of code."""
    return re.split(r"^## .*$", CODE.sub("", text), flags=re.M)


def table_rows(text: str) -> list[str]:
    return [line for section in sections(text) for line in section.splitlines() if line.startswith("|")]


def facts(text: str) -> dict[str, list[str]]:
    """What is not translated: code, links and numbers, sorted, since Chinese has another order of words."""
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("README")]
    plain = re.sub(r"\]\([^)]*\)|`[^`]*`|\[(?:English|中文)\]", "", text)
    numbers = re.findall(r"(?<![A-Za-z\d-])\d+(?:[.,]\d+)*", plain)
    return {"code": sorted(re.findall(r"`([^`]+)`", text)), "links": sorted(links), "numbers": sorted(numbers)}


def test_code_is_the_same():
    assert code_blocks(CHINESE) == code_blocks(ENGLISH)


def test_comments_of_code_are_translated():
    comments = [line for _, code in CODE.findall(CHINESE) for line in re.findall(r"  # (.*)$", code, re.M)]
    assert comments
    assert [text for text in comments if not re.search(r"[\u4e00-\u9fff]", text) and "torch" not in text] == []


@pytest.mark.parametrize("number", range(len(sections(ENGLISH))))
def test_a_section_has_the_same_code_links_and_numbers(number):
    assert len(sections(CHINESE)) == len(sections(ENGLISH))
    assert facts(sections(CHINESE)[number]) == facts(sections(ENGLISH)[number])


@pytest.mark.parametrize(
    "english, chinese", [*zip(table_rows(ENGLISH), table_rows(CHINESE), strict=True)], ids=lambda row: row[:20]
)
def test_a_row_of_a_table_has_the_same_code_links_and_numbers(english, chinese):
    assert facts(chinese) == facts(english)


def test_each_leads_to_the_other():
    assert "](README.zh-CN.md)" in ENGLISH
    assert "](README.md)" in CHINESE


def test_a_figure_that_differs_is_found():
    changed = ENGLISH.replace("159 types", "158 types", 1)
    assert any(facts(a) != facts(b) for a, b in zip(sections(changed), sections(CHINESE)))
