"""Compile the kernels of searches and of large schedules while the first tests, which need none of them, run.

Each kernel is cached as soon as it is compiled. Those of large schedules, which more tests use, come first.
"""

from zeropipe.searching.warm_kernels import warm_kernels

warm_kernels(num_actions=1_000_000)
