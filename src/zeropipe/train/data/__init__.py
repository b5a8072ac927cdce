"""From files to the microbatches of a step.

wanted     what a run asks of its data: files, tokenizer, length of a sequence; the key of its cache
reading    files -> documents, piece by piece; what is wrong is named with its file and line
tokenizer  text -> token ids
store      samples on disk: token ids, and tables of samples and rows; written once, then memory-mapped
rows       samples -> rows of at most `sequence` tokens
prepare    all of that, once per job; the other processes wait for it
order      the order of rows in an epoch, and random tokens, without a table of either
batch      the rows of a step -> microbatches of each pipeline
steps      one batch after the other, and a position that can be saved
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from zeropipe.train.data.prepare import prepare  # here: a module has the same name

if TYPE_CHECKING:
    from zeropipe.train.data.batch import Batch
    from zeropipe.train.data.steps import Data, Evaluation, open_data, open_evaluation

# name -> module, imported when first used: files are looked for without torch
_MODULE_OF = {
    "Batch": "batch", "Data": "steps", "Evaluation": "steps", "open_data": "steps",
    "open_evaluation": "steps",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zeropipe.train.data' has no attribute {name!r}")
    return getattr(import_module(f"zeropipe.train.data.{_MODULE_OF[name]}"), name)
