"""Chats -> samples in which only the assistant's answers have a loss."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from zeropipe.engine.transformers_private import marks_answers, render_with_answers
from zeropipe.errors import ConfigError, first_line, short
from zeropipe.train.data.chat_formats import ANSWER, Message, Turns, read_chat
from zeropipe.train.data.reader import group_texts, require_unicode
from zeropipe.train.data.record import Record
from zeropipe.train.data.store import SampleWriter
from zeropipe.train.data.tokenizer import Tokenizer, require_in_vocabulary

MAX_SHOWN_CHARS, MAX_SHOWN_PARTS = 120, 6  # of the example that is logged
Span = tuple[int, int]  # the first character, and one past the last


class Chat(NamedTuple):
    """A chat as the template renders it, and the answers in that text."""

    location: str
    format: str  # the title of its ChatFormat
    text: str
    answers: tuple[Span, ...]


class Tokens(NamedTuple):
    """The tokens of a chat."""

    ids: np.ndarray
    spans: np.ndarray  # the characters of each token
    mask: np.ndarray  # 1 for tokens with a loss

    @property
    def has_loss(self) -> bool:
        """Whether a token has a loss. The first token of a sample has none."""
        return bool(self.mask[1:].any())


def write_chats(
    records: Iterable[Record],
    tokenizer: Tokenizer,
    writer: SampleWriter,
    sequence: int,
    vocabulary: int,
    report_progress: Callable[[], None],
) -> None:
    """Write each chat as a sample. Chats without an answer, or of more than `sequence` tokens, are skipped."""
    hf = require_chat_tokenizer(tokenizer)
    too_long = f"chats longer than {sequence:,} tokens"
    max_chars = sequence * max(map(len, hf.get_vocab()))  # a longer text has more tokens than `sequence`
    for group in group_texts(render_chat(record, hf) for record in records):
        for chat in group:
            writer.count_format(chat.format)
        chats = [chat for chat in group if len(chat.text) <= max_chars]
        writer.skip(too_long, len(group) - len(chats))
        for chat, tokens in zip(chats, tokenize_chats(chats, hf)):
            require_in_vocabulary(chat.location, tokens.ids, vocabulary, "the tokenizer gives token")
            if len(tokens.ids) > sequence:
                writer.skip(too_long)
            elif not tokens.has_loss:
                writer.skip("chats without an answer")
            else:
                writer.example = writer.example or mark_losses(chat, tokens)
                writer.add_sample(tokens.ids, tokens.mask)
        report_progress()


def tokenize_chats(chats: list[Chat], hf: Any) -> list[Tokens]:
    """The tokens of each chat."""
    if not chats:
        return []
    found = hf(
        [chat.text for chat in chats], add_special_tokens=False, return_offsets_mapping=True, verbose=False,
        return_attention_mask=False,
    )  # fmt: skip
    results = []
    for chat, ids, offsets in zip(chats, found["input_ids"], found["offset_mapping"]):
        spans = np.array(offsets, dtype=np.int64).reshape(-1, 2)
        results.append(Tokens(np.array(ids, dtype=np.int64), spans, _mask_answers(spans, chat.answers)))
    return results


def mark_losses(chat: Chat, tokens: Tokens) -> str:
    """The text of a chat in one line, with the tokens that have a loss in brackets; long parts are abbreviated.

    `<|user|>How much is 2 + 3?<|assistant|>[loss: 5<|end|>]`
    """
    mask = tokens.mask.copy()
    mask[:1] = 0
    starts = _extend_over_spaces(tokens.spans)[:, 0]
    first = np.flatnonzero(np.diff(mask, prepend=np.uint8(2)))  # of each run of tokens with the same mask
    bounds = [0, *starts[first[1:]].tolist(), len(chat.text)]
    parts = []
    for index, (start, end) in zip(first, pairwise(bounds)):
        text = _abbreviate(chat.text[start:end])
        parts.append(f"[loss: {text}]" if mask[index] else text)
    if len(parts) > MAX_SHOWN_PARTS:
        parts = [*parts[:MAX_SHOWN_PARTS], " ..."]
    return "".join(parts)


def _abbreviate(text: str) -> str:
    """A text in one line, without its middle if it is long."""
    shown = text.replace("\\", r"\\").replace("\n", r"\n").replace("\r", r"\r").replace("\t", r"\t")
    half = MAX_SHOWN_CHARS // 2
    return shown if len(shown) <= MAX_SHOWN_CHARS else f"{shown[:half]} ... {shown[-half:]}"


def render_chat(record: Record, hf: Any) -> Chat:
    """Render a chat of any format, and its `tools` if it has any, with the chat template."""
    found, turns = read_chat(record)
    tools = _read_tools(record)

    def render(part: list[Message], prompt: bool) -> str:
        return hf.apply_chat_template(part, tools=tools, tokenize=False, add_generation_prompt=prompt)

    try:
        if marks_answers(hf, tools):
            text, answers = render_with_answers(hf, turns.messages, tools)
            answers = _drop_prompt(record.location, turns, answers)
        else:
            text, answers = _find_answers(record.location, turns, render)
    except ConfigError:
        raise
    except Exception as error:  # of any type, from the template
        raise ConfigError(
            f"{record.location}: the chat template fails: {type(error).__name__}: {first_line(error)}"
        ) from None
    return Chat(record.location, found.title, require_unicode(record.location, text), tuple(answers))


def _read_tools(record: Record) -> Any:
    """The field `tools`: a list, which ShareGPT files write as a string of JSON."""
    tools = record.value.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise ConfigError(f"{record.location}: tools is not JSON: {error}") from None
    if tools is not None and not isinstance(tools, list):
        raise ConfigError(f"{record.location}: tools={short(tools)}: must be a list of tools")
    return tools or None


def _drop_prompt(location: str, turns: Turns, answers: list[Span]) -> list[Span]:
    """The answers that a template marks, without those of the prompt."""
    roles = [message["role"] for message in turns.messages]
    num_prompt = roles[: turns.num_prompt].count(ANSWER)
    if num_prompt and len(answers) != roles.count(ANSWER):
        raise ConfigError(
            f"{location}: the prompt has answers, and the chat template marks {len(answers)} of "
            f"{roles.count(ANSWER)}; leave the prompt without answers"
        )
    return answers[num_prompt:]


def _find_answers(location: str, turns: Turns, render: Callable[[list[Message], bool], str]) -> tuple[str, list[Span]]:
    """The text of a chat, and its answers: each from the end of its prompt to the end of the chat up to it."""
    messages = turns.messages
    text, answers = render(messages, False), []
    for number, message in enumerate(messages):
        if message["role"] != ANSWER:
            continue
        if number == 0:
            raise ConfigError(f"{location}: the chat begins with an answer; begin with a message of another role")
        if number < turns.num_prompt:
            continue
        before, after = render(messages[:number], True), render(messages[: number + 1], False)
        if not (after.startswith(before) and text.startswith(after)):
            raise ConfigError(
                f"{location}: answer {number} cannot be found, because the chat template renders the beginning of a "
                "chat differently from the same part of the full chat; mark answers with {% generation %} in the "
                "template"
            )
        answers.append((len(before), len(after)))
    return text, answers


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


def require_chat_tokenizer(tokenizer: Tokenizer) -> Any:
    hf = tokenizer.hf
    if hf is None:
        raise ConfigError("data.kind='chat' needs a tokenizer with a chat template; data.tokenizer='bytes' has none")
    if not hf.chat_template:
        raise ConfigError(f"the tokenizer of {hf.name_or_path} has no chat template, which data.kind='chat' needs")
    if not hf.is_fast:
        raise ConfigError(f"data.kind='chat' needs a fast tokenizer, the one of {hf.name_or_path} is not")
    return hf
