"""The notebook of examples/: its code runs in order in an empty folder, and its committed outputs are small."""

import ast
import json
import re

import pytest
from paths import EXAMPLES

PATH = EXAMPLES / "tour.ipynb"
NOTEBOOK = json.loads(PATH.read_text())
MAX_BYTES = 300_000
NUM_WITHOUT_TORCH = 8  # code cells before the training


def sources(kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == kind]


def run_cells(cells: list[str]) -> list[object]:
    """Run cells in one namespace, as a kernel does: the value of each one's last line, None if that is a statement."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    values = []
    for number, source in enumerate(cells):
        tree = ast.parse(source)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), namespace)
        value = last and eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), namespace)
        values.append(value)
    return values


def test_it_is_a_notebook_with_small_outputs_and_no_error():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)
    assert PATH.stat().st_size < MAX_BYTES
    outputs = [output for cell in NOTEBOOK["cells"] for output in cell.get("outputs", ())]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result"}
    assert not re.search(r"/(work|home|root|tmp)/", json.dumps(outputs))


def test_its_links_lead_to_files():
    links = [link for text in sources("markdown") for link in re.findall(r"\]\(([^)]+)\)", text)]
    assert links
    assert [link for link in links if not (EXAMPLES / link).exists()] == []


def test_schedules_are_simulated_searched_and_drawn_as_it_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    pictures = [value for value in run_cells(sources("code")[:NUM_WITHOUT_TORCH]) if hasattr(value, "_repr_svg_")]
    assert len(pictures) == 4
    assert all(picture._repr_svg_().startswith("<svg") for picture in pictures)
    cells = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"][:NUM_WITHOUT_TORCH]
    shown = "".join(
        "".join(output["text"]) for cell in cells for output in cell["outputs"] if output["output_type"] == "stream"
    )
    assert capsys.readouterr().out == shown


@pytest.mark.full
def test_all_of_it_runs_and_the_model_learns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_cells(sources("code"))
    assert capsys.readouterr().out.splitlines()[-1].startswith("mnopqrstuvwxyzabcdef")
