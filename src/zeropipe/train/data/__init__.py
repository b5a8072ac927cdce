"""From files to the microbatches of a step.

request      the samples that a run requests: files, tokenizer, sequence length; the key of their cache
detect       the kind of data that files hold
reader       files and `datasets` folders -> documents and chats, in bounded memory
tokenizer    text -> token ids; documents -> samples
record       a JSON object of a file
json_array   the objects of a JSON array, one at a time
chat_formats the formats of chats: messages, ShareGPT, Alpaca, prompt and completion
chats        chats -> samples in which only answers have a loss
chat_preview the first chat with the tokens that have a loss, for a dry run
token_files  files of token ids -> samples, without a copy
store        samples on disk: written once, then memory-mapped
rows         samples -> rows of at most `sequence` tokens; the order of rows in an epoch
cache        all of that, once per job; removal of samples that are not used any more
batch        the rows of a step -> the microbatches of each pipeline
loader       one batch after the other, and a position that checkpoints save
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropipe.train.data.cache import prepare
    from zeropipe.train.data.loader import open_data, open_evaluation

# name -> module, imported on first use, because checking the paths of a training file must not import torch
_MODULE_OF = {"prepare": "cache", "open_data": "loader", "open_evaluation": "loader"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zeropipe.train.data' has no attribute {name!r}")
    return getattr(import_module(f"zeropipe.train.data.{_MODULE_OF[name]}"), name)
