"""What the local ranks run in test_mesh.py: pipelines on a DeviceMesh against one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest import mock

import torch
from engine_cases import Embedding
from engine_helpers import (
    WIDTH,
    SquareLoss,
    blocks,
    error_of,
    hf_plain_step,
    microbatches,
    nccl_on_one_gpu,
    plain_step,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.engine import CausalLMLoss, Engine, fsdp_private, hf_model, hf_stages, module_stages, parallelize
from zeropipe.errors import ConfigError

_meshes: dict[tuple[Any, ...], Any] = {}


def mesh_of(sizes: dict[str, int], device: str = "cpu") -> Any:
    """A mesh over all ranks; made once, since its groups live as long as the process."""
    key = (device, *sizes.items())
    if key not in _meshes:
        _meshes[key] = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return _meshes[key]


def whole(tensor: Tensor | None) -> Tensor | None:
    """All of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard(stages: dict[int, nn.Module], mesh: Any) -> None:
    """FSDP2 as a user would apply it: blocks, then the stage."""
    names = [name for name in ("dp_replicate", "dp_shard") if name in mesh.mesh_dim_names]
    for stage in stages.values():
        for block in stage.blocks:
            fully_shard(block, mesh=mesh[tuple(names)])
        fully_shard(stage, mesh=mesh[tuple(names)])


def modules(number: int, tied: bool) -> list[nn.Module]:
    if not tied:
        return blocks(number)
    start = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    ends = [Embedding(nn.Parameter(start.clone()), first, number - 1 if first else 0) for first in (True, False)]
    return [ends[0], *blocks(number)[1:-1], ends[1]]


def forward_on_mesh(schedule: Schedule, sizes: dict[str, int]) -> float:
    """Outputs that every rank of a pipeline gets, beside the plain model's."""
    mesh = mesh_of(sizes)
    stages = module_stages(blocks(schedule.num_stages), schedule, mesh["pp"].get_local_rank())
    batches = microbatches(schedule.num_microbatches)
    with Engine(schedule, stages, mesh=mesh) as engine, torch.no_grad():
        outputs = engine.forward(batches, broadcast=True)
        model = nn.Sequential(*blocks(schedule.num_stages))
        return max(error_of(mine, model(batch["inputs"])) for mine, batch in zip(outputs, batches, strict=True))


def train_on_mesh(
    schedule: Schedule, sizes: dict[str, int], options: dict[str, Any], steps: int, tied: bool, numbers: tuple[int, ...]
) -> dict[str, float]:
    """Steps with AdamW and clipping beside one process; every pipeline has its own number of rows.

    With `numbers`, steps have these numbers of microbatches, and every pipeline one more than the one before it.
    """
    mesh = mesh_of(sizes)
    number = schedule.num_stages
    plain = modules(number, tied)
    if tied:
        plain[-1].weight = plain[0].weight
    rank = mesh["pp"].get_local_rank() if "pp" in sizes else 0
    stages: dict[int, Any] = dict(module_stages(modules(number, tied), schedule, rank))
    if tied:
        for stage, module in stages.items():
            if stage in (0, number - 1):
                module.tied_pairs = (("blocks.0.weight", number - 1 - stage, "blocks.0.weight"),)
    if "dp_shard" in sizes:
        shard(stages, mesh)
    model, loss_fn = nn.Sequential(*plain), SquareLoss()
    pipelines = math.prod(size for name, size in sizes.items() if name.startswith("dp"))
    mine = 0
    for name in ("dp_replicate", "dp_shard"):
        if name in sizes:
            mine = mine * sizes[name] + mesh[name].get_local_rank()
    seen = {"loss": 0.0, "grad": 0.0, "norm": 0.0, "weight": 0.0, "eval": 0.0}
    with Engine(schedule, stages, mesh=mesh, **options) as engine:
        ours, theirs = (
            torch.optim.AdamW(p, lr=0.01, foreach=False) for p in (engine.parameters(), list(model.parameters()))
        )
        for step in range(steps):
            count = numbers[step % len(numbers)] if numbers else schedule.num_microbatches
            data = [
                microbatches(count + (pipeline if numbers else 0), 10 * step + pipeline, (1 + pipeline, 5, 2))
                for pipeline in range(pipelines)
            ]
            wanted = plain_step(model, [batch for some in data for batch in some], loss_fn)
            evaluated = engine.eval_step(data[mine], loss_fn)
            result = engine.train_step(data[mine], loss_fn)
            seen["loss"] = max(seen["loss"], abs(result.loss - wanted) / abs(wanted))
            seen["eval"] = max(seen["eval"], abs(evaluated.loss - wanted) / abs(wanted))
            compare_update(seen, engine, model, (ours, theirs), partial(difference, stages, plain))
    return seen


