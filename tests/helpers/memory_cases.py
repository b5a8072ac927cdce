"""The memory of one training step by purpose, measured on local ranks as every operator leaves it.

A predicted rank is held against this: what `train --dry-run` says of the same training file.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeropipe.core.action import Action
from zeropipe.engine import fsdp_private
from zeropipe.engine.comm.ranks import job_ranks
from zeropipe.engine.engine import Engine
from zeropipe.engine.head import cross_entropy
from zeropipe.engine.masters import MasterWeights
from zeropipe.engine.mesh import cp_attention
from zeropipe.engine.mesh.sharded_stage import ShardedStage
from zeropipe.engine.step import executor_cache
from zeropipe.engine.step.executor import Executor
from zeropipe.engine.step.losses import CausalLMLoss
from zeropipe.engine.step.watchers import Watcher
from zeropipe.train.config.read import validate
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.loop import setup
from zeropipe.train.loop.optimizer import make_optimizer
from zeropipe.train.loop.setup import build_stages, find_position, make_engine
from zeropipe.train.stage_costs import master_bytes

NEAR_PEAK = 0.95  # of the peak of a step: peaks of actions that are one to a prediction within 10%
ITEMS = ("weights", "gradients", "optimizer", "activations", "workspace")


class Live(TorchDispatchMode):
    """The storages that operators made or read, while they live; `on_result` is called after every operator."""

    def __init__(self, on_result: Callable[[], None]) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}
        self._first_sizes: dict[int, int] = {}
        self._on_result = on_result
        self.total = 0  # bytes, of the sizes that storages had at first

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = _local(tensor).untyped_storage()
                if storage._cdata not in self._storages:
                    self._add(storage._cdata, storage)
        self._on_result()
        return result

    def _add(self, key: int, storage: Any) -> None:
        size = storage.nbytes()

        def remove(_: Any) -> None:
            self.total -= size
            del self._storages[key], self._first_sizes[key]

        self._storages[key], self._first_sizes[key] = weakref.ref(storage, remove), size
        self.total += size

    def total_with(self, sizes: dict[int, int]) -> int:
        """The total with these sizes of storages, which operators may not have made or which may be resized."""
        return self.total + sum(size - self._first_sizes.get(key, 0) for key, size in sizes.items())

    def sizes(self) -> dict[int, int]:
        """Storage -> bytes now."""
        alive = [(key, reference()) for key, reference in list(self._storages.items())]
        return {key: storage.nbytes() for key, storage in alive if storage is not None}


class Meter:
    """Measures the items of a rank's memory at the peak of a step."""

    def __init__(self, engine: Engine, data: Iterable[dict[str, Tensor]]) -> None:
        self.live = Live(self._on_result)
        self._parameters = list(engine.parameters())
        self._shards = _sizes(map(_local, self._parameters))
        self._units = [unit for sharded in _sharded_stages(engine) for unit in sharded.units]
        self._known = _sizes(buffer for stage in engine.stages.values() for buffer in stage.buffers()).keys()
        self._known |= {tensor.untyped_storage()._cdata for one in data for tensor in one.values()}
        self._constant = dict.fromkeys(self._known, 0) | self._shards  # whenever operators read them first
        self._largest_total = 0  # of all live storages, at the peak
        self._runs = False  # an action
        self._peak: tuple[float, dict[str, float]] | None = None  # of the action that runs, if it is near the largest
        self._most_gathered = self._most_gradients = 0
        self._rolls = engine.options.gradients != "whole"  # gradients are whole within actions only
        self._reducing: set[int] = set()  # storages of gradients that FSDP has taken to reduce them
        self._peaks: list[tuple[float, dict[str, float]]] = []  # the largest totals of actions, and the items then
        self.largest: dict[str, float] = {}  # of each item, at any time between actions

    def measure(self) -> dict[str, float]:
        """The bytes of each item now; those of a microbatch are "other"."""
        weights, gradients = dict(self._shards), _sizes(_local(p.grad) for p in self._parameters if p.grad is not None)
        for unit in self._units:
            weights |= {storage._cdata: storage.nbytes() for storage in fsdp_private.weight_storages(unit)}
            gradients |= {storage._cdata: storage.nbytes() for storage in fsdp_private.gradient_storages(unit)}
        sizes = self.live.sizes()
        gradients |= {key: sizes[key] for key in self._reducing & sizes.keys()}
        known = weights.keys() | gradients.keys() | self._known
        other = sum(size for key, size in sizes.items() if key not in known)
        return {"weights": sum(weights.values()), "gradients": sum(gradients.values()), "other": other}

    def run(self, call: Callable[[], None]) -> None:
        """Run an action: of its peak, "activations" are what was there before it, or what of it remains."""
        before = self._at_rest()
        self._runs, self._peak = True, None
        call()
        self._runs = False
        kept = max(before, self._at_rest())
        if self._peak:
            total, items = self._peak
            other = items.pop("other")
            items |= {"activations": min(kept, other), "workspace": max(0.0, other - kept)}
            self._peaks.append((total, items))

    @property
    def near_peak(self) -> list[dict[str, float]]:
        """The items at the peaks of those actions whose peaks are near the largest, which comes first."""
        found = [one for one in self._peaks if one[0] >= NEAR_PEAK * self._largest_total]
        return [items for _, items in sorted(found, key=lambda one: -one[0])]

    def reduce(self, call: Callable[[Any], None], unit: Any) -> None:
        """Reduce the gradients of a unit, which are its gradients until they are copied into a message."""
        self._reducing = {storage._cdata for storage in fsdp_private.gradient_storages(unit)}
        call(unit)
        self._reducing = set()

    def _at_rest(self) -> float:
        """The bytes of microbatches between two actions; the largest sizes of items are updated."""
        now = self.measure()
        other = now["activations"] = now.pop("other")
        self.largest = {name: max(size, self.largest.get(name, 0.0)) for name, size in now.items()}
        self.largest["weights"] = max(self.largest["weights"], sum(self._shards.values()) + self._most_gathered)
        self.largest["gradients"] = max(self.largest["gradients"], self._most_gradients)
        return other

    def _count_gradients(self) -> int:
        """The bytes of gradients now."""
        found = _sizes(_local(p.grad) for p in self._parameters if p.grad is not None)
        for unit in self._units:
            found |= {storage._cdata: storage.nbytes() for storage in fsdp_private.gradient_storages(unit)}
        return sum(found.values())

    def _on_result(self) -> None:
        if not self._runs:
            return
        storages = (storage for unit in self._units for storage in fsdp_private.weight_storages(unit))
        weights = {storage._cdata: storage.nbytes() for storage in storages}
        self._most_gathered = max(self._most_gathered, sum(weights.values()))
        if self._rolls:
            self._most_gradients = max(self._most_gradients, self._count_gradients())
        total = self.live.total_with(self._constant | weights)
        if total > (NEAR_PEAK * self._largest_total if self._peak is None else self._peak[0]):
            self._largest_total, self._peak = max(total, self._largest_total), (total, self.measure())


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _sharded_stages(engine: Engine) -> list[ShardedStage]:
    return list(vars(engine._executors._context)["shards"].values())


