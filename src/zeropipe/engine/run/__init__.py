"""Local processes, and `zeropipe run`: schedules on a model with synthetic tokens."""
