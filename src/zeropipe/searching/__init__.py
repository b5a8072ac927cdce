"""Schedule search: `zp.search` and `zeropipe search`. docs/search-method.md has the mathematics.

- `search`: `zp.search` and its arguments.
- `result`: what it returns.
- `driver`: the course of a search: candidates, local search, bounds, the solver, smaller memory limits.
- `task`, `tables`: sizes, costs and memory as flat arrays for the kernels.
- `evaluator`, `row_kernels`: simulate rows, or write them by a dispatch rule.
- `candidates`: schedules to start from.
- `local_search`, `local_search_kernel`: simulated annealing over rows and over dispatch rules.
- `overlap_search`: which F and B of a rank run together as Overlaps.
- `bounds`: proven lower bounds.
- `solver`: CP-SAT on small tasks.
- `memory_saving`: schedules that checkpoint some F, or copy some activations to the host.
- `sliced`: schedules with slices of sequences, by lags of each rank.
- `warm_kernels`: compile or load the kernels.
"""
