"""Runs schedules on torch.distributed: stages, split backward, executor, recorder."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropipe.engine.engine import Engine
    from zeropipe.engine.losses import CausalLMLoss, StepResult
    from zeropipe.engine.measure import Measured, measure
    from zeropipe.engine.stages import hf_model, hf_stages, module_stages

# name -> module, imported when first used: plans need no torch
_MODULE_OF = {
    "Engine": "engine", "CausalLMLoss": "losses", "StepResult": "losses", "Measured": "measure", "measure": "measure",
    "hf_model": "stages", "hf_stages": "stages", "module_stages": "stages",
}  # fmt: skip
__all__ = ["CausalLMLoss", "Engine", "Measured", "StepResult", "hf_model", "hf_stages", "measure", "module_stages"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zeropipe.engine' has no attribute {name!r}")
    require_torch()
    value = getattr(import_module(f"zeropipe.engine.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def require_torch() -> None:
    """MissingExtra, which says how to get it, if torch is not installed."""
    try:
        import torch  # noqa: F401
    except ImportError:
        from zeropipe.errors import MissingExtra

        raise MissingExtra("torch", "engine") from None
