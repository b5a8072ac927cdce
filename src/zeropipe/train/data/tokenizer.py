"""Text into token ids: by a tokenizer of transformers, or byte by byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from zeropipe.errors import ConfigError, MissingExtra
from zeropipe.train.data.wanted import BYTES

Ids = NDArray[np.int64]


class Bytes:
    """Every byte of UTF-8 is a token, 256 is the end of a document."""

    start, end = np.array([], dtype=np.int64), np.array([256])
    hf: Any = None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64) for text in texts]


class HuggingFace:
    """A tokenizer's own ids, with what it puts before and after a text, and its end-of-text token."""

    def __init__(self, folder: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise MissingExtra("transformers", "train") from None
        try:
            self.hf: Any = AutoTokenizer.from_pretrained(folder)
            plain, whole = (self.hf("a", add_special_tokens=special).input_ids for special in (False, True))
        except Exception as error:  # whatever transformers finds wrong with it
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"cannot read the tokenizer of {folder}: {type(error).__name__}: {reason}") from None
        places = [n for n in range(len(whole)) if whole[n : n + len(plain)] == plain]
        if not plain:  # transformers makes an empty tokenizer of a model's folder without one
            raise ConfigError(f"{folder} has no tokenizer that makes a token of a letter: set data.tokenizer")
        if not places:
            raise ConfigError(f"the tokenizer of {folder} does more than to put tokens before and after a text")
        end = whole[places[0] + len(plain) :]
        if self.hf.eos_token_id is not None and end[-1:] != [self.hf.eos_token_id]:
            end = [*end, self.hf.eos_token_id]
        self.start = np.array(whole[: places[0]], dtype=np.int64)
        self.end = np.array(end, dtype=np.int64)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        found = self.hf(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False).input_ids
        return [np.array(ids, dtype=np.int64) for ids in found]


def open_tokenizer(name: str) -> Bytes | HuggingFace:
    return Bytes() if name == BYTES else HuggingFace(name)


def require_known(where: str, ids: NDArray[Any], vocabulary: int, what: str) -> None:
    """ConfigError for token ids that the model has no embedding of."""
    if len(ids) and (ids.max() >= vocabulary or ids.min() < 0):
        wrong = ids[(ids >= vocabulary) | (ids < 0)][0]
        raise ConfigError(
            f"{where}: {what} {int(wrong)}, the model knows 0 to {vocabulary - 1}: they do not belong together"
        )
