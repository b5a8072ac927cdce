"""Expert parallelism: the experts of every layer divided over a part of a data dimension of the mesh."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from zeropipe.core.mesh import EXPERTS, expert_dimension, refuse_ep
from zeropipe.engine.backward.exchange import ExpertGroup
from zeropipe.engine.backward.expert_adapters import has_foreign_adapters
from zeropipe.engine.backward.experts import is_routed_stack
from zeropipe.engine.layout import EXPERT_DATA, Layout
from zeropipe.engine.mesh.ep_check import check_divided_experts
from zeropipe.engine.mesh.expert_stacks import divide_stacks, find_stacks
from zeropipe.engine.mesh.tp_layers import ParameterShards
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.torch_private.comm import unflatten
from zeropipe.errors import ConfigError, short

DISPATCHES = ("expert", "process")


def divide_mesh(mesh: DeviceMesh, layout: Layout, ep: object) -> DeviceMesh | None:
    """The mesh with `edp` and `ep` in place of the data dimension that ep divides; None for ep=1."""
    if isinstance(ep, bool) or not isinstance(ep, int) or ep < 1:
        raise ConfigError(f"ep={short(ep)}: must be a positive integer")
    if reason := refuse_ep({**layout.sizes, EXPERTS: ep}):
        raise ConfigError(reason)
    if ep == 1:
        return None
    name = expert_dimension(layout.sizes)
    return unflatten(mesh, name, (layout.sizes[name] // ep, ep), (EXPERT_DATA, EXPERTS))


def apply_ep(stages: Iterable[Any], mesh: DeviceMesh, dispatch: object = "expert") -> None:
    """Divide the experts of stages over the `ep` of such a mesh, in place.

    Every process keeps some experts of each layer, and computes them for the tokens of all `ep` processes: each sum of
    gradients over these is there already, and no factor is needed.
    """
    if dispatch not in DISPATCHES:
        raise ConfigError(f"dispatch={short(dispatch)}: must be {' or '.join(map(repr, DISPATCHES))}")
    once = dispatch == "process"
    shards = ParameterShards(ExpertGroup.from_mesh(mesh[EXPERTS], once), mesh[EXPERTS])
    for stage in stages:
        if isinstance(stage, HFStage):
            check_divided_experts(stage, once)
        stacks = find_stacks(stage)
        if has_foreign_adapters(stage, is_routed_stack):
            raise ConfigError("an adapter on more of experts than their weights: leave it out, or leave out ep")
        divide_stacks(stacks, shards)
        stage.expert_mesh = mesh
