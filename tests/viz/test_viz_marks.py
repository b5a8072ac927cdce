"""The mark of a checkpointed F in pictures, pages and traces."""

import base64
import io
import json
import zlib

from rich.console import Console

import zeropipe as zp
from zeropipe.viz.columns import CHECKPOINTED
from zeropipe.viz.payload import payload

ROWS = "0F0,0F1c,0F2,0B0,0B1,0B2"


def simulated(text=ROWS):
    return zp.simulate(zp.from_csv(text))


def in_terminal(timeline):
    out = io.StringIO()
    zp.draw(timeline, console=Console(file=out, width=100, highlight=False))
    return out.getvalue()


def heads(timeline):
    """The column `head` of each box."""
    (data,) = payload(timeline)["timelines"]
    raw, at = zlib.decompress(base64.b64decode(data["data"])), 0
    for (name, kind), length in zip(data["columns"].items(), data["lengths"], strict=True):
        if name == "head":
            return list(raw[at : at + length])
        at += length * int(kind[1])
    raise AssertionError


def test_terminal_figure_trace_and_page(tmp_path):
    marked, plain = simulated(), simulated(ROWS.replace("c", ""))
    lines = in_terminal(marked).splitlines()
    assert "F1c-" in lines[1]
    assert "B1-" in lines[1]
    assert "c checkpointed" in lines[-1]
    assert "checkpointed" not in in_terminal(plain)
    zp.draw(marked, tmp_path / "x.svg")
    text = (tmp_path / "x.svg").read_text()
    assert ">1c</text>" in text
    assert "c checkpointed" in text
    zp.draw(plain, tmp_path / "y.svg")
    assert "checkpointed" not in (tmp_path / "y.svg").read_text()
    zp.draw(marked, tmp_path / "x.json")
    names = [event["name"] for event in json.loads((tmp_path / "x.json").read_text())["traceEvents"]]
    assert names.count("0F1c") == 1
    assert heads(marked) == [head | CHECKPOINTED * (at == 1) for at, head in enumerate(heads(plain))]
