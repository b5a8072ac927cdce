"""Every private or undocumented call of torch, in one place: what to look at when torch changes.

comm: the store, process groups and collectives
tensors: memory, DTensor, nested values, sums over lists of tensors
autograd: graphs, saved tensors, selective checkpointing, the profiler
optimizers: hooks of optimizers, and what schedulers of learning rates ask them
saved: where tensors are kept for a backward pass
attention: kernels for packed rows
float8: numbers of 8 bits and their products
partial_attention: attention to some of the keys, with what merges it
compile: the compiler, and what its versions get wrong
"""
