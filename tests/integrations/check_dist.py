"""Checks the wheel in dist/: `python tests/integrations/check_dist.py [extra ...]`, as `make test-dist` does.

The wheel is installed with each extra into an empty virtual environment, and used in an empty folder outside the clone.
What an extra does not bring must be refused in one line that names the extra to install.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
BASE = ""  # no extra
EXTRAS = (BASE, "draw", "app", "search", "engine", "train", "all")  # those that commands need
TIMEOUT_S = 300
START_TIMEOUT_S = 60  # of the page
# what other tests and their tables read, and people who build from the sdist need
SOURCES = ("README.md", "LICENSE", "pyproject.toml", "Makefile", "constraints.txt", "tests/conftest.py", "docs/cli.md")
TINY_MODEL = {  # like the one that examples/tiny/make.py writes with transformers
    "model_type": "qwen3", "vocab_size": 384, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip


class Installed:
    """The wheel in a virtual environment of its own, used in a folder outside the clone."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.folder, self.extra, self.bin = folder, extra, folder / "venv" / "bin"
        venv.create(folder / "venv", with_pip=True)
        target = f"{wheel}[{extra}]" if extra else str(wheel)
        pip = [self.bin / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-c", ROOT / "constraints.txt", target], check=True, cwd=folder)
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
        } | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"}

    def __call__(self, *words: object, status: int = 0) -> str:
        """Run `zeropipe words...`, or a program of the environment; returns its output, or its error."""
        program = self.bin / ("python" if str(words[0]).endswith(".py") else "zeropipe")
        done = subprocess.run(
            [program, *map(str, words)], cwd=self.folder, env=self.environment, capture_output=True, text=True,
            timeout=TIMEOUT_S,
        )  # fmt: skip
        command = " ".join(map(str, words))
        require(done.returncode == status, f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout if status == 0 else done.stderr

    def has(self, *modules: str) -> bool:
        """Whether these are installed, by whatever needs them."""
        code = f"import importlib.util as i, sys; sys.exit(not all(map(i.find_spec, {modules})))"
        return subprocess.run([self.bin / "python", "-c", code], cwd=self.folder, env=self.environment).returncode == 0

    def refuses(self, extra: str, *words: object) -> None:
        """Require that a command is refused in one line, with the extra to install."""
        said = self(*words, status=2).strip()
        require("\n" not in said and f"pip install 'zeropipe[{extra}]'" in said, said)


def require(holds: bool, problem: str) -> None:
    if not holds:
        raise SystemExit(f"check_dist: {problem}")


def check_files(wheel: Path, sdist: Path) -> None:
    """Require every file of the package in the wheel, and what a build needs in the sdist; no stray file."""
    tracked = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "src/zeropipe"], check=True, capture_output=True, text=True
    ).stdout.split()
    want = {name.removeprefix("src/") for name in tracked}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    require(packed == want, f"{wheel.name}: missing {sorted(want - packed)}, not tracked {sorted(packed - want)}")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    require(names >= {*SOURCES, *tracked}, f"{sdist.name}: missing {sorted({*SOURCES, *tracked} - names)}")
    stray = sorted(name for name in names if "__pycache__" in name or name.startswith((".venv", "out/", "dist/")))
    require(not stray, f"{sdist.name}: {stray}")


def check_base(run: Installed, version: str) -> None:
    """What works without any extra."""
    require(run("--version").strip() == f"zeropipe {version}", "another --version than the wheel's name")
    require("zbv" in run("list"), "list has no zbv")
    require("rank 3" in run("show", "1f1b", "--ranks", 4, "--microbatches", 8), "show drew no rank 3")
    run("draw", "zbv", "--ranks", 4, "--microbatches", 8, "-o", "zbv.html")
    short = ("--search-seconds", 0, "--max-candidates", 40, "--workers", 1)
    plan = run("plan", "qwen3-8b", "--gpus", 8, "--batch", 64, "--gpu", "h100", *short, "--json")
    require(json.loads(plan)["rows"][0]["pp"] >= 1, "plan has no row")
    found = json.loads(run("doctor", "--json"))
    require(found["zeropipe"] == version, f"doctor: {found['zeropipe']}")