def _sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}


class MeterActions(Watcher):
    """In place of the engine's ProfilerLabels."""

    meter: Meter | None = None

    def __init__(self, schedule: Any) -> None:
        pass

    def wrap(self, call: Any, actions: Sequence[Action], cells: Any) -> Any:
        """One action; those of an Overlap are wrapped by `_run_each`."""
        return call if len(actions) > 1 else partial(MeterActions._measure, call)

    @staticmethod
    def _measure(call: Callable[[], None]) -> None:
        meter = MeterActions.meter
        if meter is None:
            call()
        else:
            meter.run(call)


def _run_each(executor: Executor, calls: Sequence[Callable[[], None]], cells: Any) -> Callable[[], None]:
    """In place of Executor._run_both: the halves of an Overlap one after the other, each measured by itself."""
    return executor._streams.run_together([partial(MeterActions._measure, call) for call in calls], cells)


def _reduce(call: Callable[[Any], None], unit: Any) -> None:
    """In place of fsdp_private.reduce."""
    meter = MeterActions.meter
    if meter is None:
        call(unit)
    else:
        meter.reduce(call, unit)


class Measured(NamedTuple):
    """The bytes of a process by item: at the peak of a step and near it, and the most of each at any time."""

    rank: int  # in its pipeline
    near_peak: list[dict[str, float]]  # at the peak of the step, then at those of other actions that need as much
    largest: dict[str, float]

    @property
    def peak(self) -> float:
        return sum(self.near_peak[0].values())


