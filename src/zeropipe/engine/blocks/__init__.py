"""Transformer blocks: activation checkpointing and compilation."""
