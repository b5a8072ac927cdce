"""Runs schedules on torch.distributed. The packages, in the order in which a run uses them:

- `stages`: a model cut along its depth; its weights loaded and saved.
- `blocks`: checkpointing and compilation of the transformer blocks in a stage.
- `backward`: I and W: one backward pass, and the weight-gradient products that it leaves behind; experts.
- `mesh`: stages sharded over data-parallel processes (FSDP2), and over `tp` and `ep`.
- `head`: the head of the last stage and its loss as one, in chunks of tokens.
- `comm`: connections and messages between ranks, heartbeats and errors.
- `step`: one rank's row of a Program: losses, gradients, the recorded timeline.
- `engine`, `options`, `setup`: `train_step`, `eval_step` and `forward`, their options and checks.
- `checkpoint`: a run's weights and optimizer on disk, for any layout; full weights for other programs.
- `run`: local processes, and the jobs of `zeropipe run`.
- `timing`: points in time on a device.
- `layout`: a rank's place in the mesh.
- `masters`, `low_bits`: float32 copies of 16-bit parameters, and their compressed form.
- `adam`, `adam_kernel`: steps of Adam over compressed copies as one kernel.
- `float8`: which layers compute in 8 bits.
- `torch_private`, `fsdp_private`, `transformers_private`: private names of torch and transformers, and nothing else.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeropipe.core.model.layers import layer_counts, num_stages_for
    from zeropipe.engine.backward.gradients import main_gradients
    from zeropipe.engine.backward.linear import defer
    from zeropipe.engine.backward.store import WeightStore
    from zeropipe.engine.blocks.compiling import prepare_blocks
    from zeropipe.engine.checkpoint.load import load_checkpoint
    from zeropipe.engine.checkpoint.save import save_checkpoint
    from zeropipe.engine.engine import Engine
    from zeropipe.engine.masters import MasterWeights
    from zeropipe.engine.mesh.parallelize import parallelize
    from zeropipe.engine.mesh.vocab_parallel import token_losses
    from zeropipe.engine.options import Options
    from zeropipe.engine.run.launch import LocalRanks, launch
    from zeropipe.engine.run.measure import Measured, measure
    from zeropipe.engine.run.rank import heartbeat
    from zeropipe.engine.run.torchrun import join_torchrun
    from zeropipe.engine.stages.build import hf_model, hf_stages, module_stages
    from zeropipe.engine.stages.save import save_stages
    from zeropipe.engine.step.expert_load import ExpertLoad, ExpertLoads
    from zeropipe.engine.step.losses import CausalLMLoss, LogProbabilities, StepResult

# name -> module, imported when first used: plans need no torch
_MODULE_OF = {
    "layer_counts": "core.model.layers", "num_stages_for": "core.model.layers",
    "defer": "engine.backward.linear",
    "WeightStore": "engine.backward.store", "main_gradients": "engine.backward.gradients",
    "prepare_blocks": "engine.blocks.compiling",
    "load_checkpoint": "engine.checkpoint.load", "save_checkpoint": "engine.checkpoint.save",
    "Engine": "engine.engine", "Options": "engine.options", "MasterWeights": "engine.masters",
    "parallelize": "engine.mesh.parallelize", "token_losses": "engine.mesh.vocab_parallel",
    "LocalRanks": "engine.run.launch", "heartbeat": "engine.run.rank", "launch": "engine.run.launch",
    "Measured": "engine.run.measure", "measure": "engine.run.measure",
    "join_torchrun": "engine.run.torchrun",
    "hf_model": "engine.stages.build", "hf_stages": "engine.stages.build", "module_stages": "engine.stages.build",
    "save_stages": "engine.stages.save",
    "CausalLMLoss": "engine.step.losses", "StepResult": "engine.step.losses",
    "LogProbabilities": "engine.step.losses", "ExpertLoad": "engine.step.expert_load",
    "ExpertLoads": "engine.step.expert_load",
}  # fmt: skip
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'zeropipe.engine' has no attribute {name!r}")
    require_torch()
    value = getattr(import_module(f"zeropipe.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def require_torch() -> None:
    """MissingExtra, which says how to get it, if torch is not installed."""
    try:
        import torch
    except ImportError:
        from zeropipe.errors import MissingExtra

        raise MissingExtra("torch", "engine") from None
