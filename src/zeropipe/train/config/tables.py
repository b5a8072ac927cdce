"""The tables and fields of a training file. Their descriptions are the text of docs/configuration.md."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from zeropipe.core.mesh import DIMENSIONS, EXPERTS

MAX_INTEGER = 10**9
BYTE_TOKENIZER = "bytes"  # value of data.tokenizer: one token per byte

# types of fields, each with its rule in words. Strict: numbers may be integers, but not true or "1"
Flag = Annotated[bool, Field(strict=True), "true or false"]
FlagOrAuto = Annotated[Annotated[bool, Field(strict=True)] | Literal["auto"], "true, false or auto"]
Count = Annotated[int, Field(strict=True, ge=1, le=MAX_INTEGER), "a positive integer"]
Index = Annotated[int, Field(strict=True, ge=0, le=MAX_INTEGER), "a non-negative integer"]
Length = Annotated[int, Field(strict=True, ge=2, le=MAX_INTEGER), "an integer of at least 2"]
Positive = Annotated[float, Field(strict=True, gt=0), "a positive number"]
NonNegative = Annotated[float, Field(strict=True, ge=0), "a non-negative number"]
BelowOne = Annotated[float, Field(strict=True, ge=0, lt=1), "a number of at least 0 and below 1"]
UpToOne = Annotated[float, Field(strict=True, ge=0, le=1), "a number from 0 to 1"]
Fraction = Annotated[float, Field(strict=True, gt=0, le=1), "a number above 0 and at most 1"]
Betas = Annotated[tuple[BelowOne, BelowOne], "2 numbers of at least 0 and below 1"]
Layers = Annotated[tuple[Index, ...], "a list of non-negative integers, like [2, 3, 3, 2]"]
Sizes = Annotated[tuple[Positive, ...], "a list of positive numbers, like [5, 3]"]
Options = Annotated[dict[str, Any], "a table, like {group_size = 4}"]
Strings = Annotated[str | tuple[str, ...], "a string or a list of strings"]
Dtype = Literal["float32", "bfloat16", "float64"]


class Table(BaseModel):
    """A table of the file. Unknown fields are errors, and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelTable(Table):
    """The model to train."""

    path: str = Field(description="A model directory, a config.json, or a built-in model: tiny-qwen3, qwen3-0.6b, ...")
    weights: Literal["load", "random"] = Field(
        default="load",
        description="`load` the weights of the directory, or initialize `random` ones from `train.seed` (pretraining).",
    )
    dtype: Dtype = Field(default="float32", description="Data type of weights and activations in computation.")
    num_layers: Count | None = Field(default=None, description="Number of layers of a built-in model.")
    vocabulary: Count | None = Field(default=None, description="Vocabulary size of a built-in model.")


class LoraTable(Table):
    """Train a LoRA adapter (peft) and freeze the model. Without this table all weights are trained."""

    rank: Count = Field(default=16, description="Rank of the adapter's matrices.")
    alpha: Positive = Field(default=32.0, description="Scale of the adapter: alpha / rank.")
    dropout: BelowOne = Field(default=0.0, description="Dropout on the adapter's input.")
    target_modules: Strings = Field(
        default="all-linear", description="Layers with an adapter: names, a regular expression, or `all-linear`."
    )
    adapter: str | None = Field(default=None, description="Directory of a saved adapter to continue training.")


class ExpertsTable(Table):
    """Training of a mixture of experts."""

    balance_rate: NonNegative = Field(
        default=0.0,
        description="After each step, add this to the router bias of experts with fewer tokens than the mean, and "
        "subtract it from that of the others: balances models like DeepSeek-V3, which use 0.001. 0: biases stay.",
    )


