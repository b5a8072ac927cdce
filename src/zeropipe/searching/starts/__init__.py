"""Schedules that a search starts from: those with a name, dispatched ones, patterns that repeat."""
