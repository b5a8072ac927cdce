"""`zeropipe trace import`: traces that torch's profiler wrote of torch's own pipelines, as timelines."""

import json

import pytest

import zeropipe as zp
from zeropipe.core.waits import trim_waits

GPIPE_NAMES = r"(?P<kind>Forward|Backward) (?P<microbatch>\d+)"


def rows(schedule) -> list[list[str]]:
    return [list(map(str, row)) for row in schedule.rows]


def early_actions(timeline) -> list[str]:
    """The actions that wait inside for the result of the neighbouring stage.

    One that also ends before it is there got its message while the neighbour was still recording: it has not waited.
    """
    spans = {str(span.action): span for rank in range(timeline.num_ranks) for span in timeline.spans(rank)}
    early = []
    for name, span in spans.items():
        stage, kind, microbatch, *_ = span.action
        sources = (f"{stage - 1}F{microbatch}",) if kind.name == "F" else ()
        if kind.name in "BI":
            sources = f"{stage + 1}B{microbatch}", f"{stage + 1}I{microbatch}"
        early += [name for source in sources if source in spans and span.start < spans[source].end <= span.end]
    return early


@pytest.fixture
def two_ranks():
    pytest.importorskip("torch", reason="needs torch")
    from engine_helpers import ranks

    return ranks(2)


def test_a_trace_of_torchs_runtime_is_a_timeline_for_all_commands(two_ranks, run, tmp_path):
    from trace_cases import profiled_by_torch

    schedule = zp.build("interleaved-zb", ranks=2, microbatches=4)
    two_ranks.run(profiled_by_torch, schedule, str(tmp_path))
    out = tmp_path / "run.json"
    status, said, _ = run("trace", "import", *sorted(tmp_path.glob("torch*.json")), "-o", out)
    assert status == 0, said
    timeline = zp.from_json(out.read_text())
    assert rows(timeline.schedule) == rows(schedule)
    assert timeline.measured
    assert early_actions(timeline) == []
    for command in (("trace", "compare", out), ("show", out), ("draw", out, "-o", tmp_path / "run.svg")):
        assert run(*command)[0] == 0


def test_names_of_another_trainer_are_found_by_a_pattern(two_ranks, run, tmp_path):
    """torch's GPipe waits inside of what it records: rank 1's first forward seems to begin with rank 0's."""
    from trace_cases import profiled_single

    two_ranks.run(profiled_single, str(tmp_path), 4)
    files, out = sorted(tmp_path.glob("ScheduleGPipe*.json")), tmp_path / "run.json"
    status, _, error = run("trace", "import", *files, "-o", out)
    assert status == 2
    assert "zeropipe trace import --actions REGEX" in error
    status, said, _ = run("trace", "import", *files, "-o", out, "--actions", GPIPE_NAMES, "--json")
    assert status == 0, said
    timeline, report = zp.from_json(out.read_text()), json.loads(said)
    assert [sorted(row) for row in rows(timeline.schedule)] == [
        sorted(f"{rank}{kind}{n}" for kind in "FB" for n in range(4)) for rank in range(2)
    ]
    assert early_actions(timeline) == []
    assert report["num_shortened"] > 0
    assert report["makespan"] == timeline.makespan


TORCH_NAMES = r".*: (?P<kind>forward|backward)_one_chunk"  # functions of torch's PipelineStage


def test_torchtitans_1f1b_is_found_by_a_pattern(two_ranks, run, tmp_path):
    from trace_cases import profiled_single

    two_ranks.run(profiled_single, str(tmp_path), 4, "Schedule1F1B")
    files, out = sorted(tmp_path.glob("Schedule1F1B*.json")), tmp_path / "run.json"
    status, said, error = run("trace", "import", *files, "-o", out, "--actions", TORCH_NAMES)
    assert status == 0, said + error
    assert rows(zp.from_json(out.read_text()).schedule) == rows(zp.build("1f1b", ranks=2, microbatches=4))


MEGATRON_NAMES = r".*: (?P<kind>forward|backward)_step"


def test_megatrons_functions_are_counted(two_ranks, run, tmp_path):
    """Its profile has stacks: the functions of a stage are its microbatches, in their order within a step."""
    from trace_cases import profiled_megatron

    two_ranks.run(profiled_megatron, str(tmp_path), 4, 3)
    files, out = sorted(tmp_path.glob("megatron*.json")), tmp_path / "run.json"
    status, said, error = run("trace", "import", *files, "-o", out, "--actions", MEGATRON_NAMES)
    assert status == 0, said + error
    timeline = zp.from_json(out.read_text())
    assert rows(timeline.schedule) == rows(zp.build("1f1b", ranks=2, microbatches=4))
    assert early_actions(timeline) == []
    assert run("compare", "1f1b", "zb-h1", "--ranks", 2, "--microbatches", 4, "--costs", out)[0] == 0


def event(**changes) -> dict:
    return {"ph": "X", "cat": "user_annotation", "name": "0F0", "ts": 0.0, "dur": 1.0} | changes