class MeshTable(Table):
    """Sizes of the mesh dimensions. Their product, without `ep`, is the number of processes."""

    pp: Count = Field(default=1, description="Pipeline ranks.")
    dp_replicate: Count = Field(default=1, description="Replicas of the model (data parallelism).")
    dp_shard: Count = Field(default=1, description="Processes that shard the weights of a replica (FSDP2).")
    cp: Count = Field(default=1, description="Processes that have a part of every sequence (context parallelism).")
    tp: Count = Field(default=1, description="Processes that shard every layer (tensor parallelism).")
    shard_cp: Flag = Field(default=False, description="Shard weights over `dp_shard` and `cp` together.")
    cp_exchange: Literal["auto", "heads", "gather", "ring"] = Field(
        default="auto",
        description="What processes of `cp` exchange in attention: `heads` for tokens, or keys and values, which are "
        "gathered (`gather`) or passed round a ring (`ring`). `auto`: heads if they divide, else a ring for long "
        "sequences, else gather.",
    )
    ep: Count = Field(
        default=1,
        description="Processes of `dp_shard` (without it, `dp_replicate`) that the experts of layers are divided over.",
    )
    dispatch: Literal["expert", "process"] = Field(
        default="expert",
        description="With `ep`, send a token once for each `expert` of it, or once to each `process` that has some.",
    )
    sequence_parallel: Flag = Field(
        default=False, description="Also shard sequences over `tp` outside attention and MLP."
    )

    @property
    def num_pipelines(self) -> int:
        """The number of pipelines, each with its own microbatches."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_shards(self) -> int:
        """The number of processes that weights are sharded over."""
        return self.dp_shard * (self.cp if self.shard_cp else 1)

    @property
    def num_processes(self) -> int:
        return self.pp * self.num_pipelines * self.cp * self.tp

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the dimensions, in the order of the DeviceMesh; then ep, if experts are divided."""
        return {name: getattr(self, name) for name in (*DIMENSIONS, *([EXPERTS] if self.ep > 1 else []))}


class ScheduleTable(Table):
    """The order of forward and backward passes, and the layers of each stage."""

    name: str = Field(
        default="1f1b", description="A built-in schedule (`zeropipe list`), or a schedule file (.json, .csv)."
    )
    stages_per_rank: Count | None = Field(
        default=None, description="Stages on each rank. Default: that of the schedule."
    )
    slices: Count = Field(
        default=1,
        description="Slices of the sequences of each microbatch, for schedules that have them, like `seq1f1b`.",
    )
    slice_sizes: Sizes | None = Field(
        default=None, description="Tokens of each slice, or numbers in their ratio. Default: equal ones."
    )
    options: Options = Field(default_factory=dict, description="Options of the schedule, like `group_size`.")
    layers: Layers | None = Field(default=None, description="Number of layers of each stage.")
    layers_per_stage: Count | None = Field(
        default=None, description="Layers of each stage, instead of `stages_per_rank`."
    )
    first_less: Index = Field(
        default=0, description="Number of layers fewer on the first stage, which holds the embedding."
    )
    last_less: Index = Field(
        default=0, description="Number of layers fewer on the last stage, which holds the head and the loss."
    )
    balance: Literal["even", "time"] = Field(
        default="even",
        description="Distribute layers `even`ly, or by `time`: minimize the time of the slowest rank (needs `costs`).",
    )
    costs: str | None = Field(
        default=None,
        description="Costs of layers: a file of `zeropipe profile` or `estimate`, or a GPU to estimate for, like h100.",
    )
    gpus_per_node: Count = Field(default=8, description="GPUs of a machine, for predictions from `costs`.")
    offload: float | str | None = Field(
        default=None,
        description="Copy activations to the host and back: `auto` (all that take no time by `costs` and "
        "lower a peak), `fit` (as few as it takes to fit into the GPU), or a share from 0 to 1.",
    )
    checkpointing: Literal["fit"] | None = Field(
        default=None,
        description="`fit`: checkpoint the F of as few microbatches as it takes to fit into the GPU, by `costs`; with "
        "`engine.ac` = `none`.",
    )


