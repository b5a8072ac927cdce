"""Schedules that a search starts from.

- `registered`: built-in schedules and users' own, and rows that always fit.
- `rules`: rows written by dispatch rules; for large tasks with fewer microbatches, and then stretched.
- `beams`, `beam_kernel`: many partial schedules that are extended side by side.
"""
