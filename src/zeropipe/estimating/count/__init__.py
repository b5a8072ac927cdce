"""Count the operators of a model's layers on the meta device, without weights and without a GPU.

count          Counter: a model -> the operators of each kind of layer
record         every operator that a layer runs: what it reads and writes, what autograd saves for it
shard          a stage sharded over `tp`, as its first GPU has it
operators      recorded calls -> operators: each product, and the rest as one
fusion         what a compiler fuses, and what it saves for the backward
meta_private   private API of torch
"""
