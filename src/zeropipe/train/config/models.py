"""The tables of a training file. Descriptions are the text of the configuration reference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MOST = 10**9  # of any whole number
Count = Annotated[int, Field(ge=1, le=MOST, strict=True)]
Index = Annotated[int, Field(ge=0, le=MOST, strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]  # whole numbers are fine, true and "1" are not
Beta = Annotated[float, Field(ge=0, lt=1, strict=True)]
BYTE_TOKENIZER = "bytes"  # value of data.tokenizer: one token per byte
Dtype = Literal["float32", "bfloat16", "float64"]


class Table(BaseModel):
    """A table of the file: unknown names are errors, and values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelTable(Table):
    """The model to train."""

    path: str = Field(description="A model directory, a config.json, or a built-in model: tiny-qwen3, qwen3-0.6b, ...")
    weights: Literal["load", "random"] = Field(
        default="load",
        description="`load` those of the directory, or make `random` ones from `train.seed` (pretraining).",
    )
    dtype: Dtype = Field(default="float32", description="What weights and activations are computed in.")
    num_layers: Count | None = Field(default=None, description="Layers of a built-in model, if not its own number.")
    vocabulary: Count | None = Field(default=None, description="Vocabulary of a built-in model, if not its own.")


class LoraTable(Table):
    """Train a LoRA adapter (peft) and nothing else. Without this table all weights are trained."""

    rank: Count = Field(default=16, description="Rank of the adapter's matrices.")
    alpha: Number = Field(default=32.0, gt=0, description="Scale of the adapter: alpha / rank.")
    dropout: Number = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: str | tuple[str, ...] = Field(
        default="all-linear", description="Layers that get one: names, a regular expression, or `all-linear`."
    )
    adapter: str | None = Field(default=None, description="Directory of a saved adapter to go on with.")


class MeshTable(Table):
    """How many processes each dimension has; their product is the number of processes."""

    pp: Count = Field(default=1, description="Ranks of a pipeline.")
    dp_replicate: Count = Field(default=1, description="Copies of the model.")
    dp_shard: Count = Field(default=1, description="Processes that share the weights of a copy (FSDP2).")
    tp: Count = Field(default=1, description="Processes that share every layer (tensor parallelism).")
    sequence_parallel: Flag = Field(
        default=False, description="Share sequences over `tp` outside attention and MLP, too."
    )

    @property
    def num_pipelines(self) -> int:
        """How many pipelines have microbatches of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_processes(self) -> int:
        return self.pp * self.num_pipelines * self.tp

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions in the order of the DeviceMesh."""
        return {name: getattr(self, name) for name in ("pp", "dp_replicate", "dp_shard", "tp")}


class ScheduleTable(Table):
    """When each stage runs forward and backward, and which layers it has."""

    name: str = Field(default="1f1b", description="A schedule (`zeropipe list`), or a schedule file (.json, .csv).")
    stages_per_rank: Count | None = Field(
        default=None, description="Stages on each rank, if not the schedule's own number."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="Options of the schedule, like `group_size`.")
    layers: tuple[Index, ...] | None = Field(default=None, description="Layers of each stage.")
    layers_per_stage: Count | None = Field(default=None, description="Choose the stages per rank to get these layers.")
    first_less: Index = Field(default=0, description="Layers the first stage has less: it embeds.")
    last_less: Index = Field(default=0, description="Layers the last stage has less: it has the head and the loss.")
    balance: Literal["even", "time"] = Field(
        default="even",
        description="Spread layers `even`ly, or by `time`: the slowest rank is as fast as can be (by `costs`).",
    )
    costs: str | None = Field(
        default=None,
        description="Costs of the layers: a file of `zeropipe profile` or `estimate`, or the name of a GPU.",
    )
    gpus_per_node: Count = Field(default=8, description="GPUs of a machine, for predictions by `costs`.")


class EngineTable(Table):
    """How steps run. The other fields of `zeropipe.engine.Options` have their defaults."""

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="`auto`: a GPU where there is one.")
    compile: Flag = Field(default=False, description="Compile each transformer block (torch.compile).")
    ac: str = Field(
        default="none", description="Activation checkpointing: none, full, selective:N, selective:op, memory_budget:X."
    )
    split: Literal["store", "autograd", "whole"] = Field(default="store", description="How I and W share the backward.")
    dynamic_weights: Flag = Field(
        default=False, description="A rank that would wait for a message runs Ws that it owes."
    )
    direct_gradients: Flag = Field(
        default=False, description="Whole backwards add weight gradients straight to `.grad`."
    )
    shards: Literal["keep", "regather"] = Field(
        default="keep", description="Sharded weights: gathered once per step, or again for every microbatch."
    )
    offload: Flag = Field(default=False, description="Keep sharded weights and optimizer state in CPU memory.")
    timeout: Number = Field(
        default=600.0, gt=0, description="Seconds that a rank waits for another that does not get on."
    )


