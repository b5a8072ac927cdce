"""Whatever a file holds, reading it gives a value that can be used, or one ZeropipeError."""

import json
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutate_json import mutated

import zeropipe as zp
from zeropipe.core.explain import critical_path, find_gaps, idle_times
from zeropipe.sim.fit import fit

quick = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
strange = st.one_of(
    st.from_regex(r"[0-3](F|B|I|W|SEND_F|RECV_B|UNSHARD|X)[0-3]?", fullmatch=True),
    st.from_regex(r"\([01](F|W)[01];[01](B|I)[01]\)OVERLAP_F_B", fullmatch=True),
    st.text(max_size=4),
)


@st.composite
def tables(draw):
    """The cells of a schedule that runs: of a known name, or every rank's actions in an order that some run has."""
    ranks, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    if draw(st.booleans()):
        name = draw(st.sampled_from(["1f1b", "zbv", "zb-h1", "interleaved", "dualpipev", "chimera", "dualpipe"]))
        with suppress(zp.ZeropipeError):  # some need another number of ranks or microbatches
            return [list(map(str, row)) for row in zp.build(name, ranks=ranks, microbatches=microbatches).rows]
    stages = ranks * draw(st.integers(1, 2))
    owner = draw(st.permutations([stage % ranks for stage in range(stages)]))
    split = draw(st.booleans())
    rows, waiting = [[] for _ in range(ranks)], [(0, "F", m) for m in range(microbatches)]
    while waiting:
        stage, kind, m = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
        rows[owner[stage]].append(f"{stage}{kind}{m}")
        if kind == "F":
            waiting.append((stage + 1, "F", m) if stage + 1 < stages else (stage, "I" if split else "B", m))
        elif kind != "W":
            waiting += [(stage - 1, kind, m)] * (stage > 0) + [(stage, "W", m)] * split
    return rows


@st.composite
def csvs(draw):
    """Tables as files, most of them with something wrong: cells exchanged, missing, doubled, strange or empty."""
    rows = draw(tables())
    for _ in range(draw(st.integers(0, 3))):
        row = draw(st.sampled_from(rows))
        one, other = (draw(st.integers(0, max(0, len(row) - 1))) for _ in range(2))
        match draw(st.sampled_from(["exchange", "drop", "double", "strange", "empty", "move"])) if row else "empty":
            case "exchange":
                row[one], row[other] = row[other], row[one]
            case "drop":
                del row[one]
            case "double":
                row.insert(other, row[one])
            case "strange":
                row[one] = draw(strange)
            case "empty":
                row.insert(one, draw(st.sampled_from(["", " ", "0UNSHARD", "0SEND_F0"])))
            case "move":
                draw(st.sampled_from(rows)).append(row.pop(one))
    return "\n".join(map(",".join, rows))


odd = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 3), st.just(10**15), st.just(10**400), st.floats(), st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=4), st.just({}),
)  # fmt: skip
TEXTS = [
    zp.to_json(zp.simulate(zp.build("dualpipe", ranks=2, microbatches=4))),
    zp.to_json(zp.build("chimera", ranks=2, microbatches=2)),
]


def use(found):
    """All that is done with what was read."""
    timeline = found if isinstance(found, zp.Timeline) else zp.simulate(found)
    for rank, causes in enumerate(idle_times(timeline)):
        assert causes.total + timeline.busy[rank] == pytest.approx(timeline.makespan)
    assert sum(gap.end - gap.start for gap in find_gaps(timeline)) == pytest.approx(
        sum(c.total for c in idle_times(timeline))
    )
    assert critical_path(timeline)
    fit(timeline)
    assert zp.from_json(zp.to_json(timeline)) == timeline


def test_any_csv_is_read_or_refused():
    reached = Counter()

    @quick
    @given(csvs())
    def read(text):
        with suppress(zp.ZeropipeError):
            schedule = zp.from_csv(text)
            reached["read"] += 1
            zp.check(schedule)
            use(schedule)
            reached["used"] += 1

    read()
    assert reached["read"] > 100  # of 200: else it is the generator that is tested
    assert reached["used"] > 40
    assert reached["read"] - reached["used"] > 20


@quick
@given(st.text())
def test_any_text_is_no_schedule_or_one(text):
    with suppress(zp.ZeropipeError):
        use(zp.from_csv(text))


def test_any_json_is_read_or_refused():
    reached = Counter()

    @quick
    @given(mutated(TEXTS, odd, nest=True))
    def read(text):
        reached["tried"] += 1
        with suppress(zp.ZeropipeError):
            use(zp.from_json(text))
            reached["used"] += 1

    read()
    assert 10 < reached["used"] < reached["tried"] - 50


@quick
@given(st.text())
def test_any_text_is_a_document_or_none(text):
    with suppress(zp.ZeropipeError):
        use(zp.from_json(text))


def test_time_in_which_two_actions_run_counts_once():
    data = json.loads(zp.to_json(zp.simulate(zp.build("1f1b", ranks=1, microbatches=2))))
    data["start"][1] = data["start"][0]
    timeline = zp.from_json(json.dumps(data))
    assert timeline.busy == (timeline.makespan,)
    use(timeline)


@pytest.mark.parametrize("text", ["9" * 5000 + "F0", "0F0," + "x" * 200_000, "0F0,\r\r0B0\0"])
def test_an_odd_csv_is_refused(text):
    with pytest.raises(zp.ScheduleError) as caught:
        zp.from_csv(text)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000])
def test_an_odd_json_is_refused(text):
    with pytest.raises(zp.ScheduleError, match="not JSON"):
        zp.from_json(text)


def test_a_spreadsheets_csv_is_read():
    assert zp.from_csv('\ufeff"0F0","0B0"\r\n') == zp.build("1f1b", ranks=1, microbatches=1)


@pytest.mark.parametrize(
    "change,words",
    [
        ({"num_microbatches": 10**15}, "fewer actions than 2 stages times 1,000,000,000,000,000"),
        ({"num_stages": 10**15}, "the placement has 2 stages: must be 1000000000000000"),
        (
            {"placement": {"copies": [[0, 1], [1, 0]], "split": "x"}},
            "starts at microbatch 'x': must be an integer from 0",
        ),
        ({"placement": {"copies": [[0, 1], [1, 0]], "split": None}}, "2 tables: must be 1, or 2 and"),
        ({"placement": {"copies": [[0.5, 1]], "split": None}}, "rank 0.5"),
        ({"start": [0.0] * 7 + [float("nan")]}, "not a finite number"),
        ({"start": [9.0] * 8}, "the actions of a rank must start in their order"),
        ({"rows": ["0F0 0F1 0B0 0B1", "7F0 1B0 1F1 1B1"]}, "7F0 is out of range"),
    ],
)
def test_a_damaged_timeline_is_named(change, words):
    data = json.loads(zp.to_json(zp.simulate(zp.build("1f1b", ranks=2, microbatches=2))))
    with pytest.raises(zp.ZeropipeError, match=words):
        zp.from_json(json.dumps(data | change))
