"""Runs schedules on torch.distributed: stages, split backward, executor, recorder."""
