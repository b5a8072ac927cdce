"""Compiles the kernels of searches and of large schedules, once for all workers that will ask for them at once."""

from zeropipe.search.ready import make_ready

make_ready(num_actions=1_000_000)
