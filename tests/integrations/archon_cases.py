"""What the local ranks run in test_archon.py: Archon's engine methods, models and runners, with and without us."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from areal.api.cli_args import ArchonEngineConfig, MicroBatchSpec, TrainEngineConfig
from areal.experimental.engine import archon_runner, archon_utils
from areal.experimental.engine.archon_engine import ArchonEngine
from areal.experimental.models.archon import ArchonParallelDims, get_model_spec
from areal.utils import data, logging
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.nn import functional

from zeropipe.integrations import archon as ours

data.N_TOKENS_PER_PAGE = 2  # Archon pads every microbatch to whole pages, usually of 256 tokens

VOCABULARY = 96
ARGS = {"dim": 32, "n_layers": 6, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCABULARY, "head_dim": 8}
LENGTHS = (5, 9, 3, 12, 7, 4, 10, 6)
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


class Case(NamedTuple):
    """What is trained, and how."""

    model: str
    schedule: str
    compile: bool = False
    ac: str | None = None  # "op": selective by operation, "full", "budget"
    shards: int = 1
    tensor: int = 1
    pad: bool = False  # every microbatch to the longest that is allowed


class Seen(NamedTuple):
    """Losses (where the last stage is) and this rank's gradients, by name."""

    losses: list[float]
    evaluated: list[float]
    gradients: dict[str, Tensor]


def model_of(name: str, device: str = "cpu") -> nn.Module:
    """Archon's model, with the same weights wherever it is made."""
    spec = get_model_spec(name)
    with torch.device(device):
        model = spec.model_class(spec.model_args_class(**ARGS, hidden_dim=64, max_seq_len=128, attn_type="sdpa"))
    if device != "meta":
        torch.manual_seed(0)
        with torch.no_grad():
            model.init_weights()
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))  # some begin as ones or zeros
        model.init_buffers("cpu")
    return model


def config_of(case: Case) -> Any:
    wish = {
        None: {},
        "op": {"ac_mode": "selective", "selective_ac_option": "op"},
        "full": {"ac_mode": "full"},
        "budget": {"ac_mode": "memory_budget", "ac_memory_budget": 0.5},
    }[case.ac]
    archon = ArchonEngineConfig(pp_schedule=case.schedule, enable_compile=case.compile, attn_type="sdpa", **wish)
    return TrainEngineConfig(
        experiment_name="x", trial_name="y", archon=archon, gradient_checkpointing=case.ac is not None,
        pad_to_maximum=case.pad,
        mb_spec=MicroBatchSpec(n_mbs=4, max_tokens_per_mb=24),
    )  # fmt: skip


def engine_of(case: Case, ranks: int) -> ArchonEngine:
    """An ArchonEngine as its own methods leave it, without what needs files, a tokenizer and GPUs."""
    engine = ArchonEngine.__new__(ArchonEngine)
    engine.config, engine.enable_tree_training = config_of(case), False
    engine.logger, engine.device, engine.param_dtype = logging.getLogger("test"), torch.device("cpu"), torch.float32
    engine.rank, engine.spec = dist.get_rank(), get_model_spec(case.model)
    # a large page: microbatches are aligned to one token
    engine.model_config = SimpleNamespace(hidden_size=1 << 20, model_type=case.model, tie_word_embeddings=False)
    engine.pp_has_first_stage = engine.pp_has_last_stage = True
    tensor = case.tensor if ranks > 1 else 1
    shards = dist.get_world_size() // (ranks * tensor)
    engine.parallel_dims = dims = ArchonParallelDims(
        pp=ranks, dp_shard=shards, tp=tensor, world_size=dist.get_world_size(), device_type="cpu"
    )
    dims.build_mesh()
    if ranks == 1:
        return engine
    engine.model = model_of(case.model, "meta")
    ac_config, compiled = archon_utils.prepare_training_config(
        engine.config, dims, engine.model_config, False, engine.logger
    )
    engine.ac_config, engine.compiled = ac_config, compiled
    engine._apply_pipeline_parallelism(ac_config, compiled)
    whole = dict(model_of(case.model).named_parameters())
    for part in engine.model_parts:
        part.to_empty(device="cpu")
        part.init_buffers("cpu")
        for name, parameter in part.named_parameters():
            local(parameter).data.copy_(piece(whole[plain(name)].detach(), parameter))
    return engine


def plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def local(parameter: Any) -> Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def piece(whole: Tensor, parameter: Any) -> Tensor:
    """The part of a tensor that this process holds of a parameter."""
    if not hasattr(parameter, "to_local"):
        return whole
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements).to_local()


def batch() -> dict[str, Tensor]:
    """Sequences of different lengths, padded as Archon gets them."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = torch.randint(1, VOCABULARY, (length,), generator=generator)
        mask[row, :length] = True
    return {"input_ids": ids, "attention_mask": mask}


def loss(logits: Tensor, context: dict[str, Any]) -> Tensor:
    """Of the tokens that are no padding; the last one has no label."""
    logits = logits if WHOLE[0] is None else _Joined.apply(logits)
    length = logits.shape[0] - context["pad_length"] - 1
    return functional.cross_entropy(logits[:length], context["labels"][:length], reduction="sum")


class _Joined(torch.autograd.Function):
    """Logits of which every process of the group has a part of the vocabulary; all of them compute the same loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        parts = [torch.empty_like(logits) for _ in range(WHOLE[0].size())]
        dist.all_gather(parts, logits.contiguous(), WHOLE[0])
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.chunk(WHOLE[0].size(), -1)[WHOLE[0].rank()]


