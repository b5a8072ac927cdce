"""What the local ranks run in test_slices.py: slices of sequences beside the same model in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from context_cases import Mean, tokens, train_beside
from counted_graphs import counted_graphs
from mesh_cases import mesh_of
from tensor_cases import config_of

from zeropipe.core.schedule import Schedule
from zeropipe.engine import CausalLMLoss, Engine, hf_model, hf_stages, parallelize
from zeropipe.errors import ConfigError


def train_in_slices(
    schedule: Schedule, sizes: dict[str, int], kind: str, changes: dict[str, Any], batches: dict[str, Any],
    options: dict[str, Any], steps: int = 2,
) -> dict[str, float]:  # fmt: skip
    """AdamW steps with clipping beside one process; the largest differences."""
    config, mesh = config_of(kind, **changes), mesh_of(sizes)
    plain = hf_model(config)
    stages = hf_stages(config, schedule, mesh["pp"].get_local_rank())
    if len(sizes) > 1:
        parallelize(stages, mesh)
    seen = train_beside(plain, schedule, stages, sizes, batches, options, steps)
    for stage in stages.values():
        assert not stage.slices._kept  # nothing is kept after a step
    return seen


def train_compiled(schedule: Schedule, kind: str, options: dict[str, Any], steps: int) -> tuple[dict[str, float], int]:
    """`train_in_slices` with compiled blocks, and the number of graphs."""
    with counted_graphs() as graphs:
        seen = train_in_slices(schedule, {"pp": 2}, kind, {}, {}, options | {"compile": True}, steps)
    return seen, len(graphs)


def refusal_of(schedule: Schedule, options: dict[str, Any]) -> str:
    """The error of an engine with these options."""
    with pytest.raises(ConfigError) as caught:
        Engine(schedule, hf_stages(config_of("llama"), schedule, 0), **options)
    return str(caught.value)


def refusals_of_steps(schedule: Schedule) -> dict[str, str]:
    """The errors of steps that an engine with slices cannot run."""
    data, found = tokens(schedule.num_microbatches, 0), {}
    with Engine(schedule, hf_stages(config_of("llama"), schedule, 0)) as engine:
        short = [{name: x[..., :3] for name, x in batch.items()} for batch in data]
        calls = {
            "loss": lambda: engine.train_step(data, Mean()),
            "short": lambda: engine.train_step(short, CausalLMLoss()),
            "run": lambda: engine.run(data, lambda *_: None),
        }
        for name, call in calls.items():
            with pytest.raises(ConfigError) as caught:
                call()
            found[name] = str(caught.value)
        assert engine.train_step(data, CausalLMLoss()).count > 0
    return found


# of `peak_activations`: layers of a rank, keys and values, tokens, width, bytes
KEY_BYTES = 2 * 2 * (2 * 64) * 64 * 8


def peak_activations(schedule: Schedule) -> float:
    """What the activations of this rank take at most, in bytes, as recorded."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_key_value_heads": 4}
    mesh, config = mesh_of({"pp": 2}), config_of("llama", **sizes)
    ids = torch.randint(16, (2, 64), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": ids, "labels": ids}] * schedule.num_microbatches
    stages = hf_stages(config, schedule, mesh["pp"].get_local_rank())
    with Engine(schedule, stages, mesh=mesh, record=True) as engine:
        for _ in range(2):  # the first one allocates gradients
            engine.train_step(data, CausalLMLoss())
        timeline = engine.timeline()
    assert timeline.schedule.num_slices == schedule.num_slices
    rank = mesh["pp"].get_local_rank()
    begin, end = timeline.schedule.packed.offsets[rank : rank + 2]
    assert timeline.memory is not None
    levels = memoryview(timeline.memory.after).cast("d")[begin:end]
    return max(levels) - levels[-1]
