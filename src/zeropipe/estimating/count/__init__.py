"""Counts what the layers of a model compute, move and keep, without memory and without a GPU: what estimates of models
stand on whose shapes nobody has written down."""
