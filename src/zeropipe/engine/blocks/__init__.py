"""Transformer blocks: activation checkpointing and compilation.

compiling      prepare_blocks, set_blocks: switch checkpointing and compilation of blocks on and off
checkpointing  a block's forward under torch.utils.checkpoint, full or by operator, always or in marked F
recompute      the second forward of a checkpointed block: the inputs and buffers of the first, or an error
state          the tensors that a module keeps between forwards: buffers and attributes
"""
