"""What the local ranks run in test_archon.py: Archon's engine methods, models and runners, with and without us."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from areal.api.cli_args import ArchonEngineConfig, MicroBatchSpec, TrainEngineConfig
from areal.experimental.engine import archon_runner, archon_utils
from areal.experimental.engine.archon_engine import ArchonEngine
from areal.experimental.models.archon import ArchonParallelDims, get_model_spec
from areal.experimental.models.archon.moe import GroupedExperts, MoEArgs, grouped_experts
from areal.experimental.models.archon.moe import utils as exchange
from areal.experimental.models.archon.moe.kernels import generate_permute_indices
from areal.experimental.models.archon.moe.router import RouterGateLinear
from areal.utils import data, logging
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import functional

from zeropipe.engine.backward.linear import find_deferred
from zeropipe.integrations import archon as ours
from zeropipe.integrations import experts

data.N_TOKENS_PER_PAGE = 2  # Archon pads every microbatch to whole pages, usually of 256 tokens

VOCABULARY = 96
ARGS = {"dim": 32, "n_layers": 6, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCABULARY, "head_dim": 8}
EXPERTS = {"moe_enabled": True, "moe_inter_dim": 16}
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
    experts: int = 1
    context: int = 1
    grouped: bool = False  # one product for all experts, as on GPUs
    pad: bool = False  # every microbatch to the longest that is allowed

    @property
    def are_experts_sharded(self) -> bool:
        return self.shards * self.context > self.experts


class Seen(NamedTuple):
    """Losses (where the last stage is) and this rank's gradients, by name."""

    losses: list[float]
    evaluated: list[float]
    gradients: dict[str, Tensor]
    tokens: dict[str, Tensor]  # that each expert has got


@contextmanager
def stand_ins() -> Iterator[None]:
    """What Archon's experts need a GPU for: histograms of integers, and a kernel of Triton's that sorts tokens.

    Areal has a function for a CPU beside that kernel. On a GPU its experts round to bfloat16: here they do not, so
    that sums can be compared. Archon compiles the function of all experts for the whole process: not for the next case.
    """
    sort = partial(generate_permute_indices, use_cpu=True)
    with (
        mock.patch.object(torch, "histc", histogram),
        mock.patch.object(exchange, "generate_permute_indices", sort),
        mock.patch.object(Tensor, "bfloat16", lambda self: self),
        mock.patch.object(experts, "COMPUTE_DTYPE", torch.float32),
        mock.patch.object(grouped_experts, "_run_experts_grouped_mm", grouped_experts._run_experts_grouped_mm),
    ):
        yield


def histogram(values: Tensor, bins: int, min: int, max: int) -> Tensor:
    return torch.zeros(bins, dtype=values.dtype).scatter_add(0, values, torch.ones_like(values))


