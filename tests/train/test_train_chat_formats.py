"""Chats as they are found: every format gives the samples of the same chat written as `messages`."""

import json

import pytest
from train_samples import CHAT, MARKED, all_samples, opened, run_of, save_tokenizer

from zeropipe.train.data import open_data, prepare
from zeropipe.train.data.json_array import iterate_array
from zeropipe.train.data.reader import DatasetsReader

ASK, ANSWER = "is it so?", "it is"
PLAIN = [{"role": "user", "content": ASK}, {"role": "assistant", "content": ANSWER}]
SYSTEM = {"role": "system", "content": "short"}
AGAIN = [{"role": "user", "content": "and c?"}, {"role": "assistant", "content": "too"}]
# name -> (record, the same chat as messages, the format that is reported)
FORMATS = {
    "messages": ({"messages": PLAIN}, PLAIN, "messages (messages)"),
    "messages, prompt": ({"messages": PLAIN, "prompt": "x"}, PLAIN, "messages (messages)"),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": ANSWER}]}, PLAIN,
        "ShareGPT (conversations)",
    ),
    "ShareGPT, system": (
        {"system": "short", "tools": "",
         "conversations": [{"from": "human", "value": ASK}, {"from": "gpt", "value": ANSWER}]},
        [SYSTEM, *PLAIN], "ShareGPT (conversations)",
    ),
    "ShareGPT, roles": ({"conversations": PLAIN + AGAIN}, PLAIN + AGAIN, "ShareGPT (conversations)"),
    "Alpaca": ({"instruction": ASK, "input": "", "output": ANSWER}, PLAIN, "Alpaca (instruction, output)"),
    "Alpaca, input": (
        {"instruction": "is it", "input": "so?", "output": ANSWER},
        [{"role": "user", "content": "is it\n\nso?"}, PLAIN[1]], "Alpaca (instruction, output)",
    ),
    "Alpaca, history": (
        {"instruction": "and c?", "output": "too", "history": [[ASK, ANSWER]]}, PLAIN + AGAIN,
        "Alpaca (instruction, output)",
    ),
    "pair": ({"prompt": ASK, "completion": ANSWER}, PLAIN, "pairs (prompt, completion)"),
    "pair of messages": ({"prompt": PLAIN[:1], "completion": PLAIN[1:]}, PLAIN, "pairs (prompt, completion)"),
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, template in {"plain": CHAT, "marked": MARKED}.items():
        save_tokenizer(folder / name, template)
    return folder


def chat_run(folder, tokenizer, *records, name="chats.jsonl", **data):
    text = "".join(json.dumps(one) + "\n" for one in records)
    (folder / name).write_text(json.dumps(records, indent=2) if name.endswith(".json") else text)
    return run_of(
        folder, kind="chat", path=str(folder / name), tokenizer=str(tokenizer), train={"epochs": 1}, batch=1, **data
    )


@pytest.mark.parametrize("template", ["plain", "marked"])
@pytest.mark.parametrize("case", FORMATS)
def test_formats_have_the_samples_of_messages(tmp_path, tokenizers, case, template):
    record, messages, title = FORMATS[case]
    lines = []
    config = chat_run(tmp_path, tokenizers / template, record)
    prepare(config, lines.append)
    found = all_samples(open_data(config, pipeline=0))
    assert found == all_samples(opened(chat_run(tmp_path, tokenizers / template, {"messages": messages})))
    assert lines[1].startswith(f"data: chats in the format {title}; the first: <|im_start|>")


@pytest.mark.parametrize("template", ["plain", "marked"])
def test_answers_of_a_prompt_have_no_loss(tmp_path, tokenizers, template):
    config = chat_run(tmp_path, tokenizers / template, {"prompt": [*PLAIN, AGAIN[0]], "completion": AGAIN[1:]})
    lines = []
    prepare(config, lines.append)
    [(ids, labels)] = all_samples(open_data(config, pipeline=0))
    [(all_ids, all_labels)] = all_samples(
        opened(chat_run(tmp_path, tokenizers / template, {"messages": PLAIN + AGAIN}))
    )
    hf = save_tokenizer(tmp_path / "hf")
    assert ids == all_ids
    assert hf.decode([one for one in labels if one != -100]) == "too<|im_end|>\n"
    assert hf.decode([one for one in all_labels if one != -100]) == "it is<|im_end|>\ntoo<|im_end|>\n"
    assert lines[1].endswith(r"<|im_start|>assistant\n[loss: too<|im_end|>\n]")