def measure_step(config: RunConfig) -> Measured:
    """Run two steps, and measure the second: the first allocates what stays."""
    with job_ranks(config.engine.timeout, "begun to measure") as ranks:
        position = find_position(config, ranks)
        torch.manual_seed(0)
        stages = build_stages(config, position, ranks)
    data = _microbatches(config)
    in_order = partial(Engine, recv_ahead=0)  # receives are posted as on NCCL: predictions are for GPUs
    with (
        mock.patch.object(executor_cache, "ProfilerLabels", MeterActions),
        mock.patch.object(Executor, "_run_both", _run_each),
        mock.patch.object(fsdp_private, "reduce", partial(_reduce, fsdp_private.reduce)),
        mock.patch.object(setup, "Engine", in_order),
        mock.patch.object(cp_attention, "triangle_mask", _triangle),
        make_engine(config, position, stages) as engine,
    ):
        optimizer = make_optimizer(config, engine, position.device)
        engine.train_step(data, CausalLMLoss())
        optimizer.step()
        optimizer.zero_grad()
        meter = MeterActions.meter = Meter(engine, data)
        with meter.live:
            engine.train_step(data, CausalLMLoss())
        MeterActions.meter = None
        optimizer.step()
        state = sum(_sizes(map(_local, _state(optimizer))).values())
        masters = 0.0
        if config.mesh.num_shards > 1 and master_bytes(config):  # the shards are the master weights
            masters = sum(_sizes(map(_local, engine.parameters())).values())
    found = [*meter.near_peak, {**meter.largest, "workspace": meter.near_peak[0]["workspace"]}]
    *near, largest = (items | {"weights": items["weights"] - masters, "optimizer": state + masters} for items in found)
    return Measured(position.rank, near, largest)


def _triangle(queries: int, keys: int, device: torch.device) -> Tensor:
    """The mask of the last queries as a tensor: a CausalBias cannot be seen by a dispatch mode."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


CHUNK_NUMBERS = 2**15


def measure_step_in_chunks(config: RunConfig) -> Measured:
    """The same with chunks of `CHUNK_NUMBERS` logits."""
    with mock.patch.object(cross_entropy, "CPU_CHUNK_NUMBERS", CHUNK_NUMBERS):
        return measure_step(config)


def bytes_under_way(config: RunConfig) -> float:
    """Of messages that a rank sends and receives between two actions, which predictions do not count."""
    mesh, data = config.mesh, config.data
    number = data.microbatch * data.sequence * MODEL["hidden_size"] / (mesh.tp if mesh.sequence_parallel else 1)
    number /= mesh.cp
    return 3 * number * (2 if config.model.dtype == "bfloat16" else 4) if mesh.pp > 1 else 0.0


def errors(predicted: dict[str, float], measured: Measured, under_way: float = 0.0) -> dict[str, float]:
    """The relative error of each item, and of the peak. A column holds at the peak, or whenever the item is largest.

    Actions whose peaks differ by less than 5% are one peak: a prediction need not name the larger one.

    An item that is less than a tenth of the peak is compared with that tenth; workspace, which only single operators
    need, with the peak. `under_way` is subtracted from measured activations.
    """
    found = {"peak": sum(predicted.values()) / measured.peak - 1} if "workspace" in predicted else {}
    for name in ITEMS if found else ITEMS[:3]:  # of a run without a prediction, what does not depend on its times
        value, bounds = predicted[name], sorted(items[name] for items in (*measured.near_peak, measured.largest))
        lowest = bounds[0] - (under_way if name == "activations" else 0.0)
        distance = value - min(max(value, lowest), bounds[-1])
        found[name] = distance / (measured.peak if name == "workspace" else max(bounds[-1], measured.peak / 10))
    return found


def _state(optimizer: Any) -> list[Tensor]:
    """The tensors of an optimizer's state with as many elements as a parameter, and what is kept of master weights."""
    masters = []
    if isinstance(optimizer, MasterWeights):
        masters = optimizer.kept
        optimizer = optimizer.optimizer
    return [*masters, *(t for one in optimizer.state.values() for t in one.values() if isinstance(t, Tensor))]


