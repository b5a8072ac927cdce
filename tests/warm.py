"""Compiles the kernels of searches and of large schedules, once for all workers that will ask for them at once."""

import zeropipe as zp

costs = zp.Costs(f=1.0, i=1.2, w=0.7, p2p=0.05, memory_limit=3)
zp.search(ranks=4, microbatches=8, costs=costs, steps=20)
zp.search(ranks=4, microbatches=8, stages_per_rank=2, placement=zp.vee, costs=costs, steps=200)
large = zp.build("zb-h1", ranks=16, microbatches=6000)
zp.check(large)
zp.simulate(large)
