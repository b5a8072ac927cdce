"""The first chat of a run with the tokens that have a loss, for a dry run, which reads no more than that."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from zeropipe.train.config.tables import RunConfig
from zeropipe.train.data.cache import describe_chats, open_reader
from zeropipe.train.data.chats import mark_losses, render_chat, require_chat_tokenizer, tokenize_chats
from zeropipe.train.data.request import DataRequest, build_requests
from zeropipe.train.data.tokenizer import open_tokenizer

_MAX_CHATS = 100  # to read until one becomes a sample


def preview_chats(config: RunConfig) -> Iterator[str]:
    """A line for each table whose data are chats. ConfigError if the first one is invalid."""
    for table, request in build_requests(config).items():
        if request.kind in ("chat", "datasets") and (line := _describe_first(request)):
            yield f"{table}: {line}"


def _describe_first(request: DataRequest) -> str:
    reader, has_chats = open_reader(request)
    if not has_chats:
        return ""
    hf = require_chat_tokenizer(open_tokenizer(str(request.tokenizer)))
    for record in islice(reader.records(), _MAX_CHATS):
        chat = render_chat(record, hf)
        (tokens,) = tokenize_chats([chat], hf)
        if tokens.has_loss and len(tokens.ids) <= request.sequence:
            return describe_chats({chat.format: 1}, mark_losses(chat, tokens))
    return f"the first {_MAX_CHATS} chats have no answer, or more than {request.sequence:,} tokens: they are skipped"
