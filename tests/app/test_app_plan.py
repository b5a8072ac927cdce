"""The page's plans and searches, without a browser."""

import json
import tomllib
from dataclasses import replace

import pytest
from app_client import ask, client, told

import zeropipe as zp
from zeropipe.app import plan_calls, plan_source
from zeropipe.core.model.configs import BUILT_IN, CONFIGS_BY_COUNT, CONFIGS_BY_SHAPE
from zeropipe.planning.data import plan_data
from zeropipe.planning.write import write_run
from zeropipe.sim.layer_file import to_layer_json

ODD = 'my "own" \N{ROCKET}\x7f.json'
QWEN3 = CONFIGS_BY_SHAPE["qwen3-0.6b"]
PROFILE = replace(zp.estimate(QWEN3, ac=["none", "full"]), model="tiny-qwen3", source="profile", layers=("dense",) * 4)
COSTS = json.loads(to_layer_json(PROFILE))
TINY = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 400}  # fmt: skip
LITTLE_MEMORY = {"model": "tiny.json", "file": json.dumps(TINY), "gpus": 2, "batch": 8, "sequence": 512, "pp": 2,
                 "tp": 1, "ac": "none", "memory": 0.01, "reserve": 0}  # fmt: skip
SMALL = {"model": "qwen3-0.6b", "gpus": 4, "batch": 16, "sequence": 2048, "gpu": "h100"}


@pytest.fixture(autouse=True)
def _few(monkeypatch):
    monkeypatch.setattr(plan_calls, "MAX_CANDIDATES", 40)


@pytest.fixture(scope="module")
def planned():
    status, answer = ask("plan", SMALL)
    assert status == 200
    return answer


def test_a_plan_is_ranked_and_its_parts_add_up(planned):
    rows = planned["rows"]
    assert rows
    assert [row["step_seconds"] for row in rows] == sorted(row["step_seconds"] for row in rows)
    best = min(planned["dots"], key=lambda dot: dot[1])
    assert rows[0]["step_seconds"] == best[1]
    for row in rows:
        assert row["pp"] * row["dp_shard"] * row["tp"] == 4
        assert sum(row["memory"].values()) == pytest.approx(row["peak_memory"])
        assert sum(row["seconds"].values()) == pytest.approx(row["step_seconds"])
        assert row["peak_memory"] <= planned["memory_limit"] * (1 + 1e-9)
        beaten = [
            other
            for other in rows
            if other["step_seconds"] < row["step_seconds"] and other["peak_memory"] < row["peak_memory"]
        ]
        assert row["front"] is not bool(beaten) or not row["front"]
    assert rows[0]["front"]


@pytest.mark.parametrize("own", [{}, {"model": ODD, "file": json.dumps(QWEN3)}], ids=["named", "own config"])
def test_a_row_is_shown_as_it_was_planned_with_the_file_that_the_command_writes(planned, own, tmp_path):
    row = planned["rows"][0]
    names = plan_calls.RowRequest.model_fields.keys() - {"plan"}
    status, answer = ask("plan/row", {"plan": {**SMALL, **own}, **{name: row[name] for name in names}})
    assert status == 200
    [shown] = answer["viewer"]["timelines"]
    assert shown["makespan"] == pytest.approx(row["makespan"])
    made = zp.plan(
        QWEN3, gpus=4, batch=16, sequence=2048, pp=row["pp"], tp=row["tp"], ac=row["ac"], search_seconds=0, workers=1,
        microbatch_sizes=row["microbatch_size"], schedules=f"{row['schedule']}:v={row['stages_per_rank']}",
    )  # fmt: skip
    write_run(made, made.best, str(tmp_path / "run.toml"), own.get("model", SMALL["model"]), "h100")
    assert answer["run"] == (tmp_path / "run.toml").read_text()
    assert tomllib.loads(answer["run"])["model"]["path"] == own.get("model", SMALL["model"])


