"""What the local ranks run in test_torchtitan.py: torchtitan's debug models under its own runtime and under ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torchtitan.tools.utils
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.experimental._context_parallel import _attention as sequences
from torch.nn.attention import flex_attention

torchtitan.tools.utils.device_type = "cpu"  # read by what is imported next

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, pipeline_parallel, utils  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.distributed.context_parallel import prepare_context_parallel_input  # noqa: E402
from torchtitan.models import deepseek_v3, llama3, qwen3  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402
from torchtitan.models.common.moe import GroupedExperts  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from zeropipe.engine.backward.linear import find_deferred  # noqa: E402
from zeropipe.integrations import experts  # noqa: E402
from zeropipe.integrations import torchtitan as ours  # noqa: E402

MODELS = {"llama3": llama3, "qwen3": qwen3, "qwen3_moe": qwen3, "deepseek_v3": deepseek_v3}
FEW = {"num_experts": 8, "top_k": 2, "moe_hidden_dim": 64}  # qwen3's debug model has more than a small machine can hold
CHECKPOINTING = {None: None, "full": FullAC.Config, "selective": SelectiveAC.Config}
LENGTH, VOCABULARY = 16, 2048
BLOCK = 8  # of attention masks; torch's own are longer than these sequences


class Case(NamedTuple):
    """What is trained, and how."""

    model: str
    schedule: str
    compile: bool = False
    ac: str | None = None
    shards: int = 1
    tensor: int = 1
    experts: int = 1
    context: int = 1
    chunked: bool = False
    microbatches: int = 6
    steps: int = 5
    csv: str = ""
    spmd_backend: str = "spmd_types"  # torchtitan's default
    rounded: bool = False  # experts compute in bfloat16, as torchtitan has it


class Seen(NamedTuple):
    """A step: its loss (on the rank with the last stage), this rank's gradients, and the tokens each expert has got."""

    losses: list[float]
    gradients: dict[str, Tensor]
    tokens: dict[str, Tensor]


def spec_of(name: str, flex: bool = False) -> Any:
    """torchtitan's debug model with attention that a CPU can train, its embedding untied: pipelines need that."""
    module, has_experts = MODELS[name], name == "qwen3_moe"
    kind = attention.FlexAttention.Config(block_size=BLOCK) if flex else attention.ScaledDotProductAttention.Config()
    module.get_attention_config = lambda backend: kind
    if has_experts:
        build = qwen3._build_qwen3_moe_layers
        with mock.patch.object(qwen3, "_build_qwen3_moe_layers", lambda **given: build(**given | FEW)):
            return module.model_registry("debugmodel_moe")
    spec = module.model_registry("debugmodel")
    if getattr(spec.model, "enable_weight_tying", False):
        embedding = dataclasses.replace(spec.model.tok_embeddings, param_init=module._LINEAR_INIT)
        spec.model = dataclasses.replace(spec.model, enable_weight_tying=False, tok_embeddings=embedding)
    return spec


def model_of(spec: Any) -> nn.Module:
    """The whole model, with the same weights wherever it is made."""
    torch.manual_seed(0)
    model = spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


def dense_attention(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    """What flex attention computes, which a CPU cannot differentiate."""
    mask = flex_attention.create_mask(block_mask.mask_mod, len(q), 1, q.shape[2], k.shape[2], device="cpu")
    return nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa), None


@contextmanager
def attention_of(case: Case) -> Iterator[None]:
    """Context parallelism wants flex attention: here with a plain kernel, and masks that are not compiled."""
    if case.context == 1:
        yield
        return
    with (
        mock.patch.object(attention.FlexAttention, "_compiled_flex_attn", staticmethod(dense_attention)),
        mock.patch.object(attention, "_compiled_create_block_mask", flex_attention.create_block_mask),
        mock.patch.object(sequences, "_compiled_create_block_mask", flex_attention.create_block_mask),
        mock.patch.object(flex_attention, "_DEFAULT_SPARSE_BLOCK_SIZE", BLOCK),
    ):
        yield