@pytest.mark.parametrize(
    "content, words",
    [
        ("", "is neither a trace"),
        ("[]", "this JSON is not zeropipe's"),
        ("null", "this JSON is not zeropipe's"),
        ('{"traceEvents": {}}', "traceEvents is not a list"),
        ('{"traceEvents": []}', "has no action like 2F0"),
        ('{"traceEvents": [null, 3, "x", {"ph": "X"}]}', "has no action like 2F0"),
        (json.dumps({"traceEvents": [event(ts=None)]}), "0F0 has no times (ts, dur)"),
        (json.dumps({"traceEvents": [event(dur=-1.0)]}), "0F0 has no times (ts, dur)"),
        (json.dumps({"traceEvents": [event(ts="0")]}), "0F0 has no times (ts, dur)"),
        ('{"traceEvents": [{"ph": "X", "cat": "user_annotation", "name": "0F0", "ts": NaN, "dur": 1}]}', "no times"),
        (json.dumps({"traceEvents": [event(), event(name="99999999F0")]}), "not of complete steps"),
        (json.dumps({"traceEvents": [event(), event(name="0F1", ts=2)]}), "not of complete steps"),
        (json.dumps({"traceEvents": [event(), event(name="0F0", ts=2)]}), "not of complete steps"),
        (json.dumps({"traceEvents": [event(), {"ph": "X", "cat": "kernel"}]}), "has kernels of a GPU"),
        ("\x1f\x8b\x08binary", "is neither a trace"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(run, tmp_path, content, words):
    file, out = tmp_path / "rank0.json", tmp_path / "run.json"
    file.write_text(content)
    status, _, error = run("trace", "import", file, "-o", out)
    assert (status, words in error) == (2, True), error
    assert len(error.strip().splitlines()) == 1, error
    assert not out.exists()


def trace(rank: int, *events: tuple[str, float, float]) -> dict:
    named = [
        {"ph": "X", "cat": "user_annotation", "name": n, "ts": 1e6 * a, "dur": 1e6 * (b - a)} for n, a, b in events
    ]
    return {"traceEvents": named, "distributedInfo": {"rank": rank}}


def two_stages(tmp_path, *late: float) -> list:
    """Traces of two ranks that wait inside of their actions; rank 1's clock is late by some seconds."""
    shift = sum(late)
    first = trace(0, ("fwd s0 m0", 0, 1), ("bwd s0 m0", 1, 6))
    second = trace(1, ("fwd s1 m0", 0 - shift, 2 - shift), ("bwd s1 m0", 2 - shift, 4 - shift))
    files = [tmp_path / f"rank{n}.json" for n in range(2)]
    for file, data in zip(files, (first, second), strict=True):
        file.write_text(json.dumps(data))
    return files


PATTERN = r"(?P<kind>\w+) s(?P<stage>\d+) m(?P<microbatch>\d+)"


def test_waiting_is_taken_off(run, tmp_path):
    out = tmp_path / "run.json"
    status, said, _ = run("trace", "import", *two_stages(tmp_path), "-o", out, "--actions", PATTERN)
    assert (status, "2 actions were recorded with their wait" in said) == (0, True)
    timeline = zp.from_json(out.read_text())
    times = {str(s.action): (s.start, s.end) for rank in range(2) for s in timeline.spans(rank)}
    assert times == {"0F0": (0, 1), "1F0": (1, 2), "1B0": (2, 4), "0B0": (4, 6)}


def test_clocks_that_differ_are_refused(run, tmp_path):
    files = two_stages(tmp_path, 1.5)
    status, _, error = run("trace", "import", *files, "-o", tmp_path / "run.json", "--actions", PATTERN)
    assert status == 2
    assert "1F0 ends 500 ms before its input is there: the clocks of the ranks differ" in error
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize(
    "actions, words",
    [
        ("(", "not a regular expression"),
        (r"\w+", "must have a group kind, and maybe microbatch and stage"),
        (r"(?P<kind>\w+) (?P<size>\d+)", "must have a group kind"),
        (r"(?P<kind>\w+) (?P<stage>s\d) m(?P<microbatch>\d+)", "stage and microbatch must be integers"),
        (r"\w+ (?P<kind>s\d) m(?P<microbatch>\d+)", "has kind 's0': must be one of f, fwd"),
        (r"none (?P<kind>F)(?P<microbatch>\d+)", "has no action like 2F0"),
    ],
)
def test_a_wrong_pattern_is_refused(run, tmp_path, actions, words):
    status, _, error = run("trace", "import", *two_stages(tmp_path), "-o", tmp_path / "run.json", "--actions", actions)
    assert (status, words in error) == (2, True), error


def test_a_timeline_needs_no_names(run, tmp_path):
    file = tmp_path / "own.json"
    file.write_text(zp.to_json(zp.simulate(zp.build("1f1b", ranks=2, microbatches=2))))
    assert run("trace", "import", file, "-o", tmp_path / "x.json", "--actions", PATTERN)[0] == 2
    assert run("trace", "import", file, "-o", tmp_path / "x.txt")[0] == 2


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev", "chimera", "interleaved-zb"])
def test_a_timeline_without_waiting_stays_as_it_is(name):
    timeline = zp.simulate(zp.build(name, ranks=4, microbatches=8), zp.Costs(p2p=0.5))
    assert trim_waits(timeline) == (timeline, 0)
