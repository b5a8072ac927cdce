"""Lower bounds: what no schedule can beat.

- `lower_bound`: the best of all bounds.
- `rank_bounds`: the path of one microbatch that is alone; closed formulas for one rank, and for serial links.
- `subset_bound`, `subset_kernel`, `pending_w`: a few ranks in the best of all orders, with their memory.
- `slice_bound`: with slices of sequences.
- `turn_bound`, `turn_kernel`: microbatches that take turns in the memory of a rank and pass each other.
"""
