"""The gallery shows what the code draws today."""

import importlib.util

from paths import DOCS


def test_the_gallery_is_up_to_date(tmp_path):
    spec = importlib.util.spec_from_file_location("gallery", DOCS / "gallery.py")
    gallery = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gallery)
    gallery.write(tmp_path)
    made = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.*"))
    kept = sorted(path.relative_to(DOCS) for path in [DOCS / "gallery.md", *(DOCS / "gallery").glob("*.svg")])
    assert made == kept
    stale = [str(path) for path in made if (tmp_path / path).read_text() != (DOCS / path).read_text()]
    assert stale == [], "run `make gallery`"