def model_of(case: Case, device: str = "cpu") -> nn.Module:
    """Archon's model, with the same weights wherever it is made."""
    spec, more = get_model_spec(case.model), {}
    if case.model == "qwen3_moe":
        more = EXPERTS | {"moe_args": MoEArgs(num_experts=4, top_k=2, score_func="softmax", route_norm=True)}
    with torch.device(device):
        args = spec.model_args_class(**ARGS, **more, hidden_dim=64, max_seq_len=128, attn_type="sdpa")
        model = spec.model_class(args)
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.use_grouped_mm = case.grouped
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
    context = case.context if ranks > 1 else 1
    engine.parallel_dims = dims = ArchonParallelDims(
        pp=ranks,
        dp_shard=dist.get_world_size() // (ranks * tensor * context),
        cp=context,
        tp=tensor,
        ep=case.experts if ranks > 1 else 1,
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    dims.build_mesh()
    if ranks == 1:
        return engine
    engine.model = model_of(case, "meta")
    ac_config, compiled = archon_utils.prepare_training_config(
        engine.config, dims, engine.model_config, False, engine.logger
    )
    engine.ac_config, engine.compiled = ac_config, compiled
    engine._apply_pipeline_parallelism(ac_config, compiled)
    whole = dict(model_of(case).named_parameters())
    for part in engine.model_parts:
        for module in part.modules():
            if isinstance(module, FSDPModule) and isinstance(module, GroupedExperts) and case.are_experts_sharded:
                module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
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
    shape, start = compute_local_shape_and_global_offset(whole.shape, parameter.device_mesh, parameter.placements)
    return whole[tuple(slice(first, first + size) for first, size in zip(start, shape))]


def batch(shard: int = 0) -> dict[str, Tensor]:
    """Sequences of different lengths, padded as Archon gets them."""
    generator = torch.Generator().manual_seed(7 + shard)
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, length in enumerate(LENGTHS[shard:] + LENGTHS[:shard]):
        ids[row, :length] = torch.randint(1, VOCABULARY, (length,), generator=generator)
        mask[row, :length] = True
    return {"input_ids": ids, "attention_mask": mask}


def loss(logits: Tensor, context: dict[str, Any]) -> Tensor:
    """Of the tokens that are no padding; the last one has no label."""
    logits = logits if WHOLE[0] is None else _Joined.apply(logits)
    losses = functional.cross_entropy(logits, context["labels"], reduction="none")
    losses = losses if SEQUENCE[0] is None else _Gathered.apply(losses)
    return losses[: len(losses) - context["pad_length"] - 1].sum()


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


class _Gathered(torch.autograd.Function):
    """As Archon's `ulysses_gather_output`, whose backward torch has for gloo in the first ranks' group only."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:
        parts = [torch.empty_like(losses) for _ in range(SEQUENCE[0].size())]
        dist.all_gather(parts, losses, SEQUENCE[0])
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=SEQUENCE[0])
        return total.chunk(SEQUENCE[0].size())[SEQUENCE[0].rank()]


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
    with stand_ins():
        return _run(case, steps)


def _run(case: Case, steps: int) -> Seen:
    engine = engine_of(case, dist.get_world_size() // (case.shards * case.tensor * case.context))
    WHOLE[0] = engine.parallel_dims.get_group("tp") if case.tensor > 1 else None
    SEQUENCE[0] = engine.parallel_dims.get_group("cp") if case.context > 1 else None
    own = batch(shard_of(case))
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
        evaluated = runner.run(engine._prepare_mb_list(own), loss, forward_only=True) if EVALUATES[0] else None
    for _ in range(steps):
        runner.run(engine._prepare_mb_list(own), losses, forward_only=False)
    if EVALUATES[0]:
        with torch.no_grad():
            again = runner.run(engine._prepare_mb_list(own), loss, forward_only=True)
        assert (again is None) == (evaluated is None)
        assert again is None or [float(a) for a in again] == [float(a) for a in evaluated]
        assert (evaluated is not None) == (engine._pp_last_stage_rank == dist.get_rank())
    gradients = {}
    for part in engine.model_parts:
        for name, parameter in part.named_parameters():
            assert parameter.grad is not None, f"{name} has no gradient"
            gradients[plain(name)] = whole_of(parameter.grad)
    return Seen(
        losses.seen[-4:], [float(value) for value in evaluated or ()], gradients, counted(case, engine.model_parts)
    )


def shard_of(case: Case) -> int:
    return dist.get_rank() // (case.tensor * case.context) % case.shards


def counted(case: Case, parts: list[nn.Module]) -> dict[str, Tensor]:
    """Where nothing else counts tokens again: checkpointing and torch's own pipeline do, and padding counts, too."""
    if case.ac is not None or case.tensor * case.context > 1 or case.compile or not EVALUATES[0]:
        return {}
    found = {plain(name): b.clone() for part in parts for name, b in part.named_buffers() if "tokens_per" in name}
    assert found or case.model != "qwen3_moe"
    return found


EVALUATES = [True]
WHOLE: list[Any] = [None]  # the group that shares logits
SEQUENCE: list[Any] = [None]  # the group that shares sequences


def whole_of(gradient: Any) -> Tensor:
    return gradient.full_tensor().clone() if hasattr(gradient, "full_tensor") else gradient.clone()


def sequential(case: Case, steps: int = 1) -> Seen:
    """Archon without pipelines: its SequentialRunner on the whole model, with the batch of each shard."""
    with stand_ins():
        return _sequential(case, steps)


def _sequential(case: Case, steps: int) -> Seen:
    engine = engine_of(case._replace(compile=False, ac=None), 1)
    WHOLE[0] = SEQUENCE[0] = None
    model, seen = model_of(case), None
    runner = archon_runner.create_runner(
        pp_enabled=False, model_parts=[model], prepare_inputs_fn=engine._prepare_mb_inputs
    )
    engine.config.mb_spec = MicroBatchSpec(n_mbs=4, max_tokens_per_mb=24)
    for shard in range(case.shards):
        own, losses, before = batch(shard), Losses(), counted(case, [model])
        with torch.no_grad():
            evaluated = runner.run(engine._prepare_mb_list(own), loss, forward_only=True)
        for _ in range(steps):
            runner.run(engine._prepare_mb_list(own), losses, forward_only=False)
        with torch.no_grad():
            runner.run(engine._prepare_mb_list(own), loss, forward_only=True)
        if shard == shard_of(case):
            tokens = {name: count - before[name] for name, count in counted(case, [model]).items()}
            seen = Seen(losses.seen[-4:], [float(value) for value in evaluated], {}, tokens)
    assert seen is not None
    return seen._replace(gradients={name: p.grad / case.shards for name, p in model.named_parameters()})


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
    for name in mine.tokens.keys() & theirs.tokens.keys():
        assert torch.equal(mine.tokens[name], theirs.tokens[name]), name
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
    return gap(*both(case))


def both(case: Case) -> tuple[Seen, Seen]:
    """Our run and Archon's."""
    mine = installed(run, case._replace(pad=True))._replace(evaluated=[])
    return mine, by_archon(case)


def experts_beside_archon(case: Case) -> tuple[float, float]:
    """The same for weights of experts, and for all others."""
    mine, theirs = both(case)

    def some(experts: bool) -> Seen:
        return mine._replace(gradients={n: g for n, g in mine.gradients.items() if (".experts." in n) == experts})

    return gap(some(True), theirs), gap(some(False), theirs)


def deferred(case: Case) -> tuple[int, int]:
    """How many linear layers and stacks of experts leave their weight gradients to W, of how many.

    The router's own linear layers do not.
    """
    with stand_ins():
        engine = installed(engine_of, case, dist.get_world_size() // (case.shards * case.tensor * case.context))
    modules = [module for part in engine.model_parts for module in part.modules()]
    layers = [m for m in modules if isinstance(m, nn.Linear | GroupedExperts) and not isinstance(m, RouterGateLinear)]
    return sum(len(find_deferred(part)) for part in engine.model_parts), len(layers)


def embedding_alone(case: Case) -> float | None:
    """The norm of the embedding's gradient where Archon runs without us; None where it is on another rank."""
    gradient = by_archon(case).gradients.get("tok_embeddings.weight")
    return None if gradient is None else float(gradient.norm())


def routers_alone(case: Case) -> list[float]:
    """The norms of the routers' gradients where Archon runs without us."""
    return [float(g.norm()) for name, g in by_archon(case).gradients.items() if "router" in name]


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
