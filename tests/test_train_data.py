"""Data of a training run: from files to the microbatches of a step."""

import functools
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeropipe.errors import ConfigError
from zeropipe.train.config.models import RunConfig
from zeropipe.train.data import open_data, open_evaluation, prepare
from zeropipe.train.data.batch import share
from zeropipe.train.data.order import shuffled
from zeropipe.train.data.rows import pack


def run_of(folder, *, mesh=None, train=None, evaluation=None, **data):
    """A training file with some data."""
    tables = {
        "model": {"path": "tiny-qwen3", "weights": "random"},
        "mesh": mesh or {},
        "data": data,
        "train": {"output": str(folder / "out"), **(train or {})},
    }
    return RunConfig.model_validate(tables | ({"evaluation": evaluation} if evaluation else {}))


def opened(config, pipeline=0):
    """Data of a run, prepared in this process."""
    prepare(config, lambda text: None)
    return open_data(config, pipeline=pipeline)


def texts_of(batch):
    """What the bytes of a batch's samples say."""
    found = []
    for microbatch in batch.microbatches:
        for row, ids in enumerate(microbatch["input_ids"]):
            labels, start = microbatch["labels"][row], None
            for place, (_token, label) in enumerate([*zip(ids.tolist(), labels.tolist()), (0, -100)]):
                if label != -100 and start is None:
                    start = place - 1
                elif label == -100 and start is not None:
                    found.append(bytes(i for i in ids[start:place].tolist() if i < 256).decode())
                    start = None
    return found


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), seed=st.integers(0, 2**70), epoch=st.integers(0, 5))
def test_an_order_has_every_row_once(size, seed, epoch):
    order = shuffled(np.arange(size), size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))


def test_orders_of_epochs_and_seeds_differ():
    orders = {tuple(shuffled(np.arange(50), 50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=120))
def test_rows_hold_every_sample_once(lengths):
    rows = pack(np.array(lengths), 40)
    assert sorted(functools.reduce(operator.iadd, rows, [])) == list(range(len(lengths)))
    totals = sorted(sum(lengths[index] for index in row) for row in rows)
    assert totals[-1] <= 40
    assert len(totals) < 2 or totals[0] + totals[1] > 40  # no two rows would fit into one


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=40), pipelines=st.integers(1, 6), rows=st.integers(1, 5)
)
def test_every_row_goes_to_one_microbatch(lengths, pipelines, rows):
    shared = share(lengths, pipelines, rows)
    groups = [group for own in shared for group in own]
    assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
    assert len(shared) == pipelines
    assert all(own for own in shared)
    assert max(map(len, groups)) <= rows
    numbers = [len(own) for own in shared]
    assert max(numbers) - min(numbers) <= 1
    if len(lengths) % (pipelines * rows) == 0:
        assert {len(group) for group in groups} == {rows}
        assert len(set(numbers)) == 1


def test_synthetic_tokens_are_those_of_the_seed(tmp_path):
    one, other = (
        open_data(run_of(tmp_path, sequence=16, batch=2, train={"seed": seed}), pipeline=0) for seed in (3, 4)
    )
    first, second = one.next(), one.next()
    assert first.samples == (0, 1)
    assert second.samples == (2, 3)
    assert first.num_tokens == 30 == first.num_positions - 2
    ids = [batch.microbatches[0]["input_ids"].tolist() for batch in (first, second, other.next())]
    assert ids[0] != ids[1] != ids[2] != ids[0]
    assert max(max(one[0]) for one in ids) < 2048


def test_texts_are_packed_and_seen_once_per_epoch(tmp_path):
    texts = [f"document {number} " * (1 + number % 3) for number in range(23)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}.txt").write_text(text)
    config = run_of(
        tmp_path, kind="text", path=str(tmp_path / "*.txt"), tokenizer="bytes", sequence=64, batch=3,
        mesh={"dp_shard": 2}, train={"epochs": 2},
    )  # fmt: skip
    ones, others = opened(config, 0), opened(config, 1)
    seen, samples = [], []
    while ones.steps_left:
        one, other = ones.next(), others.next()
        assert one.samples == other.samples
        assert one.num_tokens == other.num_tokens
        own = [microbatch for batch in (one, other) for microbatch in batch.microbatches]
        assert sum(int((m["labels"] != -100).sum()) for m in own) == one.num_tokens
        assert sum(m["input_ids"].numel() for m in own) == one.num_positions
        seen += texts_of(one) + texts_of(other)
        samples += one.samples
    assert sorted(seen) == sorted(texts * 2)
    assert sorted(samples) == sorted([*range(23)] * 2)
    with pytest.raises(ConfigError, match=r"train\.epochs=2: all passes"):
        ones.next()


def test_evaluation_is_in_order_and_every_sample_once(tmp_path):
    (tmp_path / "a.txt").write_text("held out " * 40)
    config = run_of(
        tmp_path, kind="text", path=str(tmp_path / "a.txt"), tokenizer="bytes", sequence=16, batch=4,
        mesh={"dp_replicate": 3}, evaluation={"path": str(tmp_path / "a.txt")},
    )  # fmt: skip
    prepare(config, lambda text: None)
    pipelines = [open_evaluation(config, pipeline=pipeline) for pipeline in range(3)]
    assert {len(batches) for batches in pipelines} == {-(-360 // 15 // 4)}
    samples = [sample for batch in pipelines[0] for sample in batch.samples]
    assert samples == list(range(24))
    assert all(batch.microbatches for batches in pipelines for batch in batches)
