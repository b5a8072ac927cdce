"""Predicted memory against the engine: random layouts, measured by item; nobody tunes costs to them.

`make test` has some of them, `make test-full` 300, or those that ZEROPIPE_LAYOUTS says: `30`, or `30:60`. The largest
error of each item is printed at the end.
"""

import json
from unittest import mock

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import memory_cases as cases
from engine_helpers import ranks
from full_marker import mark_rest_full
from portions import portion

import zeropipe as zp
from zeropipe.core.action import actions_of
from zeropipe.estimating import head
from zeropipe.train import preview as train_preview
from zeropipe.train.preview import preview
from zeropipe.train.schedule import build_run_schedule

LIMIT = 0.10
REGATHERED_LIMIT = 0.15  # of a peak in which units are gathered and reduced one by one
ROLLING_LIMIT = 0.20  # of gradients: on a CPU a unit is reduced at once, and not while those of the next are computed
COMMON = {4: (40,)}  # seeds for `make test`, by the number of processes
LAYOUTS = portion("ZEROPIPE_LAYOUTS", 300)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **cases.MODEL}))
    return str(folder)


def preview_on_cpu(config):
    """The dry run of the schedule with the halves of each Overlap one after the other, as a CPU runs them."""
    with mock.patch.object(
        train_preview, "build_run_schedule", lambda config: without_overlaps(build_run_schedule(config))
    ):
        return preview(config)


def without_overlaps(schedule):
    rows = [actions_of(row) for row in schedule.rows]
    return zp.Schedule.of(schedule.problem, schedule.placement, rows, schedule.name)


def check(config, number, report_error, measure=cases.measure_step):
    predicted = preview_on_cpu(config).ranks
    limits = dict.fromkeys(("peak", *cases.ITEMS), LIMIT)
    if config.engine.gradients != "whole":
        limits["gradients"] = ROLLING_LIMIT
    if config.engine.shards == "regather":
        limits |= {"peak": REGATHERED_LIMIT, "workspace": REGATHERED_LIMIT}
    for measured in ranks(number).run(measure, config, timeout=600):
        memory = dict(predicted[measured.rank].memory)
        memory["optimizer"] += memory.pop("masters")
        errors = cases.errors(memory, measured, cases.bytes_under_way(config))
        for item, error in errors.items():
            report_error(item, error, cases.describe(config))
        wrong = {item: f"{error:+.1%}" for item, error in errors.items() if abs(error) > limits[item]}
        assert not wrong, (cases.describe(config), memory, measured)


@pytest.mark.parametrize(("number", "seed"), [(number, seed) for number in COMMON for seed in COMMON[number]])
def test_memory_of_some_layouts(number, seed, model, report_error):
    check(cases.draw(seed, number, model), number, report_error)


def test_memory_of_16_bit_shards_without_master_weights(model, report_error):
    """Gradients add up in float32 all the same."""
    drawn = cases.draw(2, 2, model)
    config = drawn.model_copy(update={
        "model": drawn.model.model_copy(update={"dtype": "bfloat16"}),
        "mesh": drawn.mesh.model_copy(update={"pp": 1, "dp_shard": 2, "tp": 1, "sequence_parallel": False}),
        "optimizer": drawn.optimizer.model_copy(update={"master_weights": False}),
    })  # fmt: skip
    check(config, 2, report_error)


