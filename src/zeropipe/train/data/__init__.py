"""From files to the microbatches of a step.

wanted     what a run asks of its data: files, tokenizer, length of a sequence; the key of its cache
reading    files -> lines and documents, piece by piece; what is wrong is named with its file and line
library    the same of directories of the `datasets` library
tokenizer  text -> token ids
texts      documents -> samples
chats      chats -> samples, of which the answers have a loss
tokenfile  files of token ids -> samples, which stay where they are; `beside` reads what is said about such a file
writer     samples on their way to the disk: token ids and tables
store      samples on the disk, memory-mapped
rows       samples -> rows of at most `sequence` tokens
preparing  all of that, once per job; the other processes wait for it
leftovers  samples that are not used any more
order      the order of rows in an epoch, and random tokens, without a table of either
batch      the rows of a step -> microbatches of each pipeline
steps      one batch after the other, and a position that can be saved
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropipe.train.data.batch import Batch
    from zeropipe.train.data.preparing import prepare
    from zeropipe.train.data.steps import Data, Evaluation, open_data, open_evaluation

# name -> module, imported when first used: files are looked for without torch
_MODULE_OF = {
    "Batch": "batch", "prepare": "preparing", "Data": "steps", "Evaluation": "steps", "open_data": "steps",
    "open_evaluation": "steps",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zeropipe.train.data' has no attribute {name!r}")
    return getattr(import_module(f"zeropipe.train.data.{_MODULE_OF[name]}"), name)
