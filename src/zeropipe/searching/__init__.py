"""Schedules found for given costs and limits, and how far they are from the best possible."""
