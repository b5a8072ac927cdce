"""Cut a model's layers into stages so that the slowest rank is as fast as possible, within each rank's memory.

- `balance`: `zp.balance` and its result, the even cuts beside it, and the task made from costs and a schedule.
- `task`: the numbers of a balancing problem, and the time and memory of each rank under a cut.
- `exact`: optimal cuts by dynamic programming, with one or two stages per rank.
- `heuristics`: equal layers in closed form, and local search for the rest.
"""
