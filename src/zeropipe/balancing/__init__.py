"""Layers to stages: the slowest rank as fast as can be, within the memory of each."""