class EngineTable(Table):
    """Options of the engine. Those of `zeropipe.engine.Options` that are not here have their defaults."""

    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="`auto`: a GPU if there is one.")
    compile: FlagOrAuto = Field(
        default="auto",
        description="Compile each transformer block (torch.compile). `auto`: on a GPU in 16 bits, unless another field "
        "rules it out.",
    )
    ac: str = Field(
        default="none", description="Activation checkpointing: none, full, selective:N, selective:op, memory_budget:X."
    )
    attention: Literal["auto", "sdpa", "flex", "varlen", "flash"] = Field(
        default="auto",
        description="How packed rows attend. `sdpa`: with a dense mask. `flex`: blocks of torch's flex_attention. "
        "`varlen`: torch's variable-length attention. `flash`: the package flash-attn. `auto`: on a GPU in 16 bits the "
        "faster of `flex` and `varlen`, else `sdpa`.",
    )
    split: Literal["store", "whole"] = Field(default="store", description="How the backward is split into I and W.")
    dynamic_weights: Flag = Field(
        default=False, description="While waiting for a message, run pending weight gradients (W)."
    )
    overlap: Literal["streams", "turns"] = Field(
        default="streams",
        description="How F and B of an Overlap run together: on two `streams` of a GPU, or in `turns` at every "
        "exchange of experts or of tp.",
    )
    direct_gradients: Flag | None = Field(
        default=None,
        description="Full backwards (B), too, add weight gradients directly to `.grad`. Default: on a GPU.",
    )
    fused_head: Flag = Field(
        default=True,
        description="Compute the loss in chunks of tokens, so that logits are never whole in memory.",
    )
    float8: Literal["none", "tensor", "row"] = Field(
        default="none",
        description="Compute the linear layers of blocks in float8, with a scale for each `tensor` or each `row`.",
    )
    shards: Literal["keep", "regather"] = Field(
        default="keep", description="Gather sharded weights once per step, or again for every microbatch."
    )
    gradients: str = Field(
        default="whole",
        description="Reduce gradients of sharded stages once per step (`whole`), after every microbatch (`rolling`), "
        "or so often that at most N stages of a rank have whole ones (`rolling:N`).",
    )
    offload: Flag = Field(default=False, description="Keep sharded weights and optimizer state in CPU memory.")
    timeout: Positive = Field(default=600.0, description="Seconds without progress before a run is aborted.")


class DataTable(Table):
    """The samples, and how they are made into microbatches."""

    kind: Literal["text", "chat", "tokens", "datasets", "synthetic"] = Field(
        default="synthetic",
        description="`text`: text files, one document each, or JSONL with a `text` field. `chat`: chats as "
        "`messages`, ShareGPT, Alpaca or pairs; only answers have a loss. `tokens`: memory-mapped files of token ids. "
        "`datasets`: folders saved by the `datasets` library. `synthetic`: random tokens. "
        "Default: that of the files in `path`; `synthetic` without a path.",
    )
    path: Strings | None = Field(default=None, description="Files, or patterns like `data/*.jsonl`.")
    tokenizer: str | None = Field(
        default=None,
        description="Directory of the tokenizer, or `bytes`: each byte is a token, 256 the end. Default: the model's.",
    )
    field: str = Field(
        default="text", description="The field of a JSONL line, or the column of a dataset, with the text."
    )
    sequence: Length = Field(default=1024, description="Maximum number of tokens of a sequence.")
    batch: Count = Field(default=8, description="Sequences per step, over all pipelines.")
    microbatch: Count = Field(default=1, description="Sequences per microbatch.")
    packing: Flag = Field(
        default=True,
        description="Pack several samples into a sequence, without attention between them. Else samples are padded.",
    )
    shuffle: Flag = Field(default=True, description="Shuffle in every epoch, from `train.seed`.")