def test_a_row_with_copies_to_the_host_has_its_schedule_as_a_file():
    """The memory is so small that the fastest rows copy activations; without a bandwidth to the host none does."""
    status, answer = ask("plan", LITTLE_MEMORY)
    assert status == 200
    best = answer["rows"][0]
    assert best["offload"]
    assert best["host_memory"] > 0
    names = plan_calls.RowRequest.model_fields.keys() - {"plan"}
    status, shown = ask("plan/row", {"plan": LITTLE_MEMORY, **{name: best[name] for name in names}})
    assert status == 200
    [timeline] = shown["viewer"]["timelines"]
    assert timeline["makespan"] == pytest.approx(best["makespan"])
    schedule = zp.from_json(shown["schedule"])
    assert "OFFLOAD" in zp.to_csv(schedule)
    assert tomllib.loads(shown["run"])["schedule"]["name"] == "run.schedule.json"
    costs = zp.estimate(TINY, sequence=512, ac="none", microbatch_size=best["microbatch_size"])
    machine = {name: value for name, value in costs.machine.items() if name != "host_bandwidth"}
    for changed, has_copies in ((costs, True), (replace(costs, machine=machine), False)):
        asked = {name: LITTLE_MEMORY[name] for name in ("gpus", "batch", "pp", "tp", "memory", "reserve")}
        status, answer = ask("plan", {**asked, "model": "costs.json", "file": to_layer_json(changed)})
        assert status == 200
        assert any(row["offload"] for row in answer["rows"]) == has_copies


def test_a_row_with_checkpointed_f_is_shown_as_it_was_planned():
    asked = {"model": "qwen3-8b", "gpus": 8, "batch": 32, "memory": 30, "pp": 8, "tp": 1}
    made = zp.plan(
        "qwen3-8b", gpus=8, batch=32, memory=30e9, pp=8, tp=1, microbatch_sizes=1, schedules="1f1b", search_seconds=0,
        workers=1, offload=False,
    )  # fmt: skip
    row = plan_data(made, 1)["rows"][0]
    assert row["checkpointing"]
    assert 0 < row["checkpointed"] < 1
    names = plan_calls.RowRequest.model_fields.keys() - {"plan"}
    status, shown = ask("plan/row", {"plan": asked, **{name: row[name] for name in names}})
    assert status == 200
    [timeline] = shown["viewer"]["timelines"]
    assert timeline["makespan"] == pytest.approx(row["makespan"])
    assert len(zp.from_json(shown["schedule"]).checkpointed) == pytest.approx(
        row["checkpointed"] * row["microbatches"] * row["pp"] * row["stages_per_rank"]
    )
    assert tomllib.loads(shown["run"])["schedule"]["name"] == "run.schedule.json"


