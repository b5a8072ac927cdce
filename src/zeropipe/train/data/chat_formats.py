"""The formats of chats in files: `messages`, ShareGPT, Alpaca, prompt and completion. Each becomes a list of messages.

The format of a record is recognised by its fields. FORMATS is in the order in which they are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from difflib import get_close_matches
from typing import Any, NamedTuple

from zeropipe.errors import ConfigError, short
from zeropipe.train.data.record import Record

Message = dict[str, Any]
ANSWER = "assistant"  # the role whose messages have a loss
_ROLES = ("system", "developer", "user", ANSWER, "tool", "function")
# other names of roles -> role; ShareGPT files have these, in `messages` they are mistakes
_OTHER_NAMES = {
    "human": "user", "prompter": "user", "gpt": ANSWER, "chatgpt": ANSWER, "model": ANSWER, "bot": ANSWER, "ai": ANSWER,
    "bing": ANSWER, "bard": ANSWER, "observation": "tool",
}  # fmt: skip
_CALLS = ("tool_calls", "function_call")


class Turns(NamedTuple):
    """The messages of a chat. The first `num_prompt` are a prompt: answers among them have no loss."""

    messages: list[Message]
    num_prompt: int = 0


class ChatFormat(NamedTuple):
    """A format of chats."""

    name: str
    fields: tuple[str, ...]  # a record with all of them has this format
    read: Callable[[Record], Turns]

    @property
    def title(self) -> str:
        """`ShareGPT (conversations)`."""
        return f"{self.name} ({', '.join(self.fields)})"


def find_format(fields: Collection[str]) -> ChatFormat | None:
    """The format of a record with these fields; None if it is not a chat."""
    return next((one for one in FORMATS if all(name in fields for name in one.fields)), None)


def read_chat(record: Record) -> tuple[ChatFormat, Turns]:
    """The format and the messages of a record. ConfigError names its line if it is not a valid chat."""
    found = find_format(record.value)
    if found is None:
        raise ConfigError(
            f"{record.location} has no field 'messages' but {short(sorted(record.value))}: must be a chat: "
            f"{', '.join(one.title for one in FORMATS)}"
        )
    turns = found.read(record)
    for message in turns.messages:
        _check_message(record.location, message)
    return found, turns


def _read_messages(record: Record) -> Turns:
    return Turns(_get_list(record, "messages"))


def _read_sharegpt(record: Record) -> Turns:
    """`conversations` with `from` and `value`, or with `role` and `content`; `system` is the first message."""
    messages = []
    for item in _get_list(record, "conversations"):
        if "role" in item:
            messages.append(item)
            continue
        role = item.get("from")
        if not isinstance(role, str) or "value" not in item:
            raise ConfigError(f"{record.location}: a turn is {short(item)}: must have `from` and `value`")
        known = _OTHER_NAMES.get(role.lower(), role.lower())
        if known not in _ROLES:
            raise ConfigError(
                f"{record.location}: from={short(role)}: must be human, gpt, system or tool; write other turns as "
                "`messages`, which may have any role of the chat template"
            )
        messages.append({"role": known, "content": item["value"]})
    return Turns([*_read_system(record), *messages])


def _read_alpaca(record: Record) -> Turns:
    """`instruction`, an optional `input` below it, and `output`; `history` has earlier pairs of them."""
    messages = _read_system(record)
    history = record.value.get("history") or []
    if not isinstance(history, list) or not all(isinstance(one, list) and len(one) == 2 for one in history):
        raise ConfigError(f"{record.location}: history={short(history)}: must be a list of [instruction, output]")
    for instruction, answer in history:
        messages += _make_pair(instruction, answer)
    instruction, extra = (_get_string(record, name) for name in ("instruction", "input"))
    request = f"{instruction}\n\n{extra}" if instruction and extra else instruction or extra
    return Turns([*messages, *_make_pair(request, _get_string(record, "output"))])


def _read_pair(record: Record) -> Turns:
    """`prompt` and `completion`: two strings, or two lists of messages. Only the completion has a loss."""
    prompt, completion = record.value["prompt"], record.value["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return Turns([*_read_system(record), *_make_pair(prompt, completion)])
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ConfigError(f"{record.location}: prompt and completion must both be strings, or both lists of messages")
    first = [*_read_system(record), *_get_list(record, "prompt")]
    return Turns([*first, *_get_list(record, "completion")], len(first))


FORMATS = (
    ChatFormat("messages", ("messages",), _read_messages),
    ChatFormat("ShareGPT", ("conversations",), _read_sharegpt),
    ChatFormat("Alpaca", ("instruction", "output"), _read_alpaca),
    ChatFormat("pairs", ("prompt", "completion"), _read_pair),
)


def _make_pair(request: Any, answer: Any) -> list[Message]:
    return [{"role": "user", "content": request}, {"role": ANSWER, "content": answer}]


def _read_system(record: Record) -> list[Message]:
    text = _get_string(record, "system")
    return [{"role": "system", "content": text}] if text else []


def _get_string(record: Record, name: str) -> str:
    """A field that is a string; an empty one if it is missing or null."""
    text = record.value.get(name)
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"{record.location}: the field {name!r} is {short(text)}: must be a string")
    if text is None and name == "output":
        raise ConfigError(f"{record.location}: the field 'output' is null: must be a string")
    return text or ""


def _get_list(record: Record, name: str) -> list[Message]:
    """A field that is a list of objects."""
    items = record.value[name]
    if not isinstance(items, list) or not items:
        raise ConfigError(f"{record.location}: {name} is {short(items)}: must be a list of messages")
    for item in items:
        if not isinstance(item, dict):
            raise ConfigError(f"{record.location}: a message is {short(item)}: must have a role and a content")
    return list(items)


def _check_message(location: str, message: Message) -> None:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        hint = "; turns with `from` and `value` belong in `conversations`" if "from" in message else ""
        raise ConfigError(f"{location}: a message is {short(message)}: must have a role and a content{hint}")
    if role not in _ROLES:  # a role of the chat template's own, or a mistake by which an answer would have no loss
        similar = [_OTHER_NAMES[role.lower()]] if role.lower() in _OTHER_NAMES else get_close_matches(
            role.lower(), _ROLES, n=1, cutoff=0.75
        )  # fmt: skip
        if similar:
            raise ConfigError(f"{location}: role={short(role)}: did you mean {similar[0]!r}?")
    if content is None and not (role == ANSWER and any(message.get(name) for name in _CALLS)):
        raise ConfigError(
            f"{location}: a message is {short(message)}: must have a content"
            + (', which may be "", or tool_calls' if role == ANSWER else "")
        )
    if content is not None and not isinstance(content, str | list):
        raise ConfigError(f"{location}: content={short(content)}: must be a string")
