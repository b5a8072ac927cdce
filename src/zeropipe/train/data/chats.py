"""Chats -> samples in which only the assistant's answers have a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from zeropipe.engine.transformers_private import marks_answers, render_with_answers
from zeropipe.errors import ConfigError, first_line, short
from zeropipe.train.data.reader import Record, group_texts, require_unicode
from zeropipe.train.data.store import SampleWriter
from zeropipe.train.data.tokenizer import Tokenizer, require_in_vocabulary

Span = tuple[int, int]  # the first character, and one past the last


class Chat(NamedTuple):
    """A chat as the template renders it, and the answers in that text."""

    location: str
    text: str
    answers: tuple[Span, ...]


def write_chats(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    writer: SampleWriter,
    sequence: int,
    vocabulary: int,
    report_progress: Callable[[], None],
) -> None:
    """Write each chat as a sample. Chats without an answer, or of more than `sequence` tokens, are skipped."""
    hf = _require_chat_tokenizer(tokenizer)
    too_long = f"chats longer than {sequence:,} tokens"
    max_chars = sequence * max(map(len, hf.get_vocab()))  # a longer text has more tokens than `sequence`
    for group in group_texts(render_chat(record, hf) for record in records):
        chats = [chat for chat in group if len(chat.text) <= max_chars]
        writer.skip(too_long, len(group) - len(chats))
        if not chats:
            continue
        found = hf(
            [chat.text for chat in chats], add_special_tokens=False, return_offsets_mapping=True, verbose=False,
            return_attention_mask=False,
        )  # fmt: skip
        for chat, tokens, spans in zip(chats, found["input_ids"], found["offset_mapping"]):
            ids = np.array(tokens, dtype=np.int64)
            require_in_vocabulary(chat.location, ids, vocabulary, "the tokenizer gives token")
            mask = _mask_answers(np.array(spans, dtype=np.int64).reshape(-1, 2), chat.answers)
            if len(ids) > sequence:
                writer.skip(too_long)
            elif not mask[1:].any():
                writer.skip("chats without an answer")
            else:
                writer.add_sample(ids, mask)
        report_progress()


def render_chat(record: Record, hf: Any) -> Chat:
    """Render the `messages` of a record, and its `tools` if it has any, with the chat template."""
    messages, tools = _get_messages(record), record.value.get("tools")

    def render(part: list[dict[str, Any]], prompt: bool) -> str:
        return hf.apply_chat_template(part, tools=tools, tokenize=False, add_generation_prompt=prompt)

    try:
        if marks_answers(hf, tools):
            text, answers = render_with_answers(hf, messages, tools)
        else:
            text, answers = _find_answers(record.location, messages, render)
    except ConfigError:
        raise
    except Exception as error:  # of any type, from the template
        raise ConfigError(
            f"{record.location}: the chat template fails: {type(error).__name__}: {first_line(error)}"
        ) from None
    return Chat(record.location, require_unicode(record.location, text), tuple(answers))


def _find_answers(
    location: str, messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]], bool], str]
) -> tuple[str, list[Span]]:
    """The text of a chat, and its answers: each from the end of its prompt to the end of the chat up to it."""
    text, answers = render(messages, False), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise ConfigError(f"{location}: the chat begins with an answer; begin with a message of another role")
        before, after = render(messages[:number], True), render(messages[: number + 1], False)
        if not (after.startswith(before) and text.startswith(after)):
            raise ConfigError(
                f"{location}: answer {number} cannot be found, because the chat template renders the beginning of a "
                "chat differently from the same part of the full chat; mark answers with {% generation %} in the "
                "template"
            )
        answers.append((len(before), len(after)))
    return text, answers


def _get_messages(record: Record) -> list[dict[str, Any]]:
    location, value = record
    if "messages" not in value:
        raise ConfigError(f"{location} has no field 'messages' but {short(sorted(value))}: must be a chat")
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{location}: messages is {short(messages)}: must be a list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{location}: a message is {short(message)}: must have a role and a content")
    return messages


def _mask_answers(spans: np.ndarray, answers: tuple[Span, ...]) -> np.ndarray:
    """1 for tokens that include a character of an answer. `spans` are the characters of each token."""
    mask = np.zeros(len(spans), dtype=np.uint8)
    starts, ends = _extend_over_spaces(spans).T
    for start, end in answers:
        mask |= (starts < end) & (ends > start) & (starts < ends)
    return mask


def _extend_over_spaces(spans: np.ndarray) -> np.ndarray:
    """Let tokens of spaces begin where the token before them ends.

    Some tokenizers (of gpt_neox, bart) trim spaces from spans, so that a token of spaces has an empty one.
    """
    found = spans.copy()
    previous = np.append(0, spans[:-1, 1])
    is_empty = spans[:, 0] == spans[:, 1]
    found[is_empty, 0] = np.minimum(previous, spans[:, 0])[is_empty]
    return found


def _require_chat_tokenizer(tokenizer: Tokenizer) -> Any:
    hf = tokenizer.hf
    if hf is None:
        raise ConfigError("data.kind='chat' needs a tokenizer with a chat template; data.tokenizer='bytes' has none")
    if not hf.chat_template:
        raise ConfigError(f"the tokenizer of {hf.name_or_path} has no chat template, which data.kind='chat' needs")
    if not hf.is_fast:
        raise ConfigError(f"data.kind='chat' needs a fast tokenizer, the one of {hf.name_or_path} is not")
    return hf
