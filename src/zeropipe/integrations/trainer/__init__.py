"""transformers.Trainer, trl.SFTTrainer and trl.DPOTrainer on zeropipe's pipeline, under torchrun.

pipelined    a Trainer class with a pipeline
settings     schedule, mesh and options of such a class
mixin        the methods of Trainer that run on the Engine instead
arguments    training arguments: those that the Engine takes over, and those that are refused
accelerator  data for each pipeline, not for each process
batches      a collator's batch in microbatches
losses       Trainer's and TRL's losses
stages       the stages of a rank under the names of the full model
checkpoints  checkpoints of a Trainer that any layout resumes from
sft          what trl.SFTTrainer logs
dpo          trl.DPOTrainer's loss and reference; `preferences` has its pairs
scores       what TRL's losses take of a model, from logits
"""

from zeropipe.errors import MissingExtra

try:
    import accelerate
    import transformers
except ImportError as error:
    raise MissingExtra(error.name or "accelerate", "trainer") from None

from zeropipe.integrations.trainer.mixin import PipelinedTrainer
from zeropipe.integrations.trainer.pipelined import pipelined

__all__ = ["PipelinedTrainer", "pipelined"]
