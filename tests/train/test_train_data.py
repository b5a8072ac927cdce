"""Data of a training run: from files to the microbatches of a step."""

import functools
import json
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_samples import MARKED, all_samples, opened, run_of, samples_of, save_tokenizer

from zeropipe.errors import ConfigError
from zeropipe.train.data import open_data, open_evaluation, prepare
from zeropipe.train.data.batch import assign_rows
from zeropipe.train.data.rows import pack_rows, permute


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 700), seed=st.integers(0, 2**70), epoch=st.integers(0, 5))
def test_an_order_has_every_row_once(size, seed, epoch):
    order = permute(np.arange(size), size, seed, epoch)
    assert sorted(order.tolist()) == list(range(size))


def test_orders_of_epochs_and_seeds_differ():
    orders = {tuple(permute(np.arange(50), 50, seed, epoch).tolist()) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(2, 40), min_size=1, max_size=120))
def test_rows_hold_every_sample_once(lengths):
    rows = pack_rows(np.array(lengths), 40)
    assert sorted(functools.reduce(operator.iadd, rows, [])) == list(range(len(lengths)))
    totals = sorted(sum(lengths[index] for index in row) for row in rows)
    assert totals[-1] <= 40
    assert len(totals) < 2 or totals[0] + totals[1] > 40  # no two rows would fit into one


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=40), pipelines=st.integers(1, 6), rows=st.integers(1, 5)
)
def test_every_row_goes_to_one_microbatch(lengths, pipelines, rows):
    shared = assign_rows(lengths, pipelines, rows)
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


def test_pipelines_have_equal_numbers_of_microbatches_if_they_must():
    assert assign_rows([4, 3, 2], 2, 1) == [[(0,)], [(1,), (2,)]]
    assert assign_rows([4, 3, 2], 2, 1, is_even=True) == [[(0,), ()], [(1,), (2,)]]
    assert assign_rows([4], 3, 1, is_even=True) == [[(0,)], [()], [()]]


def test_pipelines_have_equal_numbers_of_tokens():
    lengths = [9, 8, 7, 6, 5, 4, 3, 2]
    loads = [[lengths[index] for group in own for index in group] for own in assign_rows(lengths, 2, 1)]
    assert [(len(own), sum(own)) for own in loads] == [(4, 22), (4, 22)]


def test_rows_of_similar_lengths_make_a_microbatch():
    assert assign_rows([10, 2, 9, 3], 1, 2) == [[(0, 2), (3, 1)]]


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
        assert sorted(one.lengths) == sorted(n for m in own for n in m["cu_seqlens"].diff().tolist())
        seen += [bytes(ids[:-1]).decode() for ids, _ in samples_of(one) + samples_of(other)]
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


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer, and the tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    return folder, save_tokenizer(folder)


def test_texts_are_what_the_tokenizer_makes_of_them(tmp_path, tokenizer, monkeypatch):
    folder, hf = tokenizer
    texts = ["a document has some words", "the answer\nis é \U0001f600", "x", "", "one two three " * 30]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts[1:]) + "\n")
    (tmp_path / "b.txt").write_text("\ufeff" + texts[0])
    config = run_of(
        tmp_path, kind="text", path=[str(tmp_path / "b.txt"), str(tmp_path / "a.jsonl")], field="body",
        tokenizer=str(folder), sequence=32, batch=5, packing=False, train={"epochs": 1},
    )  # fmt: skip
    told = []
    prepare(config, told.append)
    assert told[-1] == "data: skipped empty documents (1)"
    expected = []
    for text in texts:
        ids = [*hf(text).input_ids, hf.eos_token_id]
        pieces = [ids[start : start + 32] for start in range(0, len(ids) - 1, 31)] if text else []
        expected += [(piece, [-100, *piece[1:]]) for piece in pieces]
    assert all_samples(open_data(config, pipeline=0)) == sorted(expected)


def test_a_long_text_is_read_in_blocks(tmp_path, tokenizer, monkeypatch):
    folder, hf = tokenizer
    text = "".join(f"line {number} has a few words\n" for number in range(300))
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr("zeropipe.train.data.reader.MAX_BLOCK_CHARS", 1000)
    config = run_of(
        tmp_path, kind="text", path=str(tmp_path / "a.txt"), tokenizer=str(folder), sequence=9999, batch=1,
        train={"epochs": 1},
    )  # fmt: skip
    [(ids, _)] = all_samples(opened(config))
    assert ids == [*hf(text).input_ids, hf.eos_token_id]


CHATS = [
    [("user", "is it so?"), ("assistant", "the answer is that it is")],
    [("system", "short"), ("user", "a"), ("assistant", "b \U0001f600"), ("user", "and c?"), ("assistant", "")],
    [("user", "nothing is said")],
    [("user", "long " * 60), ("assistant", "too long")],
]


def write_chats(path, chats):
    lines = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in chats]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [line["messages"] for line in lines]


