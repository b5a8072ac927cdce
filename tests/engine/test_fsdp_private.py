"""What we use of FSDP2's inside, in the form of this torch and of the oldest one."""

from types import SimpleNamespace as Some

import pytest
import torch
import torch.distributed as dist
from engine_helpers import ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from zeropipe.engine import fsdp_private


class Event:
    def __init__(self, ended):
        self.ended = ended

    def query(self):
        return self.ended


def unit(**context):
    group = Some(comm_ctx=Some(**context), fsdp_params=[])
    return Some(_get_fsdp_state=lambda: Some(_fsdp_param_groups=[group])), group.comm_ctx


def test_sums_that_have_ended_are_let_go():
    going, ended, none = (Some(event=e, reduce_scatter_input=torch.zeros(2)) for e in (Event(False), Event(True), None))
    several, context = unit(reduce_scatter_states=[ended, going, none])
    assert len(fsdp_private.gradient_storages(several)) == 3
    fsdp_private.free_reduced(several)
    assert context.reduce_scatter_states == [going]


@pytest.mark.parametrize("ended", [False, True])
def test_torch_2_11_has_one_sum_at_a_time(ended):
    state = Some(event=Event(ended), reduce_scatter_input=torch.zeros(2))
    one, context = unit(reduce_scatter_state=state)
    assert len(fsdp_private.gradient_storages(one)) == 1
    fsdp_private.free_reduced(one)
    assert context.reduce_scatter_state is (None if ended else state)
    assert len(fsdp_private.gradient_storages(one)) == (not ended)


def reduced_by_hand():
    """A unit gathered and reduced by our calls alone, as the engine does it: gradients are sums over processes."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    layer = nn.Linear(4, 2, bias=False)
    inputs = torch.full((1, 4), float(1 + dist.get_rank()))
    fully_shard(layer, mesh=mesh)
    (only,) = fsdp_private.units_of(layer)
    fsdp_private.sum_gradients(only)
    fsdp_private.allow_concurrent_reduces(only, 1)
    fsdp_private.lazy_init(layer)
    seen = []

    def entered():
        seen.append("entered")
        weights.wait()

    weights = fsdp_private.UnitWeights(only, entered, lambda forward: seen.append(f"left, forward={forward}"))
    assert not weights.is_available
    fsdp_private.disable_reduce(layer)
    weights.is_controlled = True
    weights.start()
    assert weights.is_available
    assert weights.is_pending
    layer(inputs).sum().backward()
    assert weights.is_available  # whatever the hooks want
    weights.reshard()
    assert not weights.is_available
    assert seen == ["entered", "left, forward=True", "entered", "left, forward=False"]
    ((module, name, shard),) = fsdp_private.list_shards(only)
    assert module is layer
    assert name == "weight"
    assert shard is layer.weight
    (whole,) = fsdp_private.unsharded_parameters(only)
    assert whole.shape == (2, 4)
    assert fsdp_private.has_gradient(only, whole)
    fsdp_private.reduce(only)
    assert fsdp_private.gradient_storages(only)
    fsdp_private.free_reduced(only)
    weights.is_controlled = False
    fsdp_private.wait_for_reduces(layer)
    gradient = layer.weight.grad.to_local()
    layer(inputs)  # outside of a step FSDP gathers by itself
    assert len(seen) == 4  # a reduce frees no weights: the Program says when
    return gradient


def test_a_unit_reduced_by_hand():
    for own in ranks(2).run(reduced_by_hand):
        assert torch.equal(own, torch.full((1, 4), 3.0))


def units_of_a_list():
    """torchtitan shards the last norm and the head together: one unit, which is gathered once."""
    mesh = init_device_mesh("cpu", (2,))
    layers = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    fully_shard(list(layers[1:]), mesh=mesh)
    fully_shard(layers, mesh=mesh)
    units = fsdp_private.units_of(layers)
    assert units == [layers[1], layers]
    assert [len(fsdp_private.list_shards(one)) for one in units] == [2, 1]
    return True


def test_modules_that_were_sharded_as_a_list_are_one_unit():
    assert all(ranks(2).run(units_of_a_list))