def sharding_calls(schedule: Schedule, options: dict[str, Any]) -> tuple[int, list[str], list[str], list[int]]:
    """What a step gathers, lets go and reduces: its rank, the calls in order, those of a forward pass, bytes left."""
    mesh = mesh_of({"pp": 2, "dp_shard": 2})
    rank = mesh["pp"].get_local_rank()
    stages = dict(module_stages([nn.Sequential(*blocks(2)) for _ in range(schedule.num_stages)], schedule, rank))
    shard(stages, mesh)
    calls: list[str] = []
    with Engine(schedule, stages, mesh=mesh, **options) as engine:
        data, loss_fn = microbatches(schedule.num_microbatches), SquareLoss()
        engine.train_step(data, loss_fn)
        for stage, shards in engine._shards.items():
            for method, name in (("unshard", "UNSHARD"), ("reshard", "RESHARD"), ("reduce", "REDUCE_GRAD")):
                spy(shards, method, f"{stage}{name}", calls)
        engine._executors.close()  # its calls were bound before
        engine.train_step(data, loss_fn)
        train = list(calls)
        calls.clear()
        engine.eval_step(data, loss_fn)
        whole = [
            parameter.untyped_storage().nbytes()
            for shards in engine._shards.values()
            for unit in shards.units
            for parameter in fsdp_private.unsharded_parameters(unit)
        ]
        return rank, train, calls, whole


def recorded_on_mesh(schedule: Schedule, options: dict[str, Any]) -> tuple[int, Timeline, int]:
    """A recorded step of sharded stages: the rank, its Timeline, and the bytes of the rank's whole weights."""
    mesh = mesh_of({"pp": 2, "dp_shard": 2})
    rank = mesh["pp"].get_local_rank()
    stages = dict(module_stages([nn.Sequential(*blocks(2)) for _ in range(schedule.num_stages)], schedule, rank))
    weights = sum(p.numel() * p.element_size() for stage in stages.values() for p in stage.parameters())
    shard(stages, mesh)
    with Engine(schedule, stages, mesh=mesh, record=True, **options) as engine:
        data = microbatches(schedule.num_microbatches)
        engine.train_step(data, SquareLoss())
        engine.train_step(data, SquareLoss())
        recorded = engine.timeline()
        engine.record = False
        engine.train_step(data, SquareLoss())  # is not recorded
        assert engine.timeline() == recorded
        return rank, recorded, weights


