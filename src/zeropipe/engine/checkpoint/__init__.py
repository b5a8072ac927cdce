"""Checkpoints of a training run, for any layout: saved, loaded, converted; and whole weights, one after the other."""
