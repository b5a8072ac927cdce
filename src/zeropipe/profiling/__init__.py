"""Profiles: the layers of a model, measured by running them through the engine.

spec     ProfileJob: the model and the settings to measure; no torch
groups   the groups of layers that are measured, however large the model is
measure  run the groups, record their steps, and measure messages between ranks
"""
