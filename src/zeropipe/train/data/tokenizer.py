"""Tokenizers: a transformers tokenizer, or one token per byte. Documents -> token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeropipe.errors import ConfigError, MissingExtra, first_line
from zeropipe.train.config.tables import BYTE_TOKENIZER
from zeropipe.train.data.reader import TextChunk, group_texts
from zeropipe.train.data.store import IntArray, SampleWriter


class ByteTokenizer:
    """Every byte of UTF-8 is a token, and 256 is the end of a document."""

    first_tokens, last_tokens = np.array([], dtype=np.int64), np.array([256])
    hf: Any = None

    def encode(self, texts: Sequence[str]) -> list[IntArray]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]


class HFTokenizer:
    """A transformers tokenizer. Documents begin and end with its special tokens, and end with its EOS token."""

    def __init__(self, folder: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise MissingExtra("transformers", "train") from None
        try:
            self.hf: Any = AutoTokenizer.from_pretrained(folder)
            plain, special = (self.hf("a", add_special_tokens=special).input_ids for special in (False, True))
        except Exception as error:  # of any type
            raise ConfigError(
                f"cannot read the tokenizer of {folder}: {type(error).__name__}: {first_line(error)}"
            ) from None
        starts = [n for n in range(len(special)) if special[n : n + len(plain)] == plain]
        if not plain:  # transformers returns an empty tokenizer for a model folder without one
            raise ConfigError(f"{folder} has no tokenizer, or one without a vocabulary; set data.tokenizer")
        if not starts:
            raise ConfigError(
                f"the tokenizer of {folder} changes the tokens of a text when it adds special tokens; use one that "
                "only adds tokens before and after them"
            )
        suffix = special[starts[0] + len(plain) :]
        if self.hf.eos_token_id is not None and suffix[-1:] != [self.hf.eos_token_id]:
            suffix = [*suffix, self.hf.eos_token_id]
        self.first_tokens = np.array(special[: starts[0]], dtype=np.int64)
        self.last_tokens = np.array(suffix, dtype=np.int64)

    def encode(self, texts: Sequence[str]) -> list[IntArray]:
        found = self.hf(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False).input_ids
        return [np.array(ids, dtype=np.int64) for ids in found]


Tokenizer = ByteTokenizer | HFTokenizer


def open_tokenizer(name: str) -> Tokenizer:
    return ByteTokenizer() if name == BYTE_TOKENIZER else HFTokenizer(name)


def write_documents(
    chunks: Iterable[TextChunk],
    tokenizer: Tokenizer,
    writer: SampleWriter,
    vocabulary: int,
    report_progress: Callable[[], None],
) -> None:
    """Tokenize documents and write them as samples."""
    require_in_vocabulary("the tokenizer", tokenizer.last_tokens, vocabulary, "documents end with token")
    num_tokens = 0  # of the current document, special tokens not counted
    for group in group_texts(chunks):
        for chunk, ids in zip(group, tokenizer.encode([chunk.text for chunk in group])):
            require_in_vocabulary(chunk.location, ids, vocabulary, "the tokenizer gives token")
            if len(ids) and not num_tokens:
                writer.add_tokens(tokenizer.first_tokens)
            num_tokens += len(ids)
            writer.add_tokens(ids)
            if not chunk.is_last:
                continue
            if num_tokens:
                writer.add_tokens(tokenizer.last_tokens)
                writer.end_document()
            else:
                writer.skip("empty documents")
            num_tokens = 0
        report_progress()


def require_in_vocabulary(location: str, ids: NDArray[Any], vocabulary: int, what: str) -> None:
    """Raise ConfigError for token ids that the model has no embedding of."""
    if len(ids) and (ids.max() >= vocabulary or ids.min() < 0):
        invalid = ids[(ids >= vocabulary) | (ids < 0)][0]
        raise ConfigError(
            f"{location}: {what} {int(invalid)}, but the model has tokens 0 to {vocabulary - 1}; use the model's own "
            "tokenizer"
        )
