"""Compiles the kernels of searches and of large schedules beside the first tests, which need none of them.

Each kernel is kept as soon as it is compiled, so that workers that ask for them later find most or all of them.
"""

from zeropipe.search.ready import make_ready

make_ready(num_actions=1_000_000)