def mixed_on_mesh(schedule: Schedule, options: dict[str, Any], offload: bool) -> dict[str, Any]:
    """bf16 computation on float32 weights, beside the same microbatch gradients of one process added in float32."""
    mesh = mesh_of({"pp": 2, "dp_shard": 2})
    plain = [module.to(torch.float32) for module in blocks(schedule.num_stages)]
    copies = [module.to(torch.float32) for module in blocks(schedule.num_stages)]
    stages = dict(module_stages(copies, schedule, mesh["pp"].get_local_rank()))
    parallelize(stages, mesh, dtype=torch.bfloat16, offload=offload)
    computed: list[torch.dtype] = []
    next(iter(stages.values())).blocks[0].register_forward_hook(lambda module, args, out: computed.append(out.dtype))
    number, mine = schedule.num_microbatches, mesh["dp_shard"].get_local_rank()
    data = [microbatches(number, pipeline) for pipeline in range(2)]
    data = [[{k: v.to(torch.bfloat16) for k, v in batch.items()} for batch in some] for some in data]
    loss_fn = SquareLoss()
    with Engine(schedule, stages, mesh=mesh, **options) as engine:
        optimizer = torch.optim.AdamW(engine.parameters(), lr=0.01, foreach=False)
        result = engine.train_step(data[mine], loss_fn)
        model = nn.Sequential(*plain).to(torch.bfloat16)
        sums: list[dict[str, Tensor]] = []
        for batch in [batch for some in data for batch in some]:
            (loss_fn(model(batch["inputs"]), batch)[0] / result.count).backward()
            sums.append({name: parameter.grad for name, parameter in model.named_parameters()})
            model.zero_grad()
        error = in_bf16 = 0.0
        for stage in stages.values():
            for name, parameter in stage.named_parameters():
                pieces = [some[stage.full_name(name)] for some in sums]
                wanted = sum(piece.float() for piece in pieces)
                error = max(error, error_of(whole(parameter.grad), wanted))
                in_bf16 = max(in_bf16, error_of(sum(pieces[1:], pieces[0]).float(), wanted))
        optimizer.step()
        state = [t for some in optimizer.state.values() for t in some.values() if isinstance(t, Tensor) and t.dim()]
        tensors = [*engine.parameters(), *(p.grad for p in engine.parameters()), *state]
        return {
            "error": error, "in_bf16": in_bf16, "computed": str(computed[0]),
            "dtypes": {str(t.dtype) for t in tensors}, "devices": {t.device.type for t in tensors},
        }  # fmt: skip


def shared_between_blocks(schedule: Schedule) -> tuple[float, list[str]]:
    """A module that stands twice in a sharded stage, beside one process; and what cannot be sharded, in words."""
    mesh, said = mesh_of({"dp_shard": 2}), []
    plain, copies = ([*blocks(1) * 2, *blocks(2)] for _ in range(2))
    stages: dict[int, Any] = parallelize(dict(module_stages(copies, schedule, 0)), mesh)
    data = [microbatches(schedule.num_microbatches, pipeline) for pipeline in range(2)]
    with Engine(schedule, stages, mesh=mesh) as engine:
        engine.train_step(data[mesh.get_local_rank()], SquareLoss())
        plain_step(nn.Sequential(*plain), [batch for some in data for batch in some], SquareLoss())
        error = difference(stages, plain, "grad")
    other = blocks(2)
    other[1].down.weight = other[0].down.weight
    turned: dict[str, Any] = {"mesh": mesh_of({"dp_shard": 2, "dp_replicate": 1})}
    whole_stages: Any = dict(module_stages(blocks(2), schedule, 0))
    for given, how in (
        (dict(module_stages(other, schedule, 0)), {"mesh": mesh}),
        (whole_stages, turned),
        (stages, {"mesh": mesh}),
        (blocks(2), {"mesh": mesh}),
        (whole_stages, {"mesh": None}),
        (whole_stages, {"mesh": mesh, "dtype": "bf16"}),
    ):
        try:
            parallelize(given, **how)
        except ConfigError as fault:
            said.append(str(fault))
    return error, said


