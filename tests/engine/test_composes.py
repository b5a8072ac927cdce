"""The table of what composes, in docs/parallelism.md: every cell of it is a run."""

from __future__ import annotations

import importlib.util
from xml.etree import ElementTree

import pytest
from paths import DOCS

pytest.importorskip("transformers")

import tensor_cases as cases
from engine_helpers import TOLERANCE, largest, ranks

import zeropipe as zp
from zeropipe.core.mesh import parse_mesh
from zeropipe.errors import ZeropipeError

PAGE = DOCS / "parallelism.md"
SCHEDULES = ("1f1b", "interleaved", "zbv", "dualpipev", "dualpipe")
# rows that are no schedule: the model, changes to it, options of parallelize() and of the Engine
ROWS = {
    "tied embeddings": ("qwen3", {"tie_word_embeddings": True}, {}, {}),
    "experts": ("qwen3_moe", {}, {}, {}),
    "`sequence_parallel=True`": ("qwen3", {}, {"sequence_parallel": True}, {}),
    '`ac="full"`': ("qwen3", {}, {}, {"ac": "full"}),
    "`compile=True`": ("qwen3", {}, {}, {"compile": True}),
    "`regather=True`": ("qwen3", {}, {}, {"regather": True}),
    "`dynamic_weights=True`": ("qwen3", {}, {}, {"dynamic_weights": True}),
    '`overlap="turns"`': ("qwen3", {}, {}, {"overlap": "turns"}),
    '`gradients="rolling"`': ("qwen3", {}, {}, {"gradients": "rolling"}),
}
MARKS = {"✓", "refused", "–"}


def cells() -> list[tuple[str, str, str]]:
    """(row, mesh, what the table says)."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    start = next(index for index, line in enumerate(lines) if line.startswith("| what | `pp="))
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    meshes = [mesh.strip("`") for mesh in split[0][1:]]
    rows = [row for row in split[1:] if row[1] in MARKS]
    return [(row[0], mesh, said) for row in rows for mesh, said in zip(meshes, row[1:], strict=True)]


# sharded and spread at once: test_mesh.py
QUICK = {('`overlap="turns"`', "pp=2,tp=2")}


def test_the_table_is_whole():
    found = cells()
    assert {row for row, _, _ in found} == {f"`{name}`" for name in SCHEDULES} | ROWS.keys()
    assert {said for _, _, said in found} <= MARKS
    assert {(row, mesh) for row, mesh, said in found if said == "✓"} >= QUICK


def test_the_picture_is_up_to_date(tmp_path):
    spec = importlib.util.spec_from_file_location("mesh_picture", DOCS / "mesh.py")
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    drawing.write(tmp_path)
    text = (tmp_path / "mesh.svg").read_text()
    assert text == (DOCS / "mesh.svg").read_text(), "run `make gallery`"
    assert len(ElementTree.fromstring(text)) > 20


@pytest.mark.parametrize(
    "row, mesh, said",
    [
        pytest.param(*cell, marks=() if cell[:2] in QUICK else pytest.mark.full, id=f"{cell[0]} on {cell[1]}")
        for cell in cells()
        if cell[2] != "–"
    ],
)
def test_a_cell_is_true(row, mesh, said):
    """✓: loss, gradients, norm and weights after AdamW with clipping equal those of one process, in float64."""
    sizes, name = dict(parse_mesh(mesh)), row.strip("`")
    kind, changes, spreading, options = ROWS.get(row, ("qwen3", {}, {}, {}))
    if name not in SCHEDULES:
        name = "dualpipev" if "overlap" in options else "zbv" if "pp" in sizes else "zb-h1"
    layers = {"num_hidden_layers": 8} if name in ("interleaved", "dualpipev") else {}
    schedule = zp.build(name, ranks=sizes.get("pp", 1), microbatches=4)
    case = (schedule, sizes, kind, changes | layers, spreading, options)
    if said == "refused":
        with pytest.raises(ZeropipeError):
            ranks(4).run(cases.train_on_tp, *case)
        return
    seen = largest(ranks(4).run(cases.train_on_tp, *case, timeout=1200))
    if options.get("compile"):
        assert seen.pop("graphs") == 1
    # norms compute in float32, which the compiler rounds in another order
    assert max(seen.values()) < (1e-3 if options.get("compile") else TOLERANCE), seen
