"""Data that is wrong: one line that names the file, the place and the way out."""

import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from train_samples import CHAT, opened, run_of, save_tokenizer

from zeropipe.errors import ConfigError

TURNS = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
LAST_ONLY = TURNS + "{% if messages[-1]['role'] == 'assistant' %}{{ '</s>' }}{% endif %}"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    templates = {
        "chat": CHAT,
        "last": LAST_ONLY,
        "none": None,
        "raises": "{{ raise_exception('roles must alternate') }}",
    }
    for name, template in templates.items():
        save_tokenizer(folder / name, template)
    (folder / "broken").mkdir()
    (folder / "broken" / "tokenizer.json").write_text("{")
    return folder


def line(*turns, **more):
    return json.dumps({"messages": [{"role": role, "content": text} for role, text in turns], **more}).encode()


ANSWERED = line(("user", "a"), ("assistant", "b"))
ONE, TWO = b'{"text": "one"}\n', b'{"text": "two"}\n'
TEXTS = {
    "no JSON": (ONE + b"two\n", "a.jsonl, line 2 is not JSON: Expecting value"),
    "cut off": (ONE + b'{"text": "tw', "a.jsonl, line 2 is not JSON: Unterminated string"),
    "no object": (b"[1, 2]\n", 'a.jsonl, line 1 is [1, 2]: give a JSON object, like {"text": "..."}'),
    "no field": (ONE + b'{"txt": "b"}', "line 2 has no field 'text' but ['txt']: set data.field"),
    "no text": (b'{"text": 5}', "line 1: the field 'text' is 5: a text is needed"),
    "no UTF-8": (ONE + b'{"text": "\xff"}', "line 2: not text (byte 11 is not UTF-8)"),
    "half a character": (b'{"text": "\\ud83d"}', "line 1: '\\ud83d' is half a character of UTF-16"),
    "zero byte": (b'{"text": "a\x00"}', "line 1 is not JSON: Invalid control character"),
    "deep": (b"[" * 100_000, "line 1 is not JSON: it is nested too deeply"),
    "number": (b'{"text": ' + b"9" * 5000 + b"}", "line 1 is not JSON: Exceeds the limit"),
    "nothing": (b"\n\n", "a.jsonl gives no samples to learn from"),
    "empty": (b"", "a.jsonl gives no samples to learn from"),
    "empty texts": (b'{"text": ""}\n' * 2, "gives no samples to learn from: left out empty documents (2)"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_lines_that_are_wrong(tmp_path, case):
    content, message = TEXTS[case]
    (tmp_path / "a.jsonl").write_bytes(content)
    refused(run_of(tmp_path, kind="text", path=str(tmp_path / "a.jsonl"), tokenizer="bytes"), message)


CHATS = {
    "no messages": (b'{"text": "a"}', "line 1 has no field 'messages' but ['text']"),
    "no list": (b'{"messages": "hi"}', "line 1: messages is 'hi': a list of messages is needed"),
    "no message": (b'{"messages": []}', "line 1: messages is []"),
    "no role": (b'{"messages": [{"content": "a"}]}', "line 1: a message is {'content': 'a'}: it needs a role"),
    "no content": (b'{"messages": [{"role": "user"}]}', "line 1: the chat template refuses it: "),
    "answer first": (line(("assistant", "a")), "line 1: the chat begins with an answer"),
    "no answers": (line(("user", "a")), "gives no samples to learn from: left out chats without an answer (1)"),
    "too long": (line(("user", "a" * 3000), ("assistant", "b")), "left out chats longer than 1,024 tokens (1)"),
    "half a character": (line(("user", "\ud83d"), ("assistant", "b")), "line 1: '\\ud83d' is half a character"),
}


@pytest.mark.parametrize("case", CHATS)
def test_chats_that_are_wrong(tmp_path, tokenizers, case):
    content, message = CHATS[case]
    refused(chat_run(tmp_path, tokenizers / "chat", content), message)


TOKENIZERS = {
    "none": "has no chat template, which data.kind='chat' needs",
    "raises": "line 1: the chat template refuses it: TemplateError: roles must alternate",
    "last": "line 1: the chat template writes the beginning of a chat otherwise than the whole one, so answer 1 cannot",
    "broken": "cannot read the tokenizer of ",
    "missing": "is no folder with a tokenizer: give one, or 'bytes', of which each byte is a token",
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_that_cannot_make_chats(tmp_path, tokenizers, name):
    content = line(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    refused(chat_run(tmp_path, tokenizers / name, content), TOKENIZERS[name])


def test_bytes_make_no_chats(tmp_path):
    refused(chat_run(tmp_path, "bytes", ANSWERED), "data.kind='chat' needs a tokenizer with a chat template")


def chat_run(folder, tokenizer, content):
    (folder / "chats.jsonl").write_bytes(content)
    return run_of(folder, kind="chat", path=str(folder / "chats.jsonl"), tokenizer=str(tokenizer))


BESIDE = {
    "none": (None, 'is not a .npy file: write a.bin.json beside it, like {"dtype": "uint16"}'),
    "no JSON": ("{", "a.bin.json is not JSON"),
    "no object": ("[]", "a.bin.json is []: give an object with some of dtype, eos, offsets"),
    "unknown": ('{"type": "uint16"}', "give an object with some of dtype, eos, offsets"),
    "dtype": ('{"dtype": "float32"}', "dtype='float32': give one of uint8, "),
    "no id": ('{"dtype": "uint16", "eos": "</s>"}', "eos='</s>': a token id is needed"),
    "both": ('{"dtype": "uint16", "eos": 1, "offsets": "a.npy"}', "has eos and offsets: give one of them"),
    "no offsets": ('{"dtype": "uint16", "offsets": "b.npy"}', "offsets='b.npy' is not there"),
    "width": ('{"dtype": "int64"}', "a.bin has 12 bytes: not a number of int64, each of which has 8"),
    "going down": ('{"dtype": "uint16", "offsets": "down.npy"}', "must go up from 0 to at most 6"),
    "behind": ('{"dtype": "uint16", "offsets": "behind.npy"}', "must go up from 0 to at most 6"),
    "large": ('{"dtype": "uint16"}', "a.bin: it has token id 5000, the model knows 0 to 2047"),
}


@pytest.mark.parametrize("case", BESIDE)
def test_files_of_token_ids_that_are_wrong(tmp_path, case):
    text, message = BESIDE[case]
    np.array([1, 2, 3, 4, 5000, 6], dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "down.npy", np.array([0, 4, 2]))
    np.save(tmp_path / "behind.npy", np.array([0, 7]))
    if text is not None:
        (tmp_path / "a.bin.json").write_text(text)
    refused(run_of(tmp_path, kind="tokens", path=str(tmp_path / "a.bin")), message)


ARRAYS = {
    "two dimensions": (np.zeros((2, 2), dtype=np.int32), "a.npy holds int32[2, 2]: token ids are needed"),
    "floats": (np.zeros(3), "a.npy holds float64[3]: token ids are needed, whole numbers in one dimension"),
    "negative": (np.array([1, -1]), "a.npy: it has token id -1, the model knows 0 to 2047"),
    "objects": (np.array([None]), "cannot read "),
    "one token": (np.array([1]), "gives no samples to learn from: left out documents of less than two tokens (1)"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_that_are_no_token_ids(tmp_path, case):
    array, message = ARRAYS[case]
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    refused(run_of(tmp_path, kind="tokens", path=str(tmp_path / "a.npy")), message)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"path": None}, "data.path is missing: data.kind='text' needs files"),
        ({"path": "nowhere/*.txt"}, "data.path='nowhere/*.txt': there is no such file"),
        ({"path": "."}, "data.path: . is a folder: name files, like *"),
        ({"path": "a.json"}, "a.json: give one JSON object per line, in a file that is named .jsonl"),
        ({"path": "a.csv"}, "a.csv: give one JSON object per line, in a file that is named .jsonl"),
        ({"path": "zero.txt"}, "zero.txt, line 2: not text (it has a zero byte)"),
        ({"path": "a.txt", "tokenizer": None}, "data.tokenizer is missing, and model.path='tiny-qwen3' is no folder"),
        ({"path": "a.txt", "kind": "datasets"}, "a.txt is no folder: give one that `save_to_disk`"),
        ({"path": "/dev/zero"}, "/dev/zero is no ordinary file"),
    ],
)
def test_files_that_are_not_there(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "zero.txt").write_bytes(b"one\ntwo\0")
    refused(run_of(tmp_path, **{"kind": "text", "tokenizer": "bytes", **given}), message)


def test_a_tokenizer_of_another_model(tmp_path, tokenizers):
    (tmp_path / "a.txt").write_text("the answer is that a document has some words")
    (tmp_path / "config.json").write_text('{"vocab_size": 70}')
    given = {"kind": "text", "path": str(tmp_path / "a.txt"), "tokenizer": str(tokenizers / "chat")}
    config = run_of(tmp_path, model=tmp_path, **given)
    refused(config, r"a.txt: the tokenizer makes ")


def test_a_model_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "model_type": "qwen3"}')
    (tmp_path / "a.txt").write_text("some text")
    refused(
        run_of(tmp_path, model=tmp_path, kind="text", path=str(tmp_path / "a.txt")), "has no tokenizer that makes a"
    )


def test_sequences_that_are_too_long_for_the_model(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "max_position_embeddings": 512}')
    refused(
        run_of(tmp_path, model=tmp_path, sequence=513), "data.sequence=513: the model's max_position_embeddings is 512"
    )


def test_a_huge_line_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("zeropipe.train.data.reading.LONGEST_LINE", 2**20)
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(2**30)  # a gigabyte of zero bytes, without an end of line
    config = run_of(tmp_path, kind="text", path=str(tmp_path / "a.jsonl"), tokenizer="bytes")
    tracemalloc.start()
    try:
        refused(config, "line 1 has more than 1 MiB: is it JSONL? Split it up")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def refused(config, message):
    """With one line that has `message` in it, and nothing left behind."""
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        opened(config)
    assert "\n" not in str(caught.value)
    assert not list((Path(config.train.output) / "data").glob("*"))
