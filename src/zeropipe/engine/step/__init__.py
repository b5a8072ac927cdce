"""One step on one rank: the row of a Program as callables, losses, gradients, what was measured."""
