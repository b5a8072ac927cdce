"""Compiles the kernels of searches and of large schedules beside the first tests, which need none of them.

Each kernel is kept as soon as it is compiled, those of large schedules first, which more tests ask for: workers that
come to them later find most or all of them.
"""

from zeropipe.searching.ready import make_ready

make_ready(num_actions=1_000_000)