class DataTable(Table):
    """Where samples come from and how they become microbatches."""

    kind: Literal["text", "chat", "tokens", "datasets", "synthetic"] = Field(
        default="synthetic",
        description="`text`: files of text, a document each, or JSONL with a `text` field. `chat`: JSONL with "
        "`messages`, of which the answers have a loss. `tokens`: a memory-mapped file of token ids. `datasets`: a "
        "directory saved by the `datasets` library. `synthetic`: random tokens.",
    )
    path: str | tuple[str, ...] | None = Field(
        default=None, description="Files; patterns like `data/*.jsonl` are fine."
    )
    tokenizer: str | None = Field(
        default=None,
        description="Directory of the tokenizer, if not the model's; or `bytes`: each byte is a token, 256 the end.",
    )
    field: str = Field(default="text", description="The field of a JSONL line or a dataset's row that has the text.")
    sequence: Annotated[int, Field(ge=2, le=MOST, strict=True)] = Field(
        default=1024, description="Tokens per sequence, at most."
    )
    batch: Count = Field(default=8, description="Sequences per step, over all pipelines.")
    microbatch: Count = Field(default=1, description="Sequences per microbatch.")
    packing: Flag = Field(
        default=True,
        description="Fill sequences with several samples, which do not see each other. Else they are padded.",
    )
    shuffle: Flag = Field(default=True, description="Another order in every epoch, from `train.seed`.")


class EvaluationTable(Table):
    """Evaluation on held-out data: it has the kind, tokenizer and sequence of `data`."""

    path: str | tuple[str, ...] = Field(description="Files.")
    every: Count = Field(default=100, description="Steps between evaluations; there is one at the end, too.")
    batches: Count | None = Field(default=None, description="Batches to evaluate, if not all.")


class OptimizerTable(Table):
    """The optimizer."""

    name: Literal["adamw", "adam", "sgd", "adafactor"] = Field(default="adamw", description="One of torch's.")
    lr: Number = Field(default=1e-4, gt=0, description="Learning rate at its highest.")
    weight_decay: Number = Field(default=0.1, ge=0, description="Not applied to norms and biases.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="Of Adam.")
    eps: Number = Field(default=1e-8, gt=0, description="Of Adam.")
    momentum: Number = Field(default=0.0, ge=0, lt=1, description="Of SGD.")
    fused: Literal["auto", "yes", "no"] = Field(default="auto", description="Fused kernels where torch has them.")
    master_weights: Flag = Field(default=True, description="Weights in 16 bits are learned in float32.")
    clip: Number = Field(default=1.0, ge=0, description="Largest norm of the gradients; 0: not clipped.")


class RateTable(Table):
    """How the learning rate goes up and down."""

    shape: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine",
        description="After the warm-up. `wsd`: constant, then down over the last `decay` of the steps.",
    )
    warmup: Index = Field(default=0, description="Steps from 0 up to the learning rate.")
    final: Number = Field(default=0.1, ge=0, le=1, description="The rate at the end, as a part of the highest.")
    decay: Number = Field(
        default=0.2, gt=0, le=1, description="Of `wsd`: the part of the steps at the end with a falling rate."
    )


class TrainTable(Table):
    """The run."""

    output: str = Field(default="out", description="Folder of checkpoints, metrics and the report.")
    steps: Count | None = Field(default=None, description="Steps to train; or give `epochs`.")
    epochs: Number | None = Field(default=None, gt=0, description="Passes over the data; or give `steps`.")
    seed: Index = Field(default=0, description="Of the order of samples, of random weights and of dropout.")
    deterministic: Flag = Field(
        default=False, description="torch's deterministic algorithms: the same run twice, bit for bit."
    )
    max_skipped: Index = Field(
        default=10,
        description="Stop after so many steps in a row whose loss or gradients are not finite; each is left out.",
    )
    record_every: Index = Field(
        default=100, description="Measure the timeline of a step every so often, for the report; 0: never."
    )


class CheckpointTable(Table):
    """When to save, and what to keep."""

    every: Count | None = Field(default=None, description="Steps between checkpoints; there is one at the end, too.")
    minutes: Number | None = Field(default=None, gt=0, description="Minutes between checkpoints.")
    keep: Count = Field(default=2, description="Checkpoints to keep, the newest.")
    best: Flag = Field(default=True, description="Keep the one with the best evaluation, too.")
    asynchronous: Flag = Field(default=True, description="Write while training goes on.")
    resume: str = Field(
        default="auto",
        description="`auto`: go on from the newest checkpoint of `output`, if there is one; `never`; or a path.",
    )
    export: Flag = Field(
        default=True, description="At the end write a model directory (or a peft adapter) for transformers."
    )


class LogTable(Table):
    """What is told while it runs. `metrics.jsonl` is always written."""

    every: Count = Field(default=1, description="Steps between lines.")
    tensorboard: Flag = Field(default=False, description="Write TensorBoard files into `output`.")
    wandb: str | None = Field(default=None, description="Project of Weights & Biases to log to.")


class RunConfig(Table):
    """A whole training file."""

    model: ModelTable
    lora: LoraTable | None = None
    mesh: MeshTable = MeshTable()
    schedule: ScheduleTable = ScheduleTable()
    engine: EngineTable = EngineTable()
    data: DataTable = DataTable()
    evaluation: EvaluationTable | None = None
    optimizer: OptimizerTable = OptimizerTable()
    rate: RateTable = RateTable()
    train: TrainTable = TrainTable()
    checkpoint: CheckpointTable = CheckpointTable()
    log: LogTable = LogTable()

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each pipeline in a step."""
        return self.data.batch // (self.mesh.num_pipelines * self.data.microbatch)
