"""The position in a run's data: saved, restored on another layout, refused for other data."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_samples import CHAT, opened, run_of, samples_of, save_tokenizer

from zeropipe.errors import ConfigError, EngineError
from zeropipe.train.data import open_data, prepare
from zeropipe.train.data.batch import BatchLayout
from zeropipe.train.data.cache import require_visible
from zeropipe.train.data.loader import TrainingData


class Lengths:
    """Samples that are known by their first token; rows of one or two of them."""

    def __init__(self, rows):
        self.rows, self.num_rows = rows, len(rows)
        self.num_samples = sum(map(len, rows))
        self.firsts = np.cumsum([0, *map(len, rows)])

    def samples_in_row(self, row):
        return np.arange(self.firsts[row], self.firsts[row + 1])

    def lengths(self, samples):
        every = np.array([length for row in self.rows for length in row])
        return every[samples]

    def loss_counts(self, samples):
        return self.lengths(samples) - 1

    def read(self, sample):
        ids = np.full(int(self.lengths(np.array([sample]))[0]), sample)
        return ids, np.concatenate([[-100], ids[1:]])


def made(samples, pipelines, microbatch, pipeline, batch, epochs):
    packed = samples.num_samples > samples.num_rows
    layout = BatchLayout(pipelines, microbatch, 16, packed)
    return TrainingData(
        samples, layout, pipeline, batch, seed=5, shuffle=True, epochs=epochs, identity={"data.kind": "text"}
    )


LAYOUT = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 9), st.integers(0, 4))


ANY = {
    "rows": st.lists(st.lists(st.integers(2, 8), min_size=1, max_size=2), min_size=1, max_size=12),
    "layouts": st.lists(LAYOUT, min_size=1, max_size=4),
    "epochs": st.integers(1, 3),
}


@settings(max_examples=15, deadline=None)
@given(**ANY)
def test_no_sample_is_lost_or_seen_twice(rows, layouts, epochs):
    """Whatever the pipelines, microbatches and batches, and wherever it stops and goes on in between."""
    go_through(rows, layouts, epochs)


@pytest.mark.full
@settings(max_examples=500, deadline=None)
@given(**ANY)
def test_no_sample_is_lost_or_seen_twice_in_many_ways(rows, layouts, epochs):
    go_through(rows, layouts, epochs)


def go_through(rows, layouts, epochs):
    samples, state, seen = Lengths(rows), None, []
    for number, (pipelines, microbatch, batch, steps) in enumerate(layouts):
        own = [made(samples, pipelines, microbatch, one, batch, epochs) for one in range(pipelines)]
        for data in own:
            if state is not None:
                data.load_state(json.loads(state))
        while own[0].steps_left and (steps > 0 or number == len(layouts) - 1):
            batches = [data.next() for data in own]
            steps -= 1
            assert len({(one.samples, one.num_tokens, one.num_positions) for one in batches}) == 1
            trained = [ids[0] for one in batches for ids, _ in samples_of(one)]
            assert sorted(trained) == sorted(batches[0].samples)
            assert all(one.microbatches for one in batches)
            assert sum(m["input_ids"].numel() for one in batches for m in one.microbatches) == batches[0].num_positions
            labels = [m["labels"] for one in batches for m in one.microbatches]
            assert sum(int((one[:, 1:] != -100).sum()) for one in labels) == batches[0].num_tokens
            seen += batches[0].samples
        assert len({json.dumps(data.state()) for data in own}) == 1
        state = json.dumps(own[0].state())
    assert own[0].steps_left == 0
    whole = made(samples, 1, 1, 0, 1, epochs)
    assert seen == [sample for _ in range(samples.num_rows * epochs) for sample in whole.next().samples]
    assert sorted(seen) == sorted([*range(samples.num_samples)] * epochs)


def test_the_position_is_behind_the_batch_that_was_returned(tmp_path):
    """Not where the thread is that makes the next one."""
    data = open_data(run_of(tmp_path, sequence=8, batch=2), pipeline=0)
    states = [data.state()["row"]]
    for _ in range(3):
        data.next()
        time.sleep(0.02)
        states.append(data.state()["row"])
    assert states == [0, 2, 4, 6]
    state, expected = data.state(), [data.next().samples for _ in range(2)]
    data.load_state(state)
    assert [data.next().samples for _ in range(2)] == expected


@pytest.mark.parametrize("epochs, rows", [(0.1, 3), (0.15, 5), (1, 30), (2.5, 75)])
def test_a_part_of_an_epoch(epochs, rows):
    """Also where the product is no exact number: 0.1 * 30 is a little more than 3."""
    data = made(Lengths([[2]] * 30), 1, 1, 0, 1, epochs)
    assert data.steps_left == rows


def files_run(folder, **changed):
    train = changed.pop("train", {})
    given = {"kind": "text", "path": str(folder / "*.txt"), "tokenizer": str(folder / "tokenizer"), "sequence": 16}
    return run_of(folder, **({**given, "batch": 2} | changed), train=train)


@pytest.fixture
def folder(tmp_path):
    save_tokenizer(tmp_path / "tokenizer")
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"document {number} has some words " * (number + 1))
    return tmp_path


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda folder: {"train": {"seed": 1}},
            r"train\.seed=1 was 0 when the checkpoint was saved: rows",
        ),
        (lambda folder: {"sequence": 20}, r"data\.sequence=20 was 16"),
        (lambda folder: {"packing": False}, r"data\.packing=False was True"),
        (lambda folder: {"shuffle": False}, r"data\.shuffle=False was True"),
        (lambda folder: {"kind": "synthetic", "path": None}, r"data\.kind='synthetic' was 'text'"),
        (
            lambda folder: (folder / "3.txt").write_text("other") and {},
            r"the contents of data\.path have changed since",
        ),
        (lambda folder: (folder / "9.txt").write_text("one more") and {}, r"the contents of data\.path have changed"),
        (
            lambda folder: save_tokenizer(folder / "tokenizer", vocabulary=270) and {},
            r"the tokenizer or its chat template has changed since the checkpoint",
        ),
    ],
)
def test_a_position_of_other_data_is_refused(folder, change, message):
    data = opened(files_run(folder))
    data.next()
    state = data.state()
    with pytest.raises(ConfigError, match=message) as caught:
        opened(files_run(folder, **change(folder))).load_state(state)
    assert "\n" not in str(caught.value)


def test_the_same_files_elsewhere_go_on(folder, tmp_path):
    """A copy, touched and with another batch and layout, is the same data."""
    data = opened(files_run(folder))
    first = [data.next().samples for _ in range(2)]
    state, rest = data.state(), data.next().samples
    for path in folder.glob("*.txt"):
        os.utime(path, (1, 1))
    (folder / "moved").mkdir()
    for path in folder.glob("*.txt"):
        path.rename(folder / "moved" / path.name)
    again = opened(files_run(folder, path=str(folder / "moved" / "*.txt"), batch=1, mesh={"dp_shard": 2}))
    again.load_state(state)
    assert again.next().samples + again.next().samples == rest
    assert rest not in first


def test_samples_are_made_once(folder, monkeypatch):
    config = files_run(folder)
    told = []
    prepare(config, told.append)
    made = {path: path.stat().st_mtime_ns for path in (folder / "out" / "data").rglob("*")}
    monkeypatch.setattr("zeropipe.train.data.cache.open_tokenizer", None)  # whoever calls it fails
    again = []
    prepare(config, again.append)
    assert again == told
    assert {path: path.stat().st_mtime_ns for path in (folder / "out" / "data").rglob("*")} == made
    with pytest.raises(TypeError):
        prepare(files_run(folder, sequence=20), again.append)


def test_samples_are_written_whole_or_not_at_all(folder, monkeypatch):
    (folder / "9.txt").write_bytes(b"good\nbad \xff")
    with pytest.raises(ConfigError, match=r"9\.txt, line 2: not text \(byte 0xff is not UTF-8\)"):
        opened(files_run(folder))
    assert list((folder / "out" / "data").iterdir()) == []

    def full(*args):
        raise OSError(28, "No space left on device")

    (folder / "9.txt").unlink()
    monkeypatch.setattr("zeropipe.train.data.store.StoreInfo.save", full)
    with pytest.raises(ConfigError, match=r"cannot write .*/data/\w+: No space left on device"):
        opened(files_run(folder))
    assert list((folder / "out" / "data").iterdir()) == []


def test_a_process_waits_until_it_sees_what_the_first_one_has_written(folder):
    config = files_run(folder)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(require_visible, config)
        time.sleep(0.1)
        assert not waiting.done()
        prepare(config, lambda text: None)
        waiting.result(60)
    assert open_data(config, pipeline=0).next().samples


def test_samples_that_are_not_there_are_told(folder):
    config = files_run(folder)
    line = (
        r"data: no samples in .* 0\.3 s after the first process has written them: train\.output must be a folder that"
    )
    with pytest.raises(EngineError, match=line):
        require_visible(config, patience=0.3)
    with pytest.raises(EngineError, match=r"data: no samples in .*: call prepare\(config\) first"):
        open_data(config, pipeline=0)


def test_a_model_that_cannot_pack_is_refused_at_the_start(tmp_path):
    from transformers import BloomConfig

    import zeropipe as zp
    from zeropipe.engine import hf_stages
    from zeropipe.train.loop.setup import require_packing

    (tmp_path / "a.jsonl").write_text('{"text": "short"}\n' * 5)
    schedule = zp.build("gpipe", ranks=1, microbatches=1)
    engine = SimpleNamespace(
        stages=hf_stages(BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=64), schedule, 0)
    )
    given = {"kind": "text", "path": str(tmp_path / "a.jsonl"), "tokenizer": "bytes"}
    config = run_of(tmp_path, packing=False, **given)
    require_packing(config, engine, opened(config), None)
    with pytest.raises(
        ConfigError, match=r"model_type='bloom' does not separate packed samples; .*data\.packing=false"
    ):
        require_packing(run_of(tmp_path, **given), engine, opened(run_of(tmp_path, **given)), None)


def test_packed_samples_have_the_loss_they_have_alone(tmp_path):
    """A packed batch in a stage of the engine, against every sample alone in transformers' own model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    import zeropipe as zp
    from zeropipe.engine import CausalLMLoss, hf_stages

    hf = save_tokenizer(tmp_path / "model", CHAT)
    small = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
        "num_key_value_heads": 1, "vocab_size": len(hf),
    }  # fmt: skip
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(Qwen3Config(**small), dtype=torch.float64).eval()
    whole.save_pretrained(tmp_path / "model")
    chats = [
        [{"role": "user", "content": "say " * (one % 3)}, {"role": "assistant", "content": "so " * (1 + one)}]
        for one in range(7)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    config = run_of(
        tmp_path, model=tmp_path / "model", kind="chat", path=str(tmp_path / "chats.jsonl"), sequence=60, batch=4,
        microbatch=2, train={"epochs": 1},
    )  # fmt: skip
    batch = opened(config).next()
    assert sorted(batch.samples) == list(range(7))
    assert batch.num_positions < 60 * 7  # several share a row
    stage = hf_stages(tmp_path / "model", zp.build("gpipe", ranks=1, microbatches=1), 0, dtype=torch.float64)[0].eval()
    loss_fn, alone = CausalLMLoss(), 0.0
    with torch.no_grad():
        sums = [loss_fn(stage(**stage.pick(one)), one) for one in batch.microbatches]
        for ids, labels in samples_of(batch):
            logits = whole(torch.tensor([ids])).logits[0, :-1]
            alone += float(torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum"))
    assert sum(int(count) for _, count in sums) == batch.num_tokens
    assert sum(float(loss) for loss, _ in sums) == pytest.approx(alone, rel=1e-10)
    assert AutoTokenizer.from_pretrained(tmp_path / "model").decode(samples_of(batch)[0][0]).startswith("<|im_start|>")
