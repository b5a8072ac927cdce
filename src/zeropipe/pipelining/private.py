"""Every private name of torch.distributed.pipelining in one place: what to look at when torch changes."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _Action as Action
from torch.distributed.pipelining.schedules import _PipelineSchedule as Base
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as Runtime
from torch.distributed.pipelining.stage import _PipelineStage as TracedStage
from torch.distributed.pipelining.stage import _PipelineStageBase as AnyStage

__all__ = ["Action", "AnyStage", "Base", "Runtime", "TracedStage", "schedules"]


def actions(rows: Iterable[Iterable[object]]) -> dict[int, list[Any]]:
    """Rows of steps as torch keeps them: its own actions, by rank."""
    return {rank: [Action.from_str(str(step)) for step in row] for rank, row in enumerate(rows)}


def csv_of(order: Mapping[int, Sequence[Any]]) -> str:
    """torch's actions by rank as its CSV; what is None is a pause."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank in sorted(order):
        writer.writerow("" if action is None else str(action) for action in order[rank])
    return out.getvalue()


def stranger(stage: Any) -> str | None:
    """What a traced stage takes from elsewhere than from the stage before, in words."""
    if not isinstance(stage, TracedStage) or stage.is_first:
        return None
    for place, argument in enumerate(stage.node.args):
        node, item = argument, 0
        if node.op == "call_function":  # one of several outputs
            node, item = node.args[0], node.args[1]
        if node.op == "placeholder":
            return f"the model's input {node.name!r}"
        source = stage.submod_to_stage_index.get(node.name)
        if source != stage.stage_index - 1:
            return f"an output of stage {source}"
        if item != place:
            return f"output {item} of stage {source} as its argument {place}"
    return None


def copied(stage: Any) -> list[str]:
    """The parameters of a traced stage that other stages of the model use, too: torch gives each a copy of its own."""
    if not isinstance(stage, TracedStage):
        return []
    users = Counter(name for part in stage.pipe_info.graph.owning_module.children() for name in _names(part))
    return [name for name in _names(stage.submod) if users[name] > 1]


def _names(part: nn.Module) -> set[str]:
    """The parameters of a traced stage by their names in the model: a second call of a module is named b@1."""
    return {re.sub(r"@\d+", "", name) for name, _ in part.named_parameters()}


def leaves(value: Any) -> list[Any]:
    """What a nested value holds."""
    return list(torch.utils._pytree.tree_leaves(value))


def detached(output: Any) -> Any:
    """An output without the way back."""
    return torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, output)