@pytest.mark.parametrize("tokenizer", ["plain", "marked", "trims"])
def test_answers_of_chats_have_a_loss(tmp_path, tokenizer):
    """Tokens and answers are those of transformers' own mask, whether the template marks them or not.

    So are tokens of blanks where the tokenizer tells places without them.
    """
    hf = save_tokenizer(tmp_path / "marked", MARKED)
    save_tokenizer(tmp_path / "plain")
    save_tokenizer(tmp_path / "trims", trims=True)
    chats = write_chats(tmp_path / "chats.jsonl", CHATS)
    config = run_of(
        tmp_path, kind="chat", path=str(tmp_path / "chats.jsonl"), sequence=60, batch=2, train={"epochs": 1},
        tokenizer=str(tmp_path / tokenizer),
    )  # fmt: skip
    told = []
    prepare(config, told.append)
    assert told[-1] == "data: skipped chats without an answer (1), chats longer than 60 tokens (1)"
    expected = []
    for messages in chats[:2]:
        found = hf.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        labels = [one if mask else -100 for one, mask in zip(found["input_ids"], found["assistant_masks"])]
        assert 0 < found["assistant_masks"].count(1) < len(labels)
        expected.append((found["input_ids"], labels))
    assert all_samples(open_data(config, pipeline=0)) == sorted(expected)


def test_files_of_token_ids_are_cut_where_documents_end(tmp_path):
    generator = np.random.default_rng(0)
    documents = [[*generator.integers(1, 100, size).tolist(), 0] for size in (30, 1, 0, 9, 7, 8, 100)]
    stream = np.array(functools.reduce(operator.iadd, documents, []), dtype=np.uint16)
    np.save(tmp_path / "eos.npy", stream)
    (tmp_path / "eos.npy.json").write_text('{"eos": 0}')
    stream.astype("<u4").tofile(tmp_path / "raw.bin")
    (tmp_path / "raw.bin.json").write_text('{"dtype": "uint32", "offsets": "places.npy"}')
    np.save(tmp_path / "places.npy", np.cumsum([0, *map(len, documents[:-1])]))
    stream.tofile(tmp_path / "plain.bin")
    (tmp_path / "plain.bin.json").write_text('{"dtype": "uint16"}')

    def samples(*names):
        files = [str(tmp_path / name) for name in names]
        config = run_of(tmp_path, kind="tokens", path=files, sequence=9, batch=4, train={"epochs": 1})
        return all_samples(opened(config))

    expected = sorted(
        (part, [-100, *part[1:]])
        for one in documents
        for part in (one[start : start + 9] for start in range(0, len(one) - 1, 8))
    )
    assert samples("eos.npy") == samples("raw.bin") == expected
    assert samples("eos.npy", "raw.bin") == sorted(expected * 2)
    whole = sorted(stream[start : start + 9].tolist() for start in range(0, len(stream) - 1, 8))
    assert [ids for ids, _ in samples("plain.bin")] == whole


def test_datasets_of_texts_and_of_chats(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets", reason="the datasets library is not installed")
    folder, hf = tokenizer
    texts = ["the answer", "a document has some words"]
    datasets.Dataset.from_dict({"body": texts}).save_to_disk(tmp_path / "texts")
    messages = [[{"role": role, "content": text} for role, text in chat] for chat in CHATS[:2]]
    datasets.Dataset.from_dict({"talk": messages}).save_to_disk(tmp_path / "chats")
    write_chats(tmp_path / "chats.jsonl", CHATS[:2])

    def samples(kind, name, field):
        config = run_of(
            tmp_path, kind=kind, path=str(tmp_path / name), field=field, tokenizer=str(folder), sequence=64,
            train={"epochs": 1},
        )  # fmt: skip
        return all_samples(opened(config))

    expected = [[*hf(text).input_ids, hf.eos_token_id] for text in texts]
    assert [ids for ids, _ in samples("datasets", "texts", "body")] == sorted(expected)
    assert samples("datasets", "chats", "talk") == samples("chat", "chats.jsonl", "text")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"a": [1]})}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ConfigError, match=r"has the splits \['train'\]; use the folder of one"):
        samples("datasets", "splits", "a")
    with pytest.raises(ConfigError, match=r"has no column 'text' but \['body'\]"):
        samples("datasets", "texts", "text")


def test_a_batch_counts_all_tokens_those_with_a_loss_and_padding(tmp_path):
    save_tokenizer(tmp_path / "plain")
    write_chats(tmp_path / "chats.jsonl", CHATS[:2])
    config = run_of(
        tmp_path, kind="chat", path=str(tmp_path / "chats.jsonl"), sequence=60, batch=2, microbatch=2, packing=False,
        train={"epochs": 1}, tokenizer=str(tmp_path / "plain"),
    )  # fmt: skip
    batch = opened(config).next()
    (microbatch,) = batch.microbatches
    assert batch.num_processed == int(microbatch["attention_mask"].sum())
    assert batch.num_tokens == int((microbatch["labels"] != -100).sum())
    assert batch.num_positions == microbatch["input_ids"].numel()
    assert batch.num_tokens < batch.num_processed < batch.num_positions
