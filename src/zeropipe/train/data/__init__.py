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

from zeropipe.train.data.batch import Batch
from zeropipe.train.data.prepare import prepare
from zeropipe.train.data.steps import Data, Evaluation, open_data, open_evaluation
