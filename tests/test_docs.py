"""Every example in the README and in docs/ runs and prints what the page says.

    ```python        executed, block after block in one namespace per page; `>>>` blocks are doctests
    ```python mine.py   written to that file first, so that later commands can use it (```toml job.toml too)
    ```console       lines after `$ ` are run; the lines under them must be the output (`...` stands for anything)

A page's commands run in an empty folder. A block under `<!-- not run: why -->` is left alone; under
`<!-- numbers vary -->` any number stands for any other.
"""

import doctest
import os
import re
import shlex
from collections.abc import Callable

import pytest
from paths import ROOT
from script_runner import ranks_print_into, script, torchrun

from zeropipe.cli import main

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:<!-- (not run:|numbers vary)[^\n]*-->\n+)?^```(python|console|toml)([^\n]*)\n(.*?)^```$", re.M | re.S
)


def without_numbers(text: str) -> str:
    text = re.sub(r"[-+]?\d[\d.,]*( (s|ms|µs|us|ns|B|KB|MB|GB)\b)?", "#", text)
    return re.sub(r"[ ─]+", " ", text)


@pytest.fixture
def shell(capfd, monkeypatch, tmp_path):
    """Runs a command line in the page's folder, in this process.

    What it and its ranks print: results before progress, and the other way round, as a terminal shows them.
    """
    for name, value in {"COLUMNS": "100", "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    said = [tmp_path.parent / f"{tmp_path.name}.{stream}" for stream in ("stdout", "stderr")]
    ranks_print_into(*said, monkeypatch)

    def run(words: list[str]) -> tuple[str, str]:
        if words[:5] == ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]:
            return (torchrun(int(words[5]), words[6:], tmp_path, os.environ).output,) * 2
        for file in said:
            file.write_text("")
        capfd.readouterr()
        try:
            if words[0] == "zeropipe":
                main(words[1:])
            else:
                assert words[0] == "python", f"{words[0]}: only zeropipe and python are run"
                script(words[1:])
        except SystemExit:
            pass  # what it says is compared
        results, progress = (own + file.read_text() for own, file in zip(capfd.readouterr(), said))
        return results + progress, progress + results

    return run


def run_console(text: str, shell: Callable[[list[str]], tuple[str, str]], vary: bool) -> None:
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, expected = part.partition("\n")
        while command.endswith("\\"):
            more, _, expected = expected.partition("\n")
            command = command[:-1] + more
        want, *printed = map(_plain, (expected, *shell(shlex.split(command))))
        if vary:
            want, *printed = map(without_numbers, (want, *printed))
        pattern = ".*".join(re.escape(piece) for piece in re.split(r"\.\.\.", want))
        told = f"$ {command}\n--- the page says\n{want}\n--- it prints\n{printed[0]}"
        assert any(re.fullmatch(pattern, got, re.S) for got in printed), told


def _plain(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_examples_run(page, tmp_path, shell):
    namespace: dict = {"__name__": "__main__"}
    for mark, language, name, text in BLOCK.findall(page.read_text()):
        if mark == "not run:":
            continue
        if name.strip():
            (tmp_path / name.strip()).write_text(text)
        elif language == "toml":
            continue
        elif language == "console":
            run_console(text, shell, vary=bool(mark))
        elif ">>>" in text:
            test = doctest.DocTestParser().get_doctest(text, namespace, page.name, str(page), 0)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            runner.run(test, clear_globs=False)
            namespace.update(test.globs)
            assert runner.failures == 0
        else:
            exec(compile(text, str(page), "exec"), namespace)