ROLLING = [
    # sizes, microbatches, schedule, gradients, ac
    ({"dp_shard": 2}, 2, "1f1b", "rolling", "none"),
    pytest.param({"dp_shard": 4}, 4, "1f1b", "rolling", "none", marks=pytest.mark.full),
    pytest.param({"pp": 2, "dp_shard": 2}, 4, "zb-h1", "rolling", "full", marks=pytest.mark.full),
    pytest.param({"pp": 2, "dp_shard": 2}, 4, "zbv", "rolling", "none", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("sizes", "microbatches", "schedule", "gradients", "ac"), ROLLING, ids=str)
def test_memory_of_rolling_gradients(sizes, microbatches, schedule, gradients, ac, tmp_path, report_error):
    """Of a model whose blocks are most of it."""
    config = {"model_type": "llama", **cases.MODEL, "num_hidden_layers": 12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    drawn = cases.divide(cases.draw(7, 2, str(tmp_path)), sizes)
    batch = microbatches * drawn.data.microbatch * sizes["dp_shard"]
    drawn = drawn.model_copy(update={"data": drawn.data.model_copy(update={"batch": batch})})
    runs = [drawn.model_copy(update={
        "schedule": drawn.schedule.model_copy(update={"name": schedule}),
        "engine": drawn.engine.model_copy(update={"ac": ac, "shards": "keep", "gradients": policy}),
    }) for policy in ("whole", gradients)]  # fmt: skip
    whole, rolling = ([rank.memory["gradients"] for rank in preview(config).ranks] for config in runs)
    assert max(map(float.__truediv__, rolling, whole)) < 0.85
    check(runs[1], runs[1].mesh.num_processes, report_error)


PARTS = [
    # sizes, seed of the other options, ac, tokens, packed, key heads
    ({"cp": 2}, 7, "none", 128, False, 4),
    ({"cp": 2}, 7, "full", 250, True, 1),  # padded; both have the same key head
    ({"cp": 3}, 2, "none", 131, False, 4),  # keys are gathered
    ({"pp": 2, "cp": 2}, 1, "selective:op", 128, False, 4),
    ({"cp": 2, "dp_shard": 2}, 1, "none", 131, True, 4),
    ({"cp": 2, "dp_shard": 2, "shard_cp": True}, 1, "none", 131, True, 4),
    ({"pp": 2, "cp": 2, "shard_cp": True}, 1, "full", 250, False, 4),
    ({"cp": 2, "tp": 2}, 1, "full", 128, False, 4),
]


@pytest.mark.parametrize(
    ("sizes", "seed", "ac", "sequence", "packing", "keys"), mark_rest_full(PARTS, lambda it: it == PARTS[1])
)
def test_memory_of_parts_of_sequences(sizes, seed, ac, sequence, packing, keys, tmp_path, report_error):
    fields = {"model_type": "llama", **cases.MODEL, "num_key_value_heads": keys}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    drawn = cases.draw(seed, 2, str(tmp_path))
    kind = {"kind": "tokens", "path": ("not.read",)} if packing else {"kind": "synthetic", "path": None}
    config = cases.divide(drawn, sizes, sequence=sequence, packing=packing, **kind)
    engine = config.engine.model_copy(update={"ac": ac, "shards": "keep"})
    check(config.model_copy(update={"engine": engine}), config.mesh.num_processes, report_error)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_memory_of_logits_in_chunks(schedule, model, report_error, monkeypatch):
    """One chunk is there at a time, or their gradients until W."""
    drawn = cases.draw(1, 2, model)
    config = drawn.model_copy(update={
        "mesh": drawn.mesh.model_copy(update={"pp": 2, "dp_shard": 1, "tp": 1, "sequence_parallel": False}),
        "schedule": drawn.schedule.model_copy(update={"name": schedule, "stages_per_rank": None}),
        "engine": drawn.engine.model_copy(update={"ac": "full"}),
        "data": drawn.data.model_copy(update={"microbatch": 2, "batch": 8}),
    })  # fmt: skip
    monkeypatch.setattr(head, "PLAIN_NUMBERS", cases.CHUNK_NUMBERS)
    check(config, 2, report_error, cases.measure_step_in_chunks)


@pytest.mark.full
@pytest.mark.parametrize("seed", [1000 + layout for layout in LAYOUTS])
def test_memory_of_many_layouts(seed, model, report_error):
    number = 4 if seed % 3 else 2
    check(cases.draw(seed, number, model), number, report_error)
