"""Python in the browser: Pyodide's files from npm and our own package, as scripts.

A page that is opened as a file may run scripts but fetch nothing, so each file is a script that hands over its content.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import sys
import tarfile
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import Any

VERSION = "314.0.7"
SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip")
LOCK = "pyodide-lock.json"
ROOT = Path(__file__).parent.parent.parent
PACKAGES = ("core", "schedules", "sim", "viz")  # of zeropipe, all that the page imports
OWN = "zeropipe.zip"


def write_files(target: Path, cache: Path) -> dict[str, Any] | None:
    """Write Python and zeropipe as scripts into `target`; their names and size, or None where npm cannot be reached."""
    archive = fetch(cache)
    if archive is None:
        return None
    target.mkdir(parents=True, exist_ok=True)
    contents = _unpack(archive)
    lock = {"info": json.loads(contents.pop(LOCK))["info"], "packages": {}}
    contents |= {LOCK: json.dumps(lock).encode(), OWN: zip_package()}
    for name, content in contents.items():
        text = base64.b64encode(zlib.compress(content, 9)).decode("ascii")
        (target / f"{name}.js").write_text(f'receiveFile("{name}", "{text}");\n')
    size = sum((target / f"{name}.js").stat().st_size for name in contents)
    return {"files": list(contents), "megabytes": round(size / 1e6, 1), "version": VERSION}


def fetch(cache: Path) -> bytes | None:
    """The npm package, from `cache` or the registry. One line on stderr if neither has it."""
    path = cache / f"pyodide-{VERSION}.tgz"
    if path.exists():
        content = path.read_bytes()
    else:
        registry = os.environ.get("NPM_CONFIG_REGISTRY", "https://registry.npmjs.org").rstrip("/")
        try:
            with urllib.request.urlopen(f"{registry}/pyodide/-/{path.name}", timeout=60) as answer:
                content = answer.read()
        except OSError as error:
            print(f"{registry} does not answer ({error}): the page compares a grid of sizes only", file=sys.stderr)
            return None
    if base64.b64encode(hashlib.sha512(content).digest()).decode() != SHA512:
        raise SystemExit(f"{path} is not pyodide {VERSION}: its checksum differs; delete it and build again")
    cache.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return content


def _unpack(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        members = {name: packed.extractfile(f"package/{name}") for name in (*FILES, LOCK)}
        return {name: member.read() for name, member in members.items() if member is not None}


def zip_package() -> bytes:
    """What the page imports: the packages of zeropipe that need the standard library only, and `results.py`."""
    source, found = ROOT / "src", io.BytesIO()
    paths = [*source.glob("zeropipe/*.py"), *(p for name in PACKAGES for p in source.glob(f"zeropipe/{name}/**/*.py"))]
    with zipfile.ZipFile(found, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(paths):
            _add(packed, str(path.relative_to(source)), path)
        _add(packed, "results.py", Path(__file__).parent / "play" / "results.py")
    return found.getvalue()


def _add(packed: zipfile.ZipFile, name: str, path: Path) -> None:
    packed.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), path.read_text(), zipfile.ZIP_DEFLATED)
