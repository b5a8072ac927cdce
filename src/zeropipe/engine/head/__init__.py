"""Head and loss as one: the loss of the last stage without logits that are whole in memory.

- `logits`: what a model does to the products of its head (scale, soft-cap): found on a small copy.
- `passes`: what is computed of a chunk of logits: their statistics, and their gradient in the same memory.
- `cross_entropy`: the autograd function that goes through the tokens in chunks.
- `terms`: the products that a head adds up: its weight, and those of an adapter.
- `fused`: the head of a stage, verified and switched on.
"""
