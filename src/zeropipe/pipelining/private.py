"""Every private name of torch.distributed.pipelining in one file: what to check when torch changes."""

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


def to_torch_actions(rows: Iterable[Iterable[object]]) -> dict[int, list[Any]]:
    """Rows of steps as torch's own to_torch_actions, by rank."""
    return {rank: [Action.from_str(str(step)) for step in row] for rank, row in enumerate(rows)}


def to_csv(order: Mapping[int, Sequence[Any]]) -> str:
    """torch's to_torch_actions by rank as its CSV; None is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank in sorted(order):
        writer.writerow("" if action is None else str(action) for action in order[rank])
    return out.getvalue()


def find_foreign_input(stage: Any) -> str | None:
    """Describe an input of a traced stage that is not the output of the previous stage; None if there is none."""
    if not isinstance(stage, TracedStage) or stage.is_first:
        return None
    for index, argument in enumerate(stage.node.args):
        node, item = argument, 0
        if node.op == "call_function":  # one of several outputs
            node, item = node.args[0], node.args[1]
        if node.op == "placeholder":
            return f"the model's input {node.name!r}"
        source = stage.submod_to_stage_index.get(node.name)
        if source != stage.stage_index - 1:
            return f"an output of stage {source}"
        if item != index:
            return f"output {item} of stage {source} as its argument {index}"
    return None


def find_shared_parameters(stage: Any) -> list[str]:
    """The parameters of a traced stage that other stages use, too: torch gives each stage a copy."""
    if not isinstance(stage, TracedStage):
        return []
    users = Counter(name for part in stage.pipe_info.graph.owning_module.children() for name in _names(part))
    return [name for name in _names(stage.submod) if users[name] > 1]


def _names(part: nn.Module) -> set[str]:
    """Names in the model of a traced stage's parameters; torch names the second call of module b "b@1"."""
    return {re.sub(r"@\d+", "", name) for name, _ in part.named_parameters()}


def leaves(value: Any) -> list[Any]:
    """The leaves of a nested value."""
    return list(torch.utils._pytree.tree_leaves(value))


def detach(output: Any) -> Any:
    """A nested output without its autograd graph."""
    return torch.utils._pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, output)
