"""Invalid data: one line that names the file, the line and the way out."""

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
    "no object": (b"[1, 2]\n", 'a.jsonl, line 1 is [1, 2]: must be a JSON object, like {"text": "..."}'),
    "no field": (ONE + b'{"txt": "b"}', "line 2 has no field 'text' but ['txt']; set data.field"),
    "no text": (b'{"text": 5}', "line 1: the field 'text' is 5: must be a string"),
    "no UTF-8": (ONE + b'{"text": "\xff"}', "line 2: not text (byte 11 is not UTF-8)"),
    "lone surrogate": (b'{"text": "\\ud83d"}', "line 1: '\\ud83d' is a lone surrogate of UTF-16"),
    "zero byte": (b'{"text": "a\x00"}', "line 1 is not JSON: Invalid control character"),
    "deep": (b"[" * 100_000, "line 1 is not JSON: it is nested too deeply"),
    "number": (b'{"text": ' + b"9" * 5000 + b"}", "line 1 is not JSON: Exceeds the limit"),
    "nothing": (b"\n\n", "a.jsonl has no samples"),
    "empty": (b"", "a.jsonl has no samples"),
    "chats": (
        ONE + ANSWERED,
        "line 2 has no field 'text' but ['messages']; it is a chat, messages (messages): set data.kind to 'chat'",
    ),
    "Alpaca": (b'{"instruction": "a", "output": "b"}', "it is a chat, Alpaca (instruction, output): set data.kind"),
    "empty texts": (b'{"text": ""}\n' * 2, "has no samples: skipped empty documents (2)"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_lines_that_are_wrong(tmp_path, case):
    content, message = TEXTS[case]
    (tmp_path / "a.jsonl").write_bytes(content)
    assert_refused(run_of(tmp_path, kind="text", path=str(tmp_path / "a.jsonl"), tokenizer="bytes"), message)


CHATS = {
    "no messages": (b'{"text": "a"}', "line 1 has no field 'messages' but ['text']"),
    "no list": (b'{"messages": "hi"}', "line 1: messages is 'hi': must be a list of messages"),
    "no message": (b'{"messages": []}', "line 1: messages is []"),
    "no role": (b'{"messages": [{"content": "a"}]}', "line 1: a message is {'content': 'a'}: must have a role"),
    "no content": (b'{"messages": [{"role": "user"}]}', "line 1: a message is {'role': 'user'}: must have a content"),
    "no answer": (
        ANSWERED + b'\n{"messages": [{"role": "user", "content": "a"}, {"role": "assistant"}]}',
        """line 2: a message is {'role': 'assistant'}: must have a content, which may be "", or tool_calls""",
    ),
    "null": (b'{"messages": [{"role": "user", "content": null}]}', "line 1: a message is {'content': None, 'role'"),
    "number": (b'{"messages": [{"role": "user", "content": 5}]}', "line 1: content=5: must be a string"),
    "role of ShareGPT": (line(("user", "a"), ("gpt", "b")), "line 1: role='gpt': did you mean 'assistant'?"),
    "role in capitals": (line(("User", "a"), ("assistant", "b")), "line 1: role='User': did you mean 'user'?"),
    "misspelled role": (line(("user", "a"), ("asistant", "b")), "line 1: role='asistant': did you mean 'assistant'?"),
    "tools": (line(("user", "a"), ("assistant", "b"), tools=5), "line 1: tools=5: must be a list of tools"),
    "turns in messages": (b'{"messages": [{"from": "human", "value": "a"}]}', "belong in `conversations`"),
    "unknown speaker": (b'{"conversations": [{"from": "narrator", "value": "a"}]}', "line 1: from='narrator': must be"),
    "no value": (b'{"conversations": [{"from": "human"}]}', "line 1: a turn is {'from': 'human'}: must have `from`"),
    "null value": (b'{"conversations": [{"from": "gpt", "value": null}]}', "line 1: a message is "),
    "no output": (b'{"instruction": "a", "output": null}', "line 1: the field 'output' is null: must be a string"),
    "input": (b'{"instruction": "a", "input": 5, "output": "b"}', "line 1: the field 'input' is 5: must be a string"),
    "history": (b'{"instruction": "a", "output": "b", "history": ["c"]}', "must be a list of [instruction, output]"),
    "half a pair": (b'{"prompt": "a"}', "line 1 has no field 'messages' but ['prompt']: must be a chat: messages ("),
    "mixed pair": (b'{"prompt": "a", "completion": []}', "prompt and completion must both be strings, or both lists"),
    "answer first": (line(("assistant", "a")), "line 1: the chat begins with an answer"),
    "no answers": (line(("user", "a")), "has no samples: skipped chats without an answer (1)"),
    "too long": (line(("user", "a" * 3000), ("assistant", "b")), "skipped chats longer than 1,024 tokens (1)"),
    "lone surrogate": (line(("user", "\ud83d"), ("assistant", "b")), "line 1: '\\ud83d' is a lone surrogate"),
}


@pytest.mark.parametrize("case", CHATS)
def test_chats_that_are_wrong(tmp_path, tokenizers, case):
    content, message = CHATS[case]
    assert_refused(chat_run(tmp_path, tokenizers / "chat", content), message)


TOKENIZERS = {
    "none": "has no chat template, which data.kind='chat' needs",
    "raises": "line 1: the chat template fails: TemplateError: roles must alternate",
    "last": "line 1: answer 1 cannot be found, because the chat template renders the beginning of a chat differently",
    "broken": "cannot read the tokenizer of ",
    "missing": "is not a folder with a tokenizer; set data.tokenizer to one, or to 'bytes' (one token per byte)",
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers_that_cannot_make_chats(tmp_path, tokenizers, name):
    content = line(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    assert_refused(chat_run(tmp_path, tokenizers / name, content), TOKENIZERS[name])


def test_bytes_make_no_chats(tmp_path):
    assert_refused(chat_run(tmp_path, "bytes", ANSWERED), "data.kind='chat' needs a tokenizer with a chat template")


def test_messages_in_a_text_field_suggest_chat(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(ANSWERED)
    config = run_of(tmp_path, kind="text", path=str(tmp_path / "a.jsonl"), tokenizer="bytes", field="messages")
    assert_refused(config, "must be a string; for chats set data.kind to 'chat'")


ARRAYS_OF_CHATS = {
    "no end": (b"[\n" + ANSWERED, "chats.json, line 2 is not JSON: the array has no end"),
    "no comma": (b"[\n" + ANSWERED + b"\n" + ANSWERED + b"]", "line 3 is not JSON: ',' is missing before '{"),
    "half an object": (b"[\n" + ANSWERED + b",\n{", "line 3 is not JSON: Expecting property name"),
    "no objects": (b"[\n\n1]", "line 3 is not JSON: 1 must be an object"),
    "invalid chat": (b"[" + ANSWERED + b',\n\n{"messages": 1}]', "chats.json, line 3: messages is 1"),
    "empty": (b"[ ]", "chats.json has no samples"),
    "no UTF-8": (b"[\xff]", "chats.json: not text (byte 0xff is not UTF-8)"),
}


@pytest.mark.parametrize("case", ARRAYS_OF_CHATS)
def test_arrays_of_chats_that_are_wrong(tmp_path, tokenizers, case):
    content, message = ARRAYS_OF_CHATS[case]
    assert_refused(chat_run(tmp_path, tokenizers / "chat", content, "chats.json"), message)


def chat_run(folder, tokenizer, content, name="chats.jsonl"):
    (folder / name).write_bytes(content)
    return run_of(folder, kind="chat", path=str(folder / name), tokenizer=str(tokenizer))


SIDECARS = {
    "none": (None, 'is not a .npy file; write a.bin.json beside it, like {"dtype": "uint16"}'),
    "no JSON": ("{", "a.bin.json is not JSON"),
    "no object": ("[]", "a.bin.json is []: must be an object with some of dtype, eos, offsets"),
    "unknown": ('{"type": "uint16"}', "must be an object with some of dtype, eos, offsets"),
    "dtype": ('{"dtype": "float32"}', "dtype='float32': must be one of uint8, "),
    "no id": ('{"dtype": "uint16", "eos": "</s>"}', "eos='</s>': must be a token id"),
    "both": ('{"dtype": "uint16", "eos": 1, "offsets": "a.npy"}', "has eos and offsets; leave out one of them"),
    "no offsets": ('{"dtype": "uint16", "offsets": "b.npy"}', "offsets='b.npy' does not exist"),
    "width": ('{"dtype": "int64"}', "a.bin has 12 bytes: must be a positive multiple of 8, the size of int64"),
    "going down": ('{"dtype": "uint16", "offsets": "down.npy"}', "must ascend from 0 to at most 6"),
    "behind": ('{"dtype": "uint16", "offsets": "behind.npy"}', "must ascend from 0 to at most 6"),
    "large": ('{"dtype": "uint16"}', "a.bin: it has token id 5000, but the model has tokens 0 to 2047"),
}


@pytest.mark.parametrize("case", SIDECARS)
def test_files_of_token_ids_that_are_wrong(tmp_path, case):
    text, message = SIDECARS[case]
    np.array([1, 2, 3, 4, 5000, 6], dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "down.npy", np.array([0, 4, 2]))
    np.save(tmp_path / "behind.npy", np.array([0, 7]))
    if text is not None:
        (tmp_path / "a.bin.json").write_text(text)
    assert_refused(run_of(tmp_path, kind="tokens", path=str(tmp_path / "a.bin")), message)


ARRAYS = {
    "two dimensions": (np.zeros((2, 2), dtype=np.int32), "a.npy holds int32[2, 2]: must be token ids"),
    "floats": (np.zeros(3), "a.npy holds float64[3]: must be token ids, integers in one dimension"),
    "negative": (np.array([1, -1]), "a.npy: it has token id -1, but the model has tokens 0 to 2047"),
    "objects": (np.array([None]), "cannot read "),
    "one token": (np.array([1]), "has no samples: skipped documents of less than two tokens (1)"),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_arrays_that_are_no_token_ids(tmp_path, case):
    array, message = ARRAYS[case]
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    assert_refused(run_of(tmp_path, kind="tokens", path=str(tmp_path / "a.npy")), message)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"path": None}, "data.path is missing: data.kind='text' needs files"),
        ({"path": "nowhere/*.txt"}, "data.path='nowhere/*.txt': no such file"),
        ({"path": "."}, "data.path: . is a folder; name files, like *"),
        ({"path": "a.json"}, "a.json must be JSONL, one JSON object per line, in a file named .jsonl"),
        ({"path": "a.csv"}, "a.csv must be JSONL, one JSON object per line, in a file named .jsonl"),
        ({"path": "zero.txt"}, "zero.txt, line 2: not text (it has a zero byte)"),
        (
            {"path": "a.txt", "tokenizer": None},
            "data.tokenizer is missing, and model.path='tiny-qwen3' is not a folder",
        ),
        ({"path": "a.txt", "kind": "datasets"}, "a.txt is not a folder; use one that `save_to_disk`"),
        ({"path": "/dev/zero"}, "/dev/zero is not a regular file"),
    ],
)
def test_files_that_are_not_there(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "zero.txt").write_bytes(b"one\ntwo\0")
    assert_refused(run_of(tmp_path, **{"kind": "text", "tokenizer": "bytes", **given}), message)


def test_a_tokenizer_of_another_model(tmp_path, tokenizers):
    (tmp_path / "a.txt").write_text("the answer is that a document has some words")
    (tmp_path / "config.json").write_text('{"vocab_size": 70}')
    given = {"kind": "text", "path": str(tmp_path / "a.txt"), "tokenizer": str(tokenizers / "chat")}
    config = run_of(tmp_path, model=tmp_path, **given)
    assert_refused(config, r"a.txt: the tokenizer gives token ")


def test_a_model_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "model_type": "qwen3"}')
    (tmp_path / "a.txt").write_text("some text")
    assert_refused(
        run_of(tmp_path, model=tmp_path, kind="text", path=str(tmp_path / "a.txt")),
        "has no tokenizer, or one without a vocabulary",
    )


def test_sequences_that_are_too_long_for_the_model(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 300, "max_position_embeddings": 512}')
    assert_refused(
        run_of(tmp_path, model=tmp_path, sequence=513), "data.sequence=513: the model's max_position_embeddings is 512"
    )


def test_a_huge_line_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("zeropipe.train.data.reader.MAX_LINE_BYTES", 2**20)
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(2**30)  # a gigabyte of zero bytes, without an end of line
    config = run_of(tmp_path, kind="text", path=str(tmp_path / "a.jsonl"), tokenizer="bytes")
    tracemalloc.start()
    try:
        assert_refused(config, "line 1 has more than 1 MiB; write shorter lines")
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def assert_refused(config, message):
    """The data is refused with one line that has `message` in it, and nothing left behind."""
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        opened(config)
    assert "\n" not in str(caught.value)
    assert not list((Path(config.train.output) / "data").glob("*"))