class EvaluationTable(Table):
    """Evaluation on held-out data, with the kind, tokenizer and sequence of `data`."""

    path: Strings = Field(description="Files, or patterns.")
    every: Count = Field(default=100, description="Steps between evaluations. There is also one at the end.")
    batches: Count | None = Field(default=None, description="Batches to evaluate. Default: all.")


class OptimizerTable(Table):
    """The optimizer."""

    name: Literal["adamw", "adam", "sgd", "adafactor"] = Field(default="adamw", description="An optimizer of torch.")
    lr: Positive = Field(default=1e-4, description="Peak learning rate.")
    weight_decay: NonNegative = Field(default=0.1, description="Weight decay, not applied to norms and biases.")
    betas: Betas = Field(default=(0.9, 0.95), description="Betas of Adam.")
    eps: Positive = Field(default=1e-8, description="Epsilon of Adam.")
    momentum: BelowOne = Field(default=0.0, description="Momentum of SGD.")
    fused: Literal["auto", "yes", "no"] = Field(
        default="auto", description="Use fused kernels. `auto`: on GPUs, where torch has them."
    )
    master_weights: Flag = Field(default=True, description="Keep float32 master weights for 16-bit parameters.")
    clip: NonNegative = Field(default=1.0, description="Maximum norm of gradients. 0: no clipping.")


class RateTable(Table):
    """The learning-rate schedule."""

    shape: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="cosine",
        description="Decay after the warm-up. `wsd`: constant, then linear over the last `decay` of the steps.",
    )
    warmup: Index = Field(default=0, description="Steps of linear warm-up.")
    final: UpToOne = Field(default=0.1, description="Learning rate at the end, as a fraction of the peak.")
    decay: Fraction = Field(default=0.2, description="Fraction of the steps in which `wsd` decays.")


class TrainTable(Table):
    """The run."""

    output: str = Field(default="out", description="Folder for checkpoints, metrics and the report.")
    steps: Count | None = Field(default=None, description="Steps to train. Use this or `epochs`.")
    epochs: Positive | None = Field(default=None, description="Passes over the data. Use this or `steps`.")
    seed: Index = Field(default=0, description="Seed of the order of samples, random weights and dropout.")
    deterministic: Flag = Field(
        default=False, description="Use torch's deterministic algorithms, so that runs are reproducible bit for bit."
    )
    max_skipped: Index = Field(
        default=10,
        description="Maximum number of consecutive steps that are skipped because loss or gradients are not finite.",
    )
    record_every: Index = Field(default=100, description="Steps between recorded timelines, for the report. 0: none.")


class CheckpointTable(Table):
    """When to save checkpoints, and which to keep."""

    every: Count | None = Field(default=None, description="Steps between checkpoints. There is also one at the end.")
    minutes: Positive | None = Field(default=None, description="Minutes between checkpoints.")
    keep: Count = Field(default=2, description="Number of newest checkpoints to keep.")
    best: Flag = Field(default=True, description="Also keep the checkpoint with the best evaluation.")
    asynchronous: Flag = Field(default=True, description="Write checkpoints while training continues.")
    resume: str = Field(
        default="auto",
        description="`auto`: resume from the newest checkpoint in `output`, if any. `never`: start anew. Or a path.",
    )
    export: Flag = Field(
        default=True, description="At the end, write a model directory for transformers (or an adapter for peft)."
    )


class LogTable(Table):
    """Logging. `metrics.jsonl` is always written."""

    every: Count = Field(default=1, description="Steps between progress lines.")
    tensorboard: Flag = Field(default=False, description="Write TensorBoard files to `output`.")
    wandb: str | None = Field(default=None, description="Weights & Biases project to log to.")


class RunConfig(Table):
    """A training file."""

    model: ModelTable
    lora: LoraTable | None = None
    mesh: MeshTable = MeshTable()
    experts: ExpertsTable = ExpertsTable()
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
        """Microbatches of one pipeline in a step."""
        return self.data.batch // (self.mesh.num_pipelines * self.data.microbatch)