@contextmanager
def precision_of(case: Case) -> Iterator[None]:
    """torchtitan's experts round to bfloat16 on every device: here they do not, so that sums can be compared."""
    if case.rounded:
        yield
        return
    with (
        mock.patch.object(Tensor, "bfloat16", lambda self: self),
        mock.patch.object(experts, "COMPUTE_DTYPE", torch.float32),
    ):
        yield


def loss_of(case: Case) -> Any:
    plain = CompileConfig(enable=False)
    kind = (
        ChunkedLossWrapper.Config(num_chunks=4)
        if case.chunked
        else CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)
    )
    return kind.build(compile_config=plain)


def batch_of(case: Case, step: int, shard: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and positions of a whole batch."""
    generator = torch.Generator().manual_seed(100 * step + shard)
    tokens = torch.randint(0, VOCABULARY, (case.microbatches, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:], torch.arange(LENGTH).expand(case.microbatches, LENGTH)


def train(case: Case, function: Any) -> list[Seen]:
    """Some steps of SGD on what a `pipelining_fn` made."""
    with precision_of(case), attention_of(case):
        return _train(case, function)


def _train(case: Case, function: Any) -> list[Seen]:
    spec, loss_fn = spec_of(case.model, flex=case.context > 1), loss_of(case)
    ranks = dist.get_world_size() // (case.shards * case.tensor * case.context)
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=ranks,
        pipeline_parallel_schedule=case.schedule,
        pipeline_parallel_schedule_csv=case.csv,
        data_parallel_shard_degree=case.shards,
        tensor_parallel_degree=case.tensor,
        expert_parallel_degree=case.experts,
        context_parallel_degree=case.context,
        spmd_backend=case.spmd_backend,
    )
    spec.model.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    utils.set_spmd_backend(case.spmd_backend)
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    kind = CHECKPOINTING[case.ac]
    schedule, parts, first, last = function(
        model_of(spec),
        parallel_dims=dims,
        training=TrainingConfig(
            local_batch_size=case.microbatches,
            seq_len=LENGTH,
            mixed_precision_param="float32",
            mixed_precision_reduce="float32",
        ),
        parallelism=parallelism,
        compile_config=CompileConfig(enable=case.compile, components=["model"]),
        ac_config=None if kind is None else kind(),
        dump_folder="",
        device=torch.device("cpu"),
        model_config=spec.model,
        parallelize_fn=spec.parallelize_fn,
        loss_fn=loss_fn,
    )
    if case.chunked and last:
        loss_fn.set_lm_head(parts[-1].lm_head)
        parts[-1]._skip_lm_head = True
    if case.shards * case.context > 1:
        for unit in (module for part in parts for module in part.modules() if isinstance(module, FSDPModule)):
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    shard = dims.get_mesh("fsdp").get_local_rank() // case.context if case.shards > 1 else 0
    tokens = torch.tensor(case.microbatches * LENGTH * case.shards)
    parameters = {name: p for part in parts for name, p in part.named_parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    trainer = SimpleNamespace(
        pp_schedule=schedule,
        pp_has_first_stage=first,
        pp_has_last_stage=last,
        post_dataloading_process=partial(prepared, dims, parts[0]),
        train_context=utils.get_spmd_context(parallel_dims=dims),
        device=torch.device("cpu"),
    )
    step_of, evaluated = (by_torch, None) if function is pipeline_parallel.pipeline_llm else (by_trainer, evaluate)
    seen = []
    for step in range(case.steps):
        loss = summed(step_of(trainer, batch_of(case, step, shard), tokens).detach(), dims)
        gradients = {_plain(name): whole(p.grad) for name, p in parameters.items()}
        seen.append(Seen([float(loss)] if last else [], gradients, counted(case, function, parts)))
        optimizer.step()
        optimizer.zero_grad()
    if evaluated:
        loss = summed(evaluated(trainer, batch_of(case, 0, shard)), dims)
        seen.append(Seen([float(loss)] if last else [], {}, {}))
    return seen


def counted(case: Case, function: Any, parts: list[nn.Module]) -> dict[str, Tensor]:
    """The tokens that each expert has got so far, where nothing else counts them again.

    Checkpointing computes them again, and torch's own runtime computes a microbatch more to learn shapes.
    """
    if case.ac is not None or function is pipeline_parallel.pipeline_llm:
        return {}
    return {name: whole(b) for part in parts for name, b in part.named_buffers() if "tokens_per_expert" in name}


def prepared(dims: Any, part: Any, row: dict[str, Tensor], labels: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """What torchtitan's trainer does with a microbatch: its place in the sequence, if there are several."""
    more: dict[str, Any] = {"positions": row["positions"]}
    if not dims.cp_enabled:
        return row["input"], labels, more
    more["attention_masks"] = part.get_attention_masks(positions=row["positions"])
    return prepare_context_parallel_input(row["input"], labels, more, dims.get_mesh("cp"), torch.device("cpu"))


def summed(loss: Tensor, dims: Any) -> Tensor:
    """The loss of whole sequences."""
    if dims.cp_enabled:
        dist.all_reduce(loss, group=dims.get_mesh("cp").get_group())
    return loss


def rows_of(batch: tuple[Tensor, Tensor, Tensor]) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """A batch as torchtitan's trainer gets it: inputs and labels of each microbatch."""
    inputs, labels, positions = (part.split(1) for part in batch)
    return [{"input": row, "positions": place} for row, place in zip(inputs, positions)], list(labels)


def by_trainer(trainer: Any, batch: tuple[Tensor, Tensor, Tensor], tokens: Tensor) -> Tensor:
    """torchtitan's own code of a step; torch 2.13's own classes do not take what it gives."""
    rows, labels = rows_of(batch)
    return Trainer.pp_forward_backward_step(trainer, input_dict_mbs=rows, label_mbs=labels, global_valid_tokens=tokens)


def by_torch(trainer: Any, batch: tuple[Tensor, Tensor, Tensor], tokens: Tensor) -> Tensor:
    """The same step with a whole batch."""
    inputs, labels, positions = batch
    losses: list[Tensor] | None = [] if trainer.pp_has_last_stage else None
    with trainer.train_context():
        trainer.pp_schedule.step(
            *((inputs,) if trainer.pp_has_first_stage else ()),
            target=labels if trainer.pp_has_last_stage else None,
            losses=losses,
            loss_kwargs={"global_valid_tokens": tokens},
            return_outputs=False,
            positions=positions,
        )
    return torch.sum(torch.stack(losses)) if losses else torch.tensor(-1.0)


def evaluate(trainer: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """As torchtitan's validator calls it."""
    made = [trainer.post_dataloading_process(row, labels) for row, labels in zip(*rows_of(batch))]
    losses: list[Tensor] | None = [] if trainer.pp_has_last_stage else None
    with torch.no_grad(), trainer.train_context():
        trainer.pp_schedule.eval(
            arg_mbs=[(inputs,) for inputs, _, _ in made] if trainer.pp_has_first_stage else None,
            kwarg_mbs=[more for _, _, more in made],
            target_mbs=[labels for _, labels, _ in made] if trainer.pp_has_last_stage else None,
            losses=losses,
        )
    return torch.sum(torch.stack(losses)) if losses else torch.tensor(-1.0)


def _plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")


def whole(gradient: Any) -> Tensor:
    assert gradient is not None, "a gradient is missing"
    return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).clone()


def gap(mine: list[Seen], theirs: list[Seen]) -> float:
    """The largest difference of any loss or gradient, relative to the largest entry."""
    worst = 0.0
    for one, other in zip(mine, theirs, strict=True):
        assert len(one.losses) == len(other.losses)
        assert one.gradients.keys() == other.gradients.keys()
        for name in one.tokens.keys() & other.tokens.keys():
            assert torch.equal(one.tokens[name], other.tokens[name]), name
        for a, b in zip(one.losses, other.losses):
            worst = max(worst, abs(a - b) / abs(b))
        for name, gradient in one.gradients.items():
            wanted = other.gradients[name]
            worst = max(worst, float((gradient - wanted).abs().max() / wanted.abs().max()))
    return worst


def beside_torchtitan(case: Case, theirs: Case | None = None) -> float:
    """Our run of `case` against torchtitan's own run of `theirs`, by default the same."""
    mine = train(case, ours.pipeline_llm)[:-1]  # torch's V schedules cannot evaluate
    return gap(mine, train(theirs or case, pipeline_parallel.pipeline_llm))


def experts_beside_torchtitan(case: Case) -> tuple[float, float]:
    """The same for weights of experts, and for all others."""
    mine, theirs = train(case, ours.pipeline_llm)[:-1], train(case, pipeline_parallel.pipeline_llm)

    def some(seen: list[Seen], experts: bool) -> list[Seen]:
        return [
            each._replace(gradients={n: g for n, g in each.gradients.items() if ("inner_experts" in n) == experts})
            for each in seen
        ]

    return gap(some(mine, True), some(theirs, True)), gap(some(mine, False), some(theirs, False))


def alone(case: Case) -> None:
    """torchtitan without us."""
    train(case, pipeline_parallel.pipeline_llm)


def deferred(case: Case) -> tuple[int, int]:
    """How many linear layers and stacks of experts leave their weight gradients to W, of how many."""
    parts: list[nn.Module] = []

    def remembered(*args: Any, **kwargs: Any) -> Any:
        made = ours.pipeline_llm(*args, **kwargs)
        parts.extend(made[1])
        return made

    train(case, remembered)
    layers = [m for part in parts for m in part.modules() if isinstance(m, nn.Linear | GroupedExperts)]
    return sum(len(find_deferred(part)) for part in parts), len(layers)


def beside_plain(case: Case) -> float:
    """Our run against the whole model, which no pipeline has touched."""
    mine = train(case, ours.pipeline_llm)
    with precision_of(case):
        return gap(mine, plain(case, mine))


def plain(case: Case, mine: list[Seen]) -> list[Seen]:
    """What is to be compared with our run: the gradients of all shards, and the loss of this process's own."""
    model, loss_fn = model_of(spec_of(case.model)), loss_of(case._replace(chunked=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.tensor(case.microbatches * LENGTH * case.shards)
    own_shard = dist.get_rank() // (case.tensor * case.context) % case.shards
    counts = {name: b for name, b in model.named_buffers() if "tokens_per_expert" in name}
    got = {name: torch.zeros_like(b) for name, b in counts.items()}
    theirs = []
    for step in range(case.steps):
        totals = []
        for shard in range(case.shards):
            losses = [
                loss_fn(model(inputs, positions=positions), labels, tokens)[0]
                for inputs, labels, positions in zip(*(part.split(1) for part in batch_of(case, step, shard)))
            ]
            totals.append(torch.sum(torch.stack(losses)))
            totals[-1].backward()
            for name, count in counts.items():
                got[name] += count if shard == own_shard else 0
                count.zero_()
        own, loss = mine[step], float(totals[own_shard].detach())
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if name in own.gradients}
        theirs.append(Seen([loss] if own.losses else [], gradients, {name: b.clone() for name, b in got.items()}))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        inputs, labels, positions = batch_of(case, 0, own_shard)
        total = loss_fn(model(inputs, positions=positions), labels)[0]  # validation divides later
    theirs.append(Seen([float(total)] if mine[-1].losses else [], {}, {}))
    return theirs


def from_file(case: Case, text: str, folder: str) -> float:
    """A schedule from a CSV against the plain model."""
    path = Path(folder) / f"{dist.get_rank()}.csv"
    path.write_text(text)
    return beside_plain(case._replace(csv=str(path)))


def mine(case: Case) -> None:
    """Our run, for what it refuses."""
    train(case, ours.pipeline_llm)
