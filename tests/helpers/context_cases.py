"""What the local ranks run in test_context.py: parts of sequences on `cp`, beside the same model in one process."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from counted_graphs import counted_graphs
from engine_helpers import error_of, hf_plain_step
from memory_cases import Live
from mesh_cases import compare_update, hf_difference, mesh_of
from tensor_cases import VOCABULARY, config_of
from torch import Tensor, nn

from zeropipe.core.mesh import DATA_DIMENSIONS
from zeropipe.core.schedule import Schedule
from zeropipe.engine import CausalLMLoss, Engine, LogProbabilities, hf_model, hf_stages, parallelize
from zeropipe.engine.backward import turns
from zeropipe.engine.blocks import compiling
from zeropipe.engine.mesh import tp_collectives
from zeropipe.engine.mesh.cp_attention import SplitAttention, attend
from zeropipe.engine.mesh.ring_attention import attend_around_ring
from zeropipe.engine.mesh.tp_check import SimulatedTP
from zeropipe.engine.mesh.tp_collectives import FakeGroup, TPGroup, fake_groups
from zeropipe.engine.stages.packing import position_ids
from zeropipe.engine.stages.sequence_parts import SequenceParts


def tokens(number: int, step: int, packed: bool = False, padded: bool = False) -> list[dict[str, Any]]:
    """Microbatches of lengths that divide over processes and that do not, with tokens that do not count."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for index in range(number):
        rows, length = (1 if packed else 2), (13, 16)[index % 2]
        ids = torch.randint(VOCABULARY, (rows, length), generator=generator)
        labels = ids.clone()
        labels[0, : 2 + index] = -100
        batch = {"input_ids": ids, "labels": labels}
        if packed:
            cu_seqlens = torch.tensor([0, 3, 9, length])
            labels[0, cu_seqlens[:-1]] = -100
            batch["cu_seqlens"] = cu_seqlens
        if padded:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][1, 7:] = 0
            labels[1, 7:] = -100
        made.append(batch)
    return made


def train_on_cp(
    schedule: Schedule, sizes: dict[str, int], kind: str, changes: dict[str, Any], batches: dict[str, Any],
    spreading: dict[str, Any], options: dict[str, Any], steps: int = 2,
) -> dict[str, float]:  # fmt: skip
    """AdamW steps with clipping beside one process; the largest differences."""
    config, mesh = config_of(kind, **changes), mesh_of(sizes)
    plain = hf_model(config)
    spreading = dict(spreading)
    attention = spreading.pop("attention", "auto")
    stages = hf_stages(config, schedule, mesh["pp"].get_local_rank() if "pp" in sizes else 0, attention=attention)
    parallelize(stages, mesh, **spreading)
    return train_beside(plain, schedule, stages, sizes, batches, options, steps)


def train_in_turns(*job: Any) -> dict[str, float]:
    """`train_on_cp` with Overlaps in turns. `changes`: how often an exchange of attention began by another side.

    Sides are the forward and the backward of an Overlap, so a number of 0 means that none took turns.
    """
    sides, finish = list[int | None](), tp_collectives._finish

    def noted(pending: Tensor) -> Tensor:
        sides.append(turns.running())
        return finish(pending)

    with mock.patch.object(tp_collectives, "_finish", noted):
        seen = train_on_cp(*job)
    return seen | {"changes": float(sum({one, other} == {0, 1} for one, other in pairwise(sides)))}


def train_in_compiled_turns(backend: str | None, *job: Any) -> dict[str, float]:
    """`train_in_turns` with compiled blocks. One that ran uncompiled is an error: it would take turns in any case."""
    warnings.filterwarnings("error", message=".*cannot be compiled")
    torch._dynamo.reset()
    with (
        mock.patch.object(compiling, "inductor_backend", return_value=backend) if backend else nullcontext(),
        mock.patch.object(compiling, "is_compile_error", return_value=False),
    ):
        return train_in_turns(*job)


def train_compiled(*job: Any) -> tuple[dict[str, float], int]:
    """`train_on_cp` with compiled blocks, and the number of graphs."""
    *job, options, steps = job
    with counted_graphs() as graphs:
        seen = train_on_cp(*job, options | {"compile": True}, steps)
    return seen, len(graphs)


def train_beside(
    plain: nn.Module, schedule: Schedule, stages: dict[int, Any], sizes: dict[str, int], batches: dict[str, Any],
    options: dict[str, Any], steps: int,
) -> dict[str, float]:  # fmt: skip
    """The largest differences of steps of these stages from the plain model, on the tokens of all pipelines."""
    mesh, loss_fn = mesh_of(sizes), CausalLMLoss()
    pipelines = math.prod(size for name, size in sizes.items() if name in DATA_DIMENSIONS)
    mine = 0
    for name in DATA_DIMENSIONS:
        mine = mine * sizes.get(name, 1) + (mesh[name].get_local_rank() if name in sizes else 0)
    seen = {"loss": 0.0, "grad": 0.0, "norm": 0.0, "weight": 0.0, "eval": 0.0}
    with Engine(schedule, stages, mesh=mesh, **options) as engine:
        ours, theirs = (
            torch.optim.AdamW(p, lr=0.01, foreach=False) for p in (engine.parameters(), list(plain.parameters()))
        )
        for step in range(steps):
            everybodys = [tokens(schedule.num_microbatches, 10 * step + i, **batches) for i in range(pipelines)]
            data, every = everybodys[mine], [batch for some in everybodys for batch in some]
            evaluated = engine.eval_step(data, loss_fn).loss
            wanted = hf_plain_step(plain, [_for_plain(batch) for batch in every], loss_fn)
            seen["eval"] = max(seen["eval"], abs(evaluated - wanted) / wanted)
            seen["loss"] = max(seen["loss"], abs(engine.train_step(data, loss_fn).loss - wanted) / wanted)
            compare_update(seen, engine, plain, (ours, theirs), partial(hf_difference, stages, plain))
    return seen