def check_draw(run: Installed, present: bool) -> None:
    draw = ("draw", "zbv", "--ranks", 4, "--microbatches", 8, "-o", "zbv.png")
    if not present:
        run.refuses("draw", *draw)
        return
    run(*draw)
    require((run.folder / "zbv.png").read_bytes().startswith(b"\x89PNG"), "zbv.png is no PNG")


def check_app(run: Installed, present: bool) -> None:
    if not present:
        run.refuses("app", "app", "--no-browser", "--port", 0)
        return
    with page(run) as address:
        text = get(address).decode()
        scripts = [part.partition('"')[0] for part in text.split('src="')[1:]]
        require(bool(scripts), f"the page has no script: {text[:200]}")
        require(all(get(address + name.removeprefix("/")) for name in scripts), "a script of the page is empty")


@contextmanager
def page(run: Installed) -> Iterator[str]:
    """The address of a running page, which is stopped at the end."""
    words = [run.bin / "zeropipe", "app", "--no-browser", "--port", "0", "--json"]
    with subprocess.Popen(words, cwd=run.folder, env=run.environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
            process.terminate()
            process.wait(START_TIMEOUT_S)
        finally:
            process.kill()


def get(url: str) -> bytes:
    """One answer of the page; repeated until it has started."""
    end = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=START_TIMEOUT_S) as answer:
                return answer.read()
        except ConnectionError:
            require(time.monotonic() < end, f"{url} does not answer")
            time.sleep(0.2)


def check_train(run: Installed, present: bool) -> None:
    shutil.copytree(ROOT / "examples" / "tiny", run.folder / "tiny")
    if not present and not run.has("pydantic", "transformers"):  # versions of typer that transformers needs bring it
        check_no_train(run)
        return
    run("tiny/make.py", "data")
    steps = ("--train.steps", 4, "--train.record_every", 2, "--evaluation.every", 4)
    said = run("train", "data/run.toml", "--rate.warmup", 1, *steps)
    require("4 steps" in said, said)
    require((run.folder / "data" / "run" / "export" / "config.json").exists(), "train wrote no export")


def check_no_train(run: Installed) -> None:
    """A valid training file is refused for what is not installed, not for what is in it."""
    model = run.folder / "tiny" / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_MODEL))
    (model / "tokenizer.json").write_text("{}")
    for name in ("train.jsonl", "held-out.jsonl"):
        (run.folder / "tiny" / name).write_text('{"text": "one two three"}\n')
    lacking = "engine" if run.extra == "app" else "train"  # the page brings what reads the file
    run.refuses(lacking, "train", "tiny/run.toml")


# what needs an extra -> the extras that bring it
CHECKS = {
    check_draw: {"draw", "all"},
    check_app: {"app", "all"},
    check_train: {"train", "all"},
}


def main(extras: tuple[str, ...]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    require({*extras} <= {BASE, *known}, f"{extras}: not all of them are extras of pyproject.toml")
    wheels, sdists = list((ROOT / "dist").glob("*.whl")), list((ROOT / "dist").glob("*.tar.gz"))
    require(len(wheels) == len(sdists) == 1, f"dist/ has {len(wheels)} wheels and {len(sdists)} sdists: run make dist")
    version = wheels[0].name.split("-")[1]
    check_files(wheels[0], sdists[0])
    for extra in extras:
        begin = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="zeropipe-dist-") as folder:
            run = Installed(Path(folder), wheels[0], extra)
            installed = time.monotonic()
            check_base(run, version)
            for check, bringing in CHECKS.items():
                check(run, extra in bringing)
        seconds = installed - begin, time.monotonic() - installed
        print(f"zeropipe[{extra}]: installed in {seconds[0]:.0f} s, checked in {seconds[1]:.0f} s", flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or EXTRAS)
