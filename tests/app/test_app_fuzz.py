"""The HTTP interface under schemathesis, against its own OpenAPI: no 500, no answer the schema does not promise."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

import schemathesis
from fastapi.testclient import TestClient
from full_marker import mark_rest_full
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mutate_json import mutated
from schemathesis import GenerationMode, checks

import zeropipe as zp
from zeropipe.app import comparison, uploads
from zeropipe.app.server import create_app
from zeropipe.core.limits import PAGE

APP = create_app(hosts=["testserver"])
# plans and searches take seconds each: tests/test_app_plan.py has their hostile requests
OPERATIONS = [
    (path, method) for path, methods in APP.openapi()["paths"].items() for method in methods
    if not path.startswith(("/api/plan", "/api/search"))
]  # fmt: skip
CHECKS = {
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
}  # fmt: skip
BOUNDED = settings(
    deadline=None, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
)  # fmt: skip


@pytest.fixture(scope="module")
def schema():
    return schemathesis.openapi.from_asgi("/openapi.json", APP)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """What counts here is the way through the code, not its time."""
    for module in (uploads, comparison):
        monkeypatch.setattr(module, "PAGE", replace(PAGE, actions=5_000))


# made when it runs, and not by schemathesis' own decorator: that takes seconds of every worker that collects tests
@pytest.mark.parametrize("examples", mark_rest_full([12, 200], [12]))
@pytest.mark.parametrize("path, method", OPERATIONS)
def test_no_input_breaks_the_server(schema, path, method, examples):
    wanted = [check for check in checks.CHECKS.get_all() if check.__name__ in CHECKS]
    assert len(wanted) == len(CHECKS)
    operation = schema[path][method]
    strategy = operation.as_strategy()
    if operation.body or any(True for _ in operation.iter_parameters()):  # what can be wrong
        strategy |= operation.as_strategy(GenerationMode.NEGATIVE)

    @settings(BOUNDED, max_examples=examples)
    @given(strategy)
    def run(case):
        case.call_and_validate(checks=wanted)

    run()


# what a schema-driven fuzzer seldom writes by itself: requests that get far
names = st.sampled_from(["1f1b", "zbv", "interleaved", "dualpipe", "zb-h2", "nope", ""])
small = st.integers(0, 12)
amounts = st.sampled_from([0, 0.0, 1, 1.5, 1e-18, 1e18, 5e-324, 1e308, -1, 1e-9])
per_stage = st.one_of(st.none(), amounts, st.lists(amounts, max_size=9))
options = st.dictionaries(
    st.sampled_from(["group_size", "extra", "x"]), st.one_of(st.integers(-3, 20), st.text(max_size=2)), max_size=2
)
choices = st.fixed_dictionaries({"name": names}, optional={"stages_per_rank": small, "options": options})
costs = st.dictionaries(
    st.sampled_from(["f", "i", "w", "b", "overlap", "p2p", "bandwidth", "message", "activation", "stash", "weights",
                     "memory_limit", "node_size"]), per_stage, max_size=5)  # fmt: skip
flags = st.fixed_dictionaries({}, optional={"blocking": st.booleans(), "serial_links": st.booleans()})
requests = st.fixed_dictionaries(
    {"schedules": st.lists(choices, min_size=1, max_size=4), "costs": st.builds(lambda a, b: {**a, **b}, costs, flags)},
    optional={"ranks": small, "microbatches": small, "stages_per_rank": small, "weight_parts": small})  # fmt: skip
CLIENT = TestClient(APP)


@pytest.mark.parametrize("examples", mark_rest_full([12, 200], [12]))
@pytest.mark.parametrize("path", ["simulate", "chart", "files/html", "files/svg", "files/json", "files/csv"])
def test_likely_requests_are_answered_or_refused_by_field(path, examples):
    seen = set()

    @settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(requests)
    def run(body):
        if path == "chart":
            body = {name: value for name, value in body.items() if name != "schedules"}
        response = CLIENT.post(f"/api/{path}", json=body)
        seen.add(response.status_code)
        assert response.status_code in (200, 422)
        if response.status_code == 422:
            assert all(error["message"] for error in response.json()["errors"])

    run()
    assert seen == {200, 422}


# files: cells that look like actions, and our own JSON with one thing exchanged
cells = st.from_regex(r"[0-3](F|B|I|W|SEND_F|X|)[0-9]{1,3}|\([01]F[01];[01]B[01]\)OVERLAP_F_B", fullmatch=True)
csvs = st.lists(st.lists(cells, max_size=6).map(",".join), max_size=4).map("\n".join)
odd = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=4),
)
WHOLE = zp.build("zbv", ranks=2, microbatches=2)
IN_PARTS = zp.fill_gaps(WHOLE, weight_parts=3)
TIMELINE = zp.to_json(zp.simulate(WHOLE))


tomls = st.dictionaries(st.sampled_from(["f", "i", "edges", "inter_node", "unit", "x", "b"]), odd, max_size=3).map(
    json.dumps
)
files = st.one_of(
    st.tuples(st.just("a.csv"), csvs),
    st.tuples(st.just("a.json"), mutated([TIMELINE], odd)),
    st.tuples(st.sampled_from(["a.json", "a.toml"]), tomls),
    st.tuples(st.just("a.csv"), st.sampled_from([WHOLE, IN_PARTS]).map(zp.to_csv)),  # random ones rarely end
)


def test_likely_files_are_taken_or_refused_and_what_is_taken_can_be_shown():
    seen = set()

    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(files)
    def run(file):
        response = CLIENT.post("/api/uploads", params={"name": file[0]}, content=file[1])
        assert response.status_code in (200, 422)
        if response.status_code == 422:
            assert response.json()["errors"][0]["message"]
            return
        facts = response.json()
        seen.add(facts["kind"])
        if facts["id"]:
            for path in ("simulate", "files/html", "files/json", "files/svg"):
                for more in ({}, {"weight_parts": 2}):
                    body = {"schedules": [{"file": facts["id"]}], **more}
                    assert CLIENT.post(f"/api/{path}", json=body).status_code == 200
        if facts["costs"]:
            body = {"schedules": [{"name": "1f1b"}], "costs": facts["costs"]}
            assert CLIENT.post("/api/simulate", json=body).status_code in (200, 422)

    run()
    assert seen == {"costs", "schedule", "timeline"}
