"""The pages of docs/: an index that has each of them, links that lead somewhere, pictures of a moderate size."""

import re
from collections import Counter
from pathlib import Path

import pytest
from paths import DOCS, ROOT

INDEX = DOCS / "README.md"
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
MAX_PICTURE_BYTES = 300_000


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ +(.+)$", without_code(page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    broken = []
    for link in links(page):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_index_has_every_page_once():
    listed = Counter(link for link in links(INDEX) if link.endswith(".md") and "/" not in link)
    assert listed == {page.name: 1 for page in DOCS.glob("*.md") if page != INDEX}


def test_pictures_are_small():
    pictures = [path for path in DOCS.rglob("*") if path.suffix in (".svg", ".png")]
    assert pictures
    assert {path.name: path.stat().st_size for path in pictures if path.stat().st_size > MAX_PICTURE_BYTES} == {}


def test_every_picture_is_shown_on_a_page():
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page)}
    pictures = {path for path in DOCS.rglob("*") if path.suffix in (".svg", ".png")}
    assert pictures - shown == set()