def _for_plain(batch: dict[str, Any]) -> dict[str, Any]:
    """The same samples for transformers' own model: packed ones are told apart by their positions."""
    batch = dict(batch)
    if (cu_seqlens := batch.pop("cu_seqlens", None)) is not None:
        batch["position_ids"] = position_ids(cu_seqlens)
    return batch


class Mean:
    """A loss that knows nothing of parts."""

    def __call__(self, logits: Tensor, batch: dict[str, Any]) -> Tensor:
        labels = batch["labels"][..., 1:].reshape(-1)
        return nn.functional.cross_entropy(logits[..., :-1, :].reshape(-1, VOCABULARY), labels)


def outputs_on_cp(schedule: Schedule, sizes: dict[str, int], kind: str) -> dict[str, float]:
    """Outputs, log-probabilities and a loss of whole rows, beside the plain model."""
    config, mesh = config_of(kind, num_hidden_layers=2), mesh_of(sizes)
    plain, data = hf_model(config), tokens(schedule.num_microbatches, 0)
    stages = parallelize(hf_stages(config, schedule, mesh["pp"].get_local_rank()), mesh)
    with Engine(schedule, stages, mesh=mesh) as engine:
        found = engine.forward(data, broadcast=True)
        probabilities = engine.forward(data, post=LogProbabilities(), broadcast=True)
        loss = engine.train_step(data, Mean()).loss
        logits = [plain(batch["input_ids"]).logits for batch in data]
        mean = sum(Mean()(one, batch) for one, batch in zip(logits, data)) / len(data)
        mean.backward()
        return {
            "outputs": max(map(error_of, found, [one.detach() for one in logits])),
            "probabilities": max(
                error_of(mine, LogProbabilities()(one.detach(), batch))
                for mine, one, batch in zip(probabilities, logits, data)
            ),
            "loss": abs(loss - float(mean)),
            "grad": hf_difference(stages, plain, "grad"),
        }


def ring_differences(size: int, masked: str | None) -> dict[str, float]:
    """Attention of processes in threads around a ring, and its gradients, beside that of one."""
    generator, length, heads = torch.Generator().manual_seed(size), 8 * size, 4
    shapes = {"query": (2, heads, length, 8), "key": (2, 2, length, 8), "value": (2, 2, length, 6 if masked else 8)}
    whole = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    mask = None
    if masked:  # each token attends to six
        mask = torch.ones(length, length, dtype=torch.bool).tril().triu(-5)
        mask = mask[None, None].repeat(2, heads if masked == "by head" else 1, 1, 1)
    gradient = torch.randn(2, heads, length, shapes["value"][-1], generator=generator, dtype=torch.float64)
    tensors = [x.clone().requires_grad_() for x in whole.values()]
    expected = _attend_plainly(tensors, mask)
    expected.backward(gradient)

    def run(group: TPGroup) -> list[Tensor]:
        parts = SequenceParts(group.rank, size)
        own = [parts.take(x, 2).requires_grad_() for x in whole.values()]
        rows = None if mask is None else parts.take(mask, 2)
        out = attend_around_ring(nn.Module(), group, tuple(own), rows, {"scaling": 0.3}).transpose(1, 2)
        out.backward(parts.take(gradient, 2))
        return [out.detach(), *(x.grad for x in own)]

    with SimulatedTP(size) as simulated:
        found = simulated.run(run, [(group,) for group in simulated.groups])
    wanted = {"out": expected.detach(), **{name: x.grad for name, x in zip(whole, tensors)}}
    joined = [SequenceParts(0, size).join(parts, 2) for parts in zip(*found)]
    return {name: float((one - other).abs().max()) for (name, one), other in zip(wanted.items(), joined)}


def _attend_plainly(tensors: list[Tensor], mask: Tensor | None) -> Tensor:
    query, key, value = (x.repeat_interleave(tensors[0].shape[1] // x.shape[1], 1) for x in tensors)
    length = query.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool).tril() if mask is None else mask
    return ((query @ key.mT * 0.3).masked_fill(~mask, -math.inf)).softmax(-1) @ value


class _Alike(FakeGroup):
    """The group of one process: the others have the same tensors."""

    def __init__(self, size: int) -> None:
        self._size = size

    def gather(self, x: Tensor) -> list[Tensor]:
        return [x.clone() for _ in range(self._size)]

    def rotate(self, x: Tensor, group: TPGroup) -> Tensor:
        return x.clone()


def attention_memory(exchange: str, size: int) -> int:
    """The most bytes at a time of what a forward and backward of attention make on the last of `size` processes."""
    group, peak = TPGroup(f"alike {exchange}", size - 1, size), 0

    def watch() -> None:
        nonlocal peak
        peak = max(peak, live.total)

    def run(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        return nn.functional.scaled_dot_product_attention(query, key, value, mask).transpose(1, 2), None

    module = nn.Module()
    module.split_attention = SplitAttention(group, exchange, run)
    query, key, value = (torch.randn(1, heads, 64, 256, requires_grad=True) for heads in (4, 2, 2))
    with mock.patch.dict(fake_groups, {group.name: _Alike(size)}), Live(watch) as live:
        attend(module, query, key, value, None)[0].sum().backward()
    return peak