def _microbatches(config: RunConfig) -> list[dict[str, Tensor]]:
    """Random tokens; packed rows have two samples each."""
    data, generator = config.data, torch.Generator().manual_seed(1)
    shape, half = (data.microbatch, data.sequence), data.sequence // 2
    found = []
    for _ in range(config.num_microbatches):
        tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
        one = {"input_ids": tokens, "labels": tokens.clone()}
        if data.packing:
            positions = torch.cat([torch.arange(half), torch.arange(data.sequence - half)])
            one["position_ids"] = positions.expand(shape).contiguous()
            ends = [row * data.sequence + end for row in range(shape[0]) for end in (half, data.sequence)]
            one["cu_seqlens"] = torch.tensor([0, *ends], dtype=torch.int32)
        found.append(one)
    return found


# random layouts

VOCABULARY = 512
MODEL = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": VOCABULARY,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ONE_STAGE = ("1f1b", "gpipe", "zb-h1", "zb-h2")  # per rank
SCHEDULES = {1: ("1f1b", "zb-h1"), 2: (*ONE_STAGE, "interleaved", "zbv", "v-min", "dualpipev"), 4: ONE_STAGE}  # by pp
MESHES = {
    4: ((4, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 4, 1)), 2: ((2, 1, 1), (1, 2, 1), (1, 1, 2)),
}  # pp, dp_shard, tp; by the number of processes  # fmt: skip


def draw(seed: int, num_ranks: int, model_path: str) -> RunConfig:
    """A random run of a small model on so many processes."""
    chance = random.Random(f"layout {seed}")
    pp, dp_shard, tp = chance.choice(MESHES[num_ranks])
    dtype = chance.choice(("float32", "float32", "bfloat16"))
    has_lora = tp == 1 and chance.random() < 0.15
    microbatch, number = chance.choice((1, 2)), chance.choice((4, 8))
    table: dict[str, Any] = {
        "model": {"path": model_path, "weights": "random", "dtype": dtype},
        "mesh": {"pp": pp, "dp_shard": dp_shard, "tp": tp, "sequence_parallel": tp > 1 and chance.random() < 0.5},
        "schedule": {"name": chance.choice(SCHEDULES[pp]), "costs": "h100"},
        "engine": {
            "ac": chance.choice(("none", "none", "full", "selective:2", "selective:op")), "device": "cpu",
            "attention": "sdpa",  # as it runs on a CPU
            "shards": chance.choice(("keep", "regather")) if dp_shard > 1 else "keep",
        },
        "data": {
            "sequence": 128, "microbatch": microbatch, "batch": number * microbatch * dp_shard,
            "packing": chance.random() < 0.3,
        },
        "optimizer": {"name": "adamw", "master_weights": chance.random() < 0.7},
        "train": {"steps": 2, "output": "out"},
    }  # fmt: skip
    if has_lora:
        table["lora"] = {"rank": 4, "target_modules": ["q_proj", "v_proj"]}
    config = validate(table, {}, f"layout {seed}")
    packed = {"kind": "tokens", "path": ("not.read",)} if config.data.packing else {}
    return config.model_copy(update={"data": config.data.model_copy(update=packed)})


def divide(config: RunConfig, sizes: dict[str, Any], **data: Any) -> RunConfig:
    """The run on a mesh with these sizes, with other fields of its data."""
    mesh = {"pp": 1, "dp_shard": 1, "tp": 1, "sequence_parallel": sizes.get("tp", 1) > 1, **sizes}
    batch = config.num_microbatches * config.data.microbatch * sizes.get("dp_shard", 1)
    return config.model_copy(update={
        "mesh": config.mesh.model_copy(update=mesh),
        "data": config.data.model_copy(update={"batch": batch, **data}),
        "schedule": config.schedule.model_copy(update={"name": "1f1b"}),
    })  # fmt: skip


def describe(config: RunConfig) -> str:
    """The layout in one line."""
    mesh, engine, data = config.mesh, config.engine, config.data
    marks = {
        "sequence parallel": mesh.sequence_parallel, "packed": data.packing, "lora": config.lora is not None,
        "no master weights": not config.optimizer.master_weights,
    }  # fmt: skip
    return " ".join([
        f"pp{mesh.pp} dp{mesh.dp_shard} cp{mesh.cp} tp{mesh.tp} {config.schedule.name}",
        f"ac={engine.ac} shards={engine.shards}",
        f"{config.model.dtype} microbatches {config.num_microbatches}x{data.microbatch}",
        *(name for name, is_so in marks.items() if is_so),
    ])  # fmt: skip