def test_the_first_sample_is_shown_with_its_losses_from_the_cache_too(tmp_path, tokenizers):
    long = {"messages": [{"role": "user", "content": "many words " * 60}, PLAIN[1]]}
    config = chat_run(tmp_path, tokenizers / "plain", {"messages": PLAIN[:1]}, {"messages": PLAIN}, long)
    for _ in range(2):
        lines = []
        prepare(config, lines.append)
        assert lines[1] == (
            r"data: chats in the format messages (messages); the first: <|im_start|>user\nis it so?<|im_end|>\n"
            r"<|im_start|>assistant\n[loss: it is<|im_end|>\n]"
        )
    config = chat_run(tmp_path, tokenizers / "plain", long, FORMATS["Alpaca"][0])
    prepare(config, lines.append)
    assert lines[-1].startswith(
        r"data: chats in the format messages (messages) (1), Alpaca (instruction, output) (1); the first: "
    )
    assert " ... " in lines[-1]
    assert len(lines[-1]) < 400


def test_a_json_array_of_chats_is_read(tmp_path, tokenizers):
    records = [FORMATS["Alpaca"][0]] * 3
    config = chat_run(tmp_path, tokenizers / "plain", *records, name="alpaca_data.json")
    assert all_samples(opened(config)) == all_samples(opened(chat_run(tmp_path, tokenizers / "plain", *records)))


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_json_array_is_read_in_blocks(size):
    values = [{"a": [1, "]}\n", {"b": '\\"'}]}, {}, {"c": None, "d": 1.5}]
    text = "\n " + json.dumps(values, indent=1) + "\n"
    blocks = [text[start : start + size] for start in range(0, len(text), size)]
    found = list(iterate_array(blocks, 1000))
    assert [value for _, value in found] == values
    lines = text.split("\n")
    assert all(lines[line - 1].lstrip().startswith("{") for line, _ in found)


def test_dry_run_shows_the_first_chat(tmp_path, tokenizers, run):
    chat_run(tmp_path, tokenizers / "plain", FORMATS["ShareGPT"][0])
    fields = [
        "--model.path", "tiny-qwen3", "--model.weights", "random", "--train.steps", "1", "--data.kind", "chat",
        "--data.path", str(tmp_path / "chats.jsonl"), "--data.tokenizer", str(tokenizers / "plain"),
        "--train.output", str(tmp_path / "out"),
    ]  # fmt: skip
    status, out, _ = run("train", *fields, "--dry-run")
    assert status == 0
    assert out.splitlines()[-1] == (
        r"data: chats in the format ShareGPT (conversations); the first: <|im_start|>user\nis it so?<|im_end|>\n"
        r"<|im_start|>assistant\n[loss: it is<|im_end|>\n]"
    )
    assert not (tmp_path / "out").exists()
    (tmp_path / "chats.jsonl").write_text('\n{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}')
    status, _, err = run("train", *fields, "--dry-run")
    assert status == 2
    assert "chats.jsonl, line 2: a message is {'role': 'assistant'}: must have a content" in err


class FakeDataset:
    """The part of datasets.Dataset that is used."""

    def __init__(self, columns):
        self._columns, self.column_names = columns, list(columns)

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def __getitem__(self, key):
        return {name: values[key] for name, values in self._columns.items()}


@pytest.mark.parametrize("case", ["messages", "ShareGPT", "Alpaca, input", "pair"])
def test_datasets_of_chats_are_recognised_by_their_columns(monkeypatch, tmp_path, case):
    record, _, _ = FORMATS[case]
    dataset = FakeDataset({name: [value] * 3 for name, value in record.items()})
    monkeypatch.setattr("zeropipe.train.data.reader._load_dataset", lambda folder, field: dataset)
    reader = DatasetsReader((tmp_path,), "text")
    assert reader.has_chats
    assert [one.value for one in reader.records()] == [record] * 3
    if len(record) == 1:
        (name,) = record
        assert [one.value for one in DatasetsReader((tmp_path,), name).records()] == [record] * 3
