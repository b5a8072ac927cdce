"""Chats into samples: the answers have a loss, everything else has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from zeropipe.engine.transformers_private import marks_answers, render_with_answers
from zeropipe.errors import ConfigError, short
from zeropipe.train.data.reading import Line, in_blocks, require_text
from zeropipe.train.data.tokenizer import Bytes, HuggingFace, require_known
from zeropipe.train.data.writer import Writer


class Chat(NamedTuple):
    """A chat as the template writes it, and where in that text the answers are."""

    where: str
    text: str
    answers: tuple[tuple[int, int], ...]


def write_chats(
    lines: Iterable[Line],
    tokenizer: Bytes | HuggingFace,
    writer: Writer,
    sequence: int,
    vocabulary: int,
    beat: Callable[[], None],
) -> None:
    """Each chat is a sample. Those that are too long, or without an answer, are left out and counted."""
    hf = _checked(tokenizer)
    longest = sequence * max(map(len, hf.get_vocab()))  # no text of that many tokens is longer
    for batch in in_blocks(rendered(line, hf) for line in lines):
        short_ones = [chat for chat in batch if len(chat.text) <= longest]
        writer.leave_out(f"chats longer than {sequence:,} tokens", len(batch) - len(short_ones))
        if not short_ones:
            continue
        found = hf(
            [chat.text for chat in short_ones], add_special_tokens=False, return_offsets_mapping=True, verbose=False,
            return_attention_mask=False,
        )  # fmt: skip
        for chat, tokens, places in zip(short_ones, found["input_ids"], found["offset_mapping"]):
            ids = np.array(tokens, dtype=np.int64)
            require_known(chat.where, ids, vocabulary, "the tokenizer makes")
            mask = _mask(np.array(places, dtype=np.int64).reshape(-1, 2), chat.answers)
            if len(ids) > sequence:
                writer.leave_out(f"chats longer than {sequence:,} tokens")
            elif not mask[1:].any():
                writer.leave_out("chats without an answer")
            else:
                writer.add(ids, mask)
        beat()


def rendered(line: Line, hf: Any) -> Chat:
    """A line's `messages`, and its `tools` if it has any, by the chat template."""
    messages, tools = _messages(line), line.value.get("tools")
    try:
        if marks_answers(hf, tools):
            text, answers = render_with_answers(hf, messages, tools)
        else:
            text, answers = _answers(line.where, messages, lambda part, prompt: _render(hf, part, tools, prompt))
    except ConfigError:
        raise
    except Exception as error:  # whatever a template raises
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{line.where}: the chat template refuses it: {type(error).__name__}: {reason}") from None
    return Chat(line.where, require_text(line.where, text), tuple(answers))


def _answers(
    where: str, messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]], bool], str]
) -> tuple[str, list[tuple[int, int]]]:
    """A chat and its answers: each begins where the prompt for it ends, and ends where the chat up to it ends."""
    text, answers = render(messages, False), []
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if number == 0:
            raise ConfigError(f"{where}: the chat begins with an answer; begin with a message of another role")
        before, after = render(messages[:number], True), render(messages[: number + 1], False)
        if not (after.startswith(before) and text.startswith(after)):
            raise ConfigError(
                f"{where}: the chat template writes the beginning of a chat otherwise than the whole one, so answer "
                f"{number} cannot be found: mark answers with {{% generation %}} in the template"
            )
        answers.append((len(before), len(after)))
    return text, answers


def _render(hf: Any, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> str:
    return hf.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)


def _messages(line: Line) -> list[dict[str, Any]]:
    where, value = line
    if "messages" not in value:
        raise ConfigError(f"{where} has no field 'messages' but {short(sorted(value))}: chats are lists of messages")
    messages = value["messages"]
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages is {short(messages)}: a list of messages is needed")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{where}: a message is {short(message)}: it needs a role and a content")
    return messages


def _mask(places: np.ndarray, answers: tuple[tuple[int, int], ...]) -> np.ndarray:
    """1 for tokens that have a character of an answer."""
    mask = np.zeros(len(places), dtype=np.uint8)
    starts, ends = _with_blanks(places).T
    for start, end in answers:
        mask |= (starts < end) & (ends > start) & (starts < ends)
    return mask


def _with_blanks(places: np.ndarray) -> np.ndarray:
    """Where tokens are in a text.

    Some tokenizers (gpt_neox's, bart's) tell places without the blanks around a word. A token of blanks is then told to
    be of no character: it begins where the token before it ends.
    """
    found = places.copy()
    before = np.append(0, places[:-1, 1])
    is_empty = places[:, 0] == places[:, 1]
    found[is_empty, 0] = np.minimum(before, places[:, 0])[is_empty]
    return found


def _checked(tokenizer: Bytes | HuggingFace) -> Any:
    hf = tokenizer.hf
    if hf is None:
        raise ConfigError("data.kind='chat' needs a tokenizer with a chat template: bytes have none")
    if not hf.chat_template:
        raise ConfigError(f"the tokenizer of {hf.name_or_path} has no chat template, which data.kind='chat' needs")
    if not hf.is_fast:
        raise ConfigError(
            f"the tokenizer of {hf.name_or_path} does not tell where tokens are in a text: take a fast one"
        )
    return hf