def test_costs_are_planned_as_the_command_plans_them(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    asked = {"model": "costs.json", "file": json.dumps(COSTS), "gpus": 2, "batch": 8}
    flags = ("--gpus", 2, "--batch", 8, "--search-seconds", 0, "--most", 40, "--workers", 1)
    made = json.loads(run("plan", "costs.json", *flags, "-o", "run.toml", "--json")[1])
    _, answer = ask("plan", asked)
    assert answer["rows"] == made["rows"][: len(answer["rows"])]
    facts = [answer[name] for name in ("source", "parameters", "memory_limit")]
    assert facts == ["profile", PROFILE.num_parameters, PROFILE.machine["memory"] - plan_calls.RESERVE]
    row = {name: answer["rows"][0][name] for name in plan_calls.RowRequest.model_fields.keys() - {"plan"}}
    _, shown = ask("plan/row", {"plan": asked, **row})
    assert shown["run"] == (tmp_path / "run.toml").read_text()
    written = tomllib.loads(shown["run"])
    assert (written["model"]["num_layers"], written["schedule"]["costs"]) == (4, "costs.json")
    status, answer = ask("plan", {**asked, "file": json.dumps({**COSTS, "machine": {}})})
    assert (status, told(answer, "memory")[0][:47]) == (422, "memory is missing: costs.json does not have the")


def test_what_does_not_fit_is_said(monkeypatch):
    monkeypatch.setattr(plan_calls, "MAX_CANDIDATES", 100)  # what fits is not among those with the least work
    status, answer = ask("plan", {**SMALL, "model": "llama-3-70b"})
    assert (status, answer["rows"]) == (200, [])
    closest = answer["closest"]
    assert answer["problem"] == (
        f"{closest['row']['text']} needs {closest['row']['peak_memory'] / 1e9:.1f} GB, "
        f"{closest['row']['over'] / 1e9:.1f} GB over it"
    )
    assert sum(closest["row"]["memory"].values()) == pytest.approx(closest["row"]["peak_memory"])
    assert {name for way in closest["ways_out"] for name in way["change"]} >= {"gpus", "lora"}
    for way in closest["ways_out"][:1]:  # tests/planning/test_closest.py tries all of them
        status, answer = ask("plan", {**SMALL, "model": "llama-3-70b", **way["change"]})
        assert status == 200
        assert answer["rows"], way


def test_the_page_takes_what_the_command_takes():
    asked = {"pp": 2, "tp": 1, "ac": "full", "dtype": "float32", "reserve": 7.5, "lora": 4}
    status, answer = ask("plan", {**SMALL, **asked})
    assert status == 200
    assert {(row["pp"], row["tp"], row["ac"]) for row in answer["rows"]} == {(2, 1, "full")}
    assert (answer["memory_limit"], answer["reserve"], answer["lora_rank"]) == (72.5e9, 7.5e9, 4)
    row = {name: answer["rows"][0][name] for name in plan_calls.RowRequest.model_fields.keys() - {"plan"}}
    _, shown = ask("plan/row", {"plan": {**SMALL, **asked}, **row})
    written = tomllib.loads(shown["run"])
    assert (written["model"]["dtype"], written["lora"]) == ("float32", {"rank": 4})
    assert shown["viewer"]["timelines"][0]["makespan"] == pytest.approx(answer["rows"][0]["makespan"])
    assert "tensor parallelism" in {item["name"] for item in answer["not_tried"]}


@pytest.mark.parametrize(
    "change,field,words",
    [
        ({"model": "/etc/passwd"}, "model", "choose one of"),
        ({"model": "Qwen/Qwen3-33B"}, "model", "did you mean 'qwen3-32b'?"),
        ({"pp": 3}, "pp", "pp=3: no layout of 4 GPUs"),
        ({"tp": 0}, "tp", "must be a positive integer"),
        ({"lora": "x"}, "lora", "must be a positive integer"),
        ({"tp": 2, "lora": 4}, "tp", "costs of adapters (lora) are not known with tp"),
        ({"reserve": "4GB"}, "reserve", "must be a number of gigabytes, like 4"),
        ({"ac": "some"}, "", "activation checkpointing 'some'"),
        ({"dtype": "int8"}, "dtype", "'int8'"),
        ({"model": 3}, "model", "model=3"),
        ({"gpus": 0}, "gpus", "gpus=0"),
        ({"gpus": 10**9}, "gpus", "1,024"),
        ({"gpu": "abacus"}, "gpu", "must be one of h200"),
        ({"memory": 1.0}, "memory", "above the reserve"),
        ({"memory": "80GB"}, "memory", "must be a number of gigabytes, like 80"),
        ({"memory": 1e300}, "memory", "must be a number of gigabytes, like 80"),
        ({"x": 1}, "x", "unknown field"),
        ({"file": QWEN3}, "file", "must be the text of a config.json or of layer costs"),
        ({"file": "{" + " " * 2**18 + "}"}, "file", "of at most 256 KiB"),
        ({"file": "{", "model": "a.json"}, "file", "a.json is not JSON: Expecting property name"),
        ({"file": "[1]", "model": "a.json"}, "file", "a.json is not a model's configuration"),
        ({"file": "[" * 100_000}, "file", "nested too deeply"),
        ({"file": '{"a":' + "[" * 300 + "]" * 300 + "}"}, "file", "nested more than 16 deep"),
        ({"file": json.dumps({**QWEN3, "hidden_size": [1024]})}, "file", "hidden_size=[1024]: must be an integer"),
        ({"file": json.dumps({**QWEN3, "hidden_size": 10**300})}, "file", "must be an integer from 1 to 100000000"),
        ({"file": json.dumps({**QWEN3, "num_hidden_layers": 10**9})}, "file", "the page takes up to 512 layers"),
        ({"file": json.dumps({"text_config": {"n_layer": 10**9}})}, "file", "the page takes up to 512 layers"),
        (
            {"file": json.dumps({**QWEN3, "num_experts": 8, "mlp_only_layers": [[]], "model_type": "qwen3_moe"})},
            "file",
            "mlp_only_layers=[[]]: must be a list of layer indices",
        ),
        ({"file": json.dumps(COSTS), "model": "c.json"}, "gpu", "gpu='h100': set by the costs in c.json; leave it out"),
        ({"file": json.dumps(COSTS), "model": "c.txt"}, "file", "its name must end in .json"),
        ({"file": json.dumps({**COSTS, "layers": ["dense"] * 5000})}, "file", "has 5,000 layers: the page takes up to"),
        ({"file": json.dumps({**COSTS, "settings": [{}] * 5000})}, "file", "has 5,000 settings: the page takes up to"),
        (
            {"file": json.dumps({**COSTS, "sending": float("nan")})},
            "file",
            "a.json: sending=nan: must be a non-negative number",
        ),
    ],
)
def test_wrong_plans_are_refused_by_field(change, field, words):
    status, answer = ask("plan", {**SMALL, **({"model": "a.json"} if "file" in change else {}), **change})
    assert status == 422
    assert any(words in message for message in told(answer, field)), answer


def test_a_row_that_is_too_large_or_unknown_is_refused():
    row = {"plan": SMALL, "pp": 4, "dp_shard": 1, "tp": 1, "schedule": "1f1b", "stages_per_rank": 1, "microbatches": 8,
           "microbatch_size": 1, "ac": "none", "layers": [7, 7, 7, 7]}  # fmt: skip
    assert ask("plan/row", row)[0] == 200
    for change in (
        {"schedule": "nope"},
        {"microbatches": 10**9},
        {"pp": 4000},
        {"layers": [1]},
        {"layers": [14, 14]},
        {"ac": "some"},
        {"tp": 7},
    ):
        status, answer = ask("plan/row", {**row, **change})
        assert status == 422, change
        assert answer["errors"][0]["message"]


def test_a_round_of_a_search_gives_a_schedule_and_its_gap():
    body = {"ranks": 4, "microbatches": 8, "seconds": 0.3, "costs": {"w": 0.7, "memory_limit": 4.0}}
    status, answer = ask("search", body)
    assert status == 200
    schedule = zp.from_json(answer["schedule"])
    zp.check(schedule)
    costs = zp.Costs(w=0.7, memory_limit=4.0)
    assert zp.simulate(schedule, costs).makespan == pytest.approx(answer["value"])
    assert answer["bound"] <= answer["value"] * (1 + 1e-9)
    assert answer["named_value"] >= answer["value"] * (1 - 1e-9)
    assert [gap for _, gap in answer["seen"]] == sorted((gap for _, gap in answer["seen"]), reverse=True)


LARGE = {"ranks": 1024, "microbatches": 1000, "weight_parts": 8}


@pytest.mark.parametrize(
    "change", [{"seconds": 1e9}, {"seconds": 0}, {"seed": -1}, {"ranks": 0}, {"costs": {"memory_limit": 0.1}}, LARGE]
)
def test_wrong_searches_are_refused(change):
    status, answer = ask("search", {"ranks": 2, "microbatches": 4, "seconds": 0.1, **change})
    assert status == 422
    assert answer["errors"][0]["message"]


def test_known_models_and_gpus_are_listed():
    facts = json.loads(client.get("/api/known").text)
    assert facts["models"]["qwen3-8b"] == pytest.approx(8.19e9, rel=0.01)
    assert facts["gpus"]["h200"] == 141
    assert facts["models"]["gpt-oss-20b"] == pytest.approx(20.9e9, rel=0.01)
    assert facts["counted"] == list(CONFIGS_BY_COUNT)


def test_without_torch_what_has_to_be_counted_is_left_out_and_refused(monkeypatch):
    monkeypatch.setattr(plan_source, "can_count", lambda: False)
    facts = json.loads(client.get("/api/known").text)
    assert (set(facts["models"]), facts["counted"]) == (set(BUILT_IN) - set(CONFIGS_BY_COUNT), [])
    status, answer = ask("plan", {**SMALL, "model": "gpt-oss-20b"})
    assert (status, len(told(answer, "model"))) == (422, 1)
    assert "install torch and transformers: pip install 'zeropipe[engine]'" in told(answer, "model")[0]


def test_costs_of_the_newest_plans_are_cached(monkeypatch):
    monkeypatch.setattr(plan_calls, "MAX_CACHED_PLANS", 2)
    cache = plan_calls.CostsCache()
    requests = [plan_calls.PlanRequest(model="a.json", file=str(n)) for n in range(3)]
    for n, request in enumerate(requests):
        cache.add(request, n)
    assert [cache.get(request) for request in requests] == [None, 1, 2]
