"""Costs of the layers of a toy model with four layers of two kinds, in three settings."""

from dataclasses import replace

from zeropipe.sim.costs import Link
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, ParameterBytes, Setting

KINDS = {
    "embedding": LayerCost(0.1, 0, 0, parameters=100),
    "dense": LayerCost(1, 1.2, 0.8, activation=10, stash=8, workspace=3, message=4, parameters=50, flops=6),
    "experts": LayerCost(2, 2, 2, b=3.5, overlap=5, activation=30, stash=20, workspace=7, message=4, parameters=90),
    "head": LayerCost(0.5, 0.5, 0.5, activation=6, stash=6, parameters=100, spread={"f": 0.02}),
}
FULL = {**KINDS, "dense": replace(KINDS["dense"], i=2.2, activation=4)}
COSTS = LayerCosts(
    "toy", "profile", ("dense", "dense", "experts", "dense"),
    (Setting(KINDS), Setting(FULL, ac="full"), Setting(KINDS, ac="none", microbatch_size=2, compile=True)),
    after=("head",), link=Link(1e-5, 1e9), inter_node=Link(2e-5, None), state=ParameterBytes(2, 4, 12),
    machine={"gpu": "toy"}, versions={"torch": "2"},
)  # fmt: skip