def called_outside(schedule: Schedule) -> float:
    """A sharded stage that is called by itself between steps, beside one process."""
    mesh, loss_fn, error = mesh_of({"dp_shard": 2}), SquareLoss(), 0.0
    plain, batches = blocks(2), microbatches(schedule.num_microbatches)
    model, x = nn.Sequential(*plain), batches[0]["inputs"]
    stages: dict[int, Any] = parallelize(dict(module_stages(blocks(2), schedule, 0)), mesh)
    with Engine(schedule, stages, mesh=mesh) as engine:
        ours, theirs = torch.optim.SGD(engine.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            engine.train_step(batches, loss_fn)
            plain_step(model, batches, loss_fn)
            with torch.no_grad():
                error = max(error, error_of(stages[0](inputs=x), model(x)))
            error = max(error, difference(stages, plain, "grad"))
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
    return error


def trained_outside(schedule: Schedule) -> tuple[str, float]:
    """A backward through a sharded stage between steps: what the next one says, and how right the one after it is."""
    mesh, loss_fn = mesh_of({"dp_shard": 2}), SquareLoss()
    plain, batches, said = blocks(2), microbatches(schedule.num_microbatches), ""
    stages: dict[int, Any] = parallelize(dict(module_stages(blocks(2), schedule, 0)), mesh)
    with Engine(schedule, stages, mesh=mesh) as engine:
        engine.train_step(batches, loss_fn)
        torch.optim.SGD(engine.parameters(), lr=0.1).zero_grad()
        stages[0](inputs=batches[0]["inputs"]).sum().backward()
        try:
            engine.train_step(batches, loss_fn)
        except ConfigError as error:
            said = str(error)
        engine.train_step(batches, loss_fn)
        plain_step(nn.Sequential(*plain), batches, loss_fn)
        return said, difference(stages, plain, "grad")


def after_inference_mode(schedule: Schedule) -> float:
    """Sharded stages that are first evaluated in inference mode, and trained then, beside one process."""
    mesh, loss_fn = mesh_of({"dp_shard": 2}), SquareLoss()
    plain, error = blocks(2), 0.0
    data = [microbatches(schedule.num_microbatches, pipeline) for pipeline in range(2)]
    mine = data[mesh.get_local_rank()]
    wanted = plain_step(nn.Sequential(*plain), [batch for some in data for batch in some], loss_fn)
    for by_run in (False, True):
        stages: dict[int, Any] = parallelize(dict(module_stages(blocks(2), schedule, 0)), mesh)
        with Engine(schedule, stages, mesh=mesh) as engine:
            with torch.inference_mode():
                if by_run:
                    engine.run(mine, lambda output, batch, index: None, train=False)
                else:
                    error = max(error, abs(engine.eval_step(mine, loss_fn).loss - wanted))
            engine.train_step(mine, loss_fn)
            error = max(error, difference(stages, plain, "grad"))
    return error


def spy(thing: Any, method: str, word: str, calls: list[str]) -> None:
    real = getattr(thing, method)

    def told(*args: Any, **options: Any) -> Any:
        calls.append(word)
        return real(*args, **options)

    setattr(thing, method, told)


def compare_update(
    seen: dict[str, Any],
    engine: Engine,
    plain: nn.Module,
    optimizers: Iterable[Optimizer],
    difference_of: Callable[[str], float],
) -> None:
    """Clip and update both models; `seen` gets the largest differences of norm, gradients and weights."""
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    seen["norm"] = max(seen["norm"], abs(engine.clip_grad_norm(0.1) - norm) / norm)
    seen["grad"] = max(seen["grad"], difference_of("grad"))
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    seen["weight"] = max(seen["weight"], difference_of("weight"))


def difference(stages: dict[int, Any], plain: list[nn.Module], what: str) -> float:
    """The largest relative difference of any gradient or weight from the plain model's."""
    worst = 0.0
    for module in stages.values():
        for name, parameter in module.named_parameters():
            index, _, rest = module.full_name(name).partition(".")
            other = plain[int(index)].get_parameter(rest)
            got, wanted = (parameter.grad, other.grad) if what == "grad" else (parameter.detach(), other.detach())
            worst = max(worst, error_of(whole(got), wanted))
    return worst


def llama(**changes: Any) -> Any:
    """A tiny Llama or Qwen3 in float64."""
    from transformers import LlamaConfig, Qwen3Config

    make = Qwen3Config if changes.pop("qwen3", False) else LlamaConfig
    return make(
        hidden_size=32, intermediate_size=48, num_attention_heads=4,
        head_dim=8, vocab_size=64, dtype=torch.float64, **{"num_key_value_heads": 2, "num_hidden_layers": 4} | changes,
    )  # fmt: skip


def train_compiled_on_mesh(*args: Any) -> dict[str, float]:
    """`train_hf_on_mesh` with norms in the model's own dtype.

    transformers' compute in float32, which the compiler rounds in another order: steps of AdamW make 1e-4 of that.
    """

    def norm(self: Any, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    with mock.patch.object(Qwen3RMSNorm, "forward", norm), mock.patch.object(LlamaRMSNorm, "forward", norm):
        return train_hf_on_mesh(*args)


def train_hf_on_mesh(
    schedule: Schedule, sizes: dict[str, int], model: dict[str, Any], options: dict[str, Any], steps: int = 2,
    device: str = "cpu",
) -> dict[str, float]:  # fmt: skip
    """A Hugging Face model through parallelize(), beside the same model in one process: a step of SGD, more of AdamW.

    What AdamW does to sharded tensors costs torch a second of preparation in every process.
    """
    config = llama(**model)
    mesh = mesh_of(sizes, device)
    plain = hf_model(config, device=device)
    stages = hf_stages(config, schedule, mesh["pp"].get_local_rank() if "pp" in sizes else 0, device=device)
    parallelize(stages, mesh)
    pipelines = math.prod(size for name, size in sizes.items() if name.startswith("dp"))
    mine = next((mesh[name].get_local_rank() for name in ("dp_shard", "dp_replicate") if name in sizes), 0)
    loss_fn, seen = CausalLMLoss(), {"loss": 0.0, "grad": 0.0, "norm": 0.0, "weight": 0.0}
    with Engine(schedule, stages, mesh=mesh, **options) as engine:
        ours, theirs = (  # with torch's own eps a gradient that is rounding and no more is a step like any other
            torch.optim.AdamW(p, lr=0.01, eps=1e-5, foreach=False)
            if steps > 1
            else torch.optim.SGD(p, lr=1.0, foreach=False)
            for p in (engine.parameters(), list(plain.parameters()))
        )
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            shapes = [(schedule.num_microbatches, 1, 6 + 4 * pipeline) for pipeline in range(pipelines)]
            data = [
                [
                    {"input_ids": tokens, "labels": tokens}
                    for tokens in torch.randint(64, shape, generator=generator).to(device)
                ]
                for shape in shapes
            ]
            everything = [batch for some in data for batch in some]
            wanted = hf_plain_step(plain, everything, loss_fn)
            result = engine.train_step(data[mine], loss_fn)
            seen["loss"] = max(seen["loss"], abs(result.loss - wanted) / wanted)
            compare_update(seen, engine, plain, (ours, theirs), partial(hf_difference, stages, plain))
    return seen


def hf_difference(stages: dict[int, Any], plain: nn.Module, what: str) -> float:
    worst = 0.0
    for stage in stages.values():
        names = stage.full_names()
        for name, parameter in stage.named_parameters():
            other = plain.get_parameter(names[name])
            got, wanted = (parameter.grad, other.grad) if what == "grad" else (parameter.detach(), other.detach())
            worst = max(worst, error_of(whole(got), None if wanted is None else wanted.cpu()))
    return worst


def train_hf_on_nccl(schedule: Schedule, sizes: dict[str, int]) -> dict[str, float]:
    """`train_hf_on_mesh` with all ranks on one GPU, over NCCL."""
    nccl_on_one_gpu()
    torch.zeros(1, device="cuda:0")  # a mesh would look for a GPU of its own for every rank
    return train_hf_on_mesh(schedule, sizes, {"qwen3": True, "tie_word_embeddings": False}, {}, 2, "cuda")
