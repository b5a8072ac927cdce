"""One place says how large things may be, and texts of strangers are read in bounded time."""

import tracemalloc

import pytest

from zeropipe.core.formats.parse import parse_json, parse_toml
from zeropipe.core.limits import COMMAND_LINE, PAGE, require_costs
from zeropipe.errors import ConfigError


@pytest.mark.parametrize("limits, way_out", [(COMMAND_LINE, "use Python"), (PAGE, "use the command line")])
def test_a_refusal_names_the_size_the_limit_and_the_way_out(limits, way_out):
    for refuse in (
        lambda: limits.require_actions(10**12, "zbv"),
        lambda: limits.require_ranks(10**6),
        lambda: limits.require_bytes(10**10, "x.csv"),
    ):
        with pytest.raises(ConfigError, match=f"{limits.interface} takes .*up to .*{way_out}"):
            refuse()
    limits.require_actions(limits.actions, "zbv")
    limits.require_ranks(limits.ranks)
    limits.require_bytes(limits.file_bytes, "x.csv")


@pytest.mark.parametrize("name, value", [("f", 1e308), ("f", [1, 1e-30]), ("inter_node", {"p2p": 1e200})])
def test_costs_whose_sums_leave_the_floats(name, value):
    with pytest.raises(ConfigError, match=f"{name}.*: must be 0, or from 1e-18 to 1e\\+18"):
        require_costs({name: value})
    require_costs({"f": 0, "i": [1e-18, 1e18], "unit": "s", "blocking": True, "b": None})


@pytest.mark.parametrize(
    "text",
    [
        ".".join(["a"] * 20_000) + " = 1",
        " . ".join(['"a"', "b", "'c'"] * 7_000) + " = 1",
        "[" + ".".join(["a"] * 20_000) + "]\nx = 1",
        "x = {" + ".".join(["a"] * 20_000) + " = 1}",
        "x = " + "[" * 20_000,
        "x = " + "{x = " * 20_000,
        "x = " + "9" * 6_000,
        "x = 0x" + "f" * 6_000,
        "x" * (2**18 + 1),
        "\n".join(f"[a{n}.b.c.d.e.f.g.h.i]" for n in range(10_000)),
        "a" * 2**18,
        '"' * (2**18 - 1),
    ],
    ids=lambda text: text[:12],
)
def test_hostile_toml_is_refused_in_little_memory(text):
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as caught:
            parse_toml(text)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 6_000, "[0." + "1" * 6_000 + "]", "{", ""], ids=lambda t: t[:4]
)
def test_hostile_json_is_refused(text):
    with pytest.raises(ValueError) as caught:
        parse_json(text)
    assert len(str(caught.value)) < 300


def test_what_people_write_is_read():
    assert parse_toml('[edges.0-1]\np2p = 1.5\n[a."b.c".d]\ne.f = [0.1, 0.25]') == {
        "edges": {"0-1": {"p2p": 1.5}},
        "a": {"b.c": {"d": {"e": {"f": [0.1, 0.25]}}}},
    }
    assert parse_json('{"f": [1, 2.5], "deep": [[[[]]]]}') == {"f": [1, 2.5], "deep": [[[[]]]]}
