"""Training files for the tests."""

GOOD = """
[model]
path = "tiny-qwen3"
weights = "random"
[mesh]
pp = 2
[data]
sequence = 64
[train]
steps = 10
"""