class Losses:
    """The loss, remembered."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, logits: Tensor, context: dict[str, Any]) -> Tensor:
        value = loss(logits, context)
        self.seen.append(float(value.detach()))
        return value


def run(case: Case, steps: int = 1) -> Seen:
    """Evaluation, some training steps that add up gradients, evaluation again: by Archon's own runner."""
    engine = engine_of(case, dist.get_world_size() // (case.shards * case.tensor))
    WHOLE[0] = engine.parallel_dims.get_group("tp") if case.tensor > 1 else None
    runner = archon_runner.create_runner(
        pp_enabled=True,
        model_parts=engine.model_parts,
        prepare_inputs_fn=engine._prepare_pipelined_mb_inputs,
        pp_stages=engine.pp_stages,
        pp_schedule=case.schedule,
        pp_group_size=engine.parallel_dims.pp,
        has_first_stage=engine.pp_has_first_stage,
        has_last_stage=engine.pp_has_last_stage,
    )
    losses = Losses()
    with torch.no_grad():
        evaluated = runner.run(engine._prepare_mb_list(batch()), loss, forward_only=True) if EVALUATES[0] else None
    for _ in range(steps):
        runner.run(engine._prepare_mb_list(batch()), losses, forward_only=False)
    if EVALUATES[0]:
        with torch.no_grad():
            again = runner.run(engine._prepare_mb_list(batch()), loss, forward_only=True)
        assert (again is None) == (evaluated is None)
        assert again is None or [float(a) for a in again] == [float(a) for a in evaluated]
        assert (evaluated is not None) == (engine._pp_last_stage_rank == dist.get_rank())
    gradients = {}
    for part in engine.model_parts:
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            gradients[plain(name)] = whole_of(parameter.grad)
    return Seen(losses.seen[-4:], [float(value) for value in evaluated or ()], gradients)


EVALUATES = [True]
WHOLE: list[Any] = [None]  # the group that shares logits


def whole_of(gradient: Any) -> Tensor:
    return gradient.full_tensor().clone() if hasattr(gradient, "full_tensor") else gradient.clone()


def sequential(case: Case, steps: int = 1) -> Seen:
    """Archon without pipelines: its SequentialRunner on the whole model."""
    engine = engine_of(case._replace(compile=False, ac=None), 1)
    WHOLE[0] = None
    model, losses = model_of(case.model), Losses()
    runner = archon_runner.create_runner(
        pp_enabled=False, model_parts=[model], prepare_inputs_fn=engine._prepare_mb_inputs
    )
    engine.config.mb_spec = MicroBatchSpec(n_mbs=4, max_tokens_per_mb=24)
    with torch.no_grad():
        evaluated = runner.run(engine._prepare_mb_list(batch()), loss, forward_only=True)
    for _ in range(steps):
        runner.run(engine._prepare_mb_list(batch()), losses, forward_only=False)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return Seen(losses.seen[-4:], [float(value) for value in evaluated], gradients)


def gap(mine: Seen, theirs: Seen) -> float:
    """The largest difference of a loss or a gradient, relative to the largest entry."""
    worst = 0.0
    for one, other in ((mine.losses, theirs.losses), (mine.evaluated, theirs.evaluated)):
        for a, b in zip(one, other, strict=True) if one else ():
            worst = max(worst, abs(a - b) / abs(b))
    assert mine.gradients
    for name, gradient in mine.gradients.items():
        wanted = theirs.gradients[name]
        worst = max(worst, float((gradient - wanted).abs().max() / wanted.abs().max()))
    return worst


def installed(function: Any, *args: Any) -> Any:
    ours.install()
    try:
        return function(*args)
    finally:
        ours.uninstall()


def beside_sequential(case: Case) -> float:
    """Our run against Archon's model without any pipeline; nothing is padded."""
    mine = installed(run, case)
    return gap(mine, sequential(case))


def beside_archon(case: Case) -> float:
    """Our run against Archon's own, which pads."""
    mine = installed(run, case._replace(pad=True))._replace(evaluated=[])
    return gap(mine, by_archon(case))


def embedding_alone(case: Case) -> float | None:
    """The norm of the embedding's gradient where Archon runs without us; None where it is on another rank."""
    gradient = by_archon(case).gradients.get("tok_embeddings.weight")
    return None if gradient is None else float(gradient.norm())


def by_archon(case: Case) -> Seen:
    """Archon's own run. Without us it trains, on this torch, only after the mend below."""
    create = archon_runner.PipelinedRunner._create_loss_fn

    def with_spare(self: Any, contexts: list[Any], process: Any) -> Any:
        # torch 2.13 calls the loss once more while it finds out shapes
        return create(self, [contexts[0], *contexts], process)

    archon_runner.PipelinedRunner._create_loss_fn = with_spare
    EVALUATES[0] = False  # torch's V schedules cannot
    try:
        return run(case)
    finally:
        archon_runner.PipelinedRunner._create_loss_fn = create
        EVALUATES[0] = True


def alone(case: Case) -> None:
    """Archon without us."""
    run(case)


def kept(case: Case) -> tuple[bool, str, bool, bool]:
    """What Archon makes of a config: (compile, checkpointing mode, pad to maximum, rank of the last stage is 0)."""
    engine = engine_of(case, dist.get_world_size())
    return engine.compiled, engine.ac_config.mode, engine.config.pad_to_maximum, engine._pp_last_stage_rank == 0


def kept_by_us(case: Case) -> tuple[bool, str, bool, bool]:
    return installed(kept, case)


def lengths() -> tuple[list[int], list[int]]:
    """The lengths of microbatches with us and without."""

    def look() -> list[int]:
        engine = engine_of(Case("qwen3", "1F1B"), dist.get_world_size())
        return [item.padded_mb["input_ids"].shape[-1] for item in engine._prepare_mb_list(batch())]

    return installed(look), look()
