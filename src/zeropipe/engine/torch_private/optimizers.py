"""Private calls of torch's optimizers: their hooks, and what learning-rate schedulers ask them."""

from __future__ import annotations

from torch.optim import optimizer as torch_optimizer


def has_step_hooks(optimizer: torch_optimizer.Optimizer) -> bool:
    """Whether anything is called before or after the steps of an optimizer."""
    return any((
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
        torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks,
    ))  # fmt: skip


def mark_stepped(optimizer: torch_optimizer.Optimizer) -> None:
    """Tell learning-rate schedulers that an optimizer has made a step."""
    optimizer._opt_called = True  # type: ignore[attr-defined]
