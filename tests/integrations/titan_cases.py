"""What the local ranks run in test_torchtitan.py: torchtitan's debug models under its own runtime and under ours."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torchtitan.tools.utils
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

torchtitan.tools.utils.device_type = "cpu"  # read by what is imported next

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss  # noqa: E402
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import ParallelDims, pipeline_parallel  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models import llama3, qwen3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402

from zeropipe.integrations import torchtitan as ours  # noqa: E402

MODELS = {"llama3": llama3, "qwen3": qwen3}
CHECKPOINTING = {None: None, "full": FullAC.Config, "selective": SelectiveAC.Config}
LENGTH, VOCABULARY = 16, 2048


class Case(NamedTuple):
    """What is trained, and how."""

    model: str
    schedule: str
    compile: bool = False
    ac: str | None = None
    shards: int = 1
    chunked: bool = False
    microbatches: int = 6
    steps: int = 5
    csv: str = ""


class Seen(NamedTuple):
    """The losses of a step (on the rank with the last stage) and this rank's gradients, by name."""

    losses: list[float]
    gradients: dict[str, Tensor]


def spec_of(name: str) -> Any:
    """torchtitan's debug model with attention that a CPU can train, its embedding untied: pipelines need that."""
    module = MODELS[name]
    module.get_attention_config = lambda backend: ScaledDotProductAttention.Config()
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


def loss_of(case: Case) -> Any:
    plain = CompileConfig(enable=False)
    kind = ChunkedLossWrapper.Config(num_chunks=4) if case.chunked else CrossEntropyLoss.Config()
    return kind.build(compile_config=plain)


def batch_of(case: Case, step: int, shard: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and positions of a whole batch."""
    generator = torch.Generator().manual_seed(100 * step + shard)
    tokens = torch.randint(0, VOCABULARY, (case.microbatches, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:], torch.arange(LENGTH).expand(case.microbatches, LENGTH)


def train(case: Case, function: Any) -> list[Seen]:
    """Some steps of SGD on what a `pipelining_fn` made."""
    spec, loss_fn, ranks = spec_of(case.model), loss_of(case), dist.get_world_size() // case.shards
    parallelism = ParallelismConfig(
        pipeline_parallel_degree=ranks,
        pipeline_parallel_schedule=case.schedule,
        pipeline_parallel_schedule_csv=case.csv,
        data_parallel_shard_degree=case.shards,
        spmd_backend="partial_dtensor",
    )
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
    if case.shards > 1:
        for unit in (module for part in parts for module in part.modules() if isinstance(module, FSDPModule)):
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums
    shard = dims.get_mesh("fsdp").get_local_rank() if case.shards > 1 else 0
    tokens = torch.tensor(case.microbatches * LENGTH * case.shards)
    parameters = {name: p for part in parts for name, p in part.named_parameters()}
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    seen = []
    for step in range(case.steps):
        losses: list[Tensor] | None = [] if last else None
        run_step(schedule, batch_of(case, step, shard), tokens, losses, first, last)
        gradients = {_plain(name): whole(p.grad) for name, p in parameters.items()}
        seen.append(Seen([float(loss.detach()) for loss in losses or ()], gradients))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def run_step(schedule: Any, batch: Any, tokens: Tensor, losses: Any, first: bool, last: bool) -> None:
    """As torchtitan's trainer calls it; torch 2.13's own classes do not take lists of microbatches."""
    inputs, labels, positions = batch
    more = {"losses": losses, "loss_kwargs": {"global_valid_tokens": tokens}, "return_outputs": False}
    if type(schedule).__module__.startswith("zeropipe."):
        schedule.step(
            arg_mbs=[(row,) for row in inputs.split(1)] if first else None,
            kwarg_mbs=[{"positions": row} for row in positions.split(1)],
            target_mbs=list(labels.split(1)) if last else None,
            **more,
        )
    else:
        schedule.step(*((inputs,) if first else ()), positions=positions, target=labels if last else None, **more)


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
        for a, b in zip(one.losses, other.losses):
            worst = max(worst, abs(a - b) / abs(b))
        for name, gradient in one.gradients.items():
            wanted = other.gradients[name]
            worst = max(worst, float((gradient - wanted).abs().max() / wanted.abs().max()))
    return worst


def beside_torchtitan(case: Case, theirs: Case | None = None) -> float:
    """Our run of `case` against torchtitan's own run of `theirs`, by default the same."""
    mine = train(case, ours.pipeline_llm)
    return gap(mine, train(theirs or case, pipeline_parallel.pipeline_llm))


def alone(case: Case) -> None:
    """torchtitan without us."""
    train(case, pipeline_parallel.pipeline_llm)


def beside_plain(case: Case) -> float:
    """Our run against the whole model, which no pipeline has touched."""
    mine = train(case, ours.pipeline_llm)
    model, loss_fn = model_of(spec_of(case.model)), loss_of(case._replace(chunked=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.tensor(case.microbatches * LENGTH)
    theirs = []
    for step in range(case.steps):
        losses = []
        for inputs, labels, positions in zip(*(part.split(1) for part in batch_of(case, step, 0))):
            loss, _ = loss_fn(model(inputs, positions=positions), labels, tokens)
            loss.backward()
            losses.append(float(loss.detach()))
        own = mine[step].gradients
        theirs.append(
            Seen(
                losses if mine[step].losses else [],
                {n: p.grad.clone() for n, p in model.named_parameters() if n in own},
            )
        )
        optimizer.step()
        optimizer.zero_grad()
    return gap(mine, theirs)


def from_file(case: Case, text: str, folder: str) -> float:
    """A schedule from a CSV against the plain model."""
    path = Path(folder) / f"{dist.get_rank()}.csv"
    path.write_text(text)
    return beside_plain(case._replace(csv=str(path)))


def mine(case: Case) -> None:
    """Our run, for what it refuses."""
    train(case, ours.pipeline_llm)
