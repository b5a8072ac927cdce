"""Runs schedules on torch.distributed: stages, split backward, executor, recorder."""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ImportError:
    from zeropipe.errors import MissingExtra

    raise MissingExtra("torch", "engine") from None

from zeropipe.engine.engine import Engine
from zeropipe.engine.losses import CausalLMLoss, StepResult
from zeropipe.engine.measure import Measured, measure
from zeropipe.engine.stages import hf_model, hf_stages, module_stages

__all__ = ["CausalLMLoss", "Engine", "Measured", "StepResult", "hf_model", "hf_stages", "measure", "module_stages"]
