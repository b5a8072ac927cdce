"""Whether a run compiles its blocks: `engine.compile`, and what `auto` comes to.

Nothing here needs torch, but for sequence parallelism, where its version matters.
"""

from __future__ import annotations

from importlib.util import find_spec

from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.engine.run.spec import compiles_by_default
from zeropipe.sim.layer_costs import LayerCosts
from zeropipe.train.config.tables import RunConfig


def is_compiled(config: RunConfig, device: str) -> bool:
    """Whether the run compiles its blocks on a device of this type."""
    chosen = config.engine.compile
    if chosen != "auto":
        return chosen
    return compiles_by_default(device, config.model.dtype) and not _find_obstacle(config)


def is_estimated_compiled(config: RunConfig) -> bool:
    """Whether estimates for a run are of compiled blocks. A ring is estimated in blocks that are not."""
    return is_compiled(config, predicted_device(config)) and config.mesh.cp_exchange != "ring"


def explain_uncompiled(config: RunConfig, device: str) -> str:
    """Why `auto` does not compile where it usually does; empty if it does, or was not asked."""
    if config.engine.compile != "auto" or not compiles_by_default(device, config.model.dtype):
        return ""
    obstacle = _find_obstacle(config)
    return obstacle and f"engine.compile='auto' compiles no blocks: {obstacle}"


def predicted_device(config: RunConfig, costs: LayerCosts | None = None) -> str:
    """The type of the device that a prediction is for: that of the costs, unless the run is on a CPU."""
    is_gpu = costs is None or "gpu" in costs.machine
    return "cuda" if is_gpu and config.engine.device != "cpu" else "cpu"


def settle_compile(config: RunConfig, compiled: bool) -> RunConfig:
    """The config with what `auto` came to, as reports and checkpoints show it."""
    return config.model_copy(update={"engine": config.engine.model_copy(update={"compile": compiled})})


def _find_obstacle(config: RunConfig) -> str:
    """The setting with which blocks cannot be compiled, or were not measured to be faster; empty if there is none."""
    mesh, data, ac = config.mesh, config.data, config.engine.ac
    if data.kind != "synthetic" and not data.packing:
        return "rows of many lengths (data.packing=false) are not faster with it"
    if mesh.cp_exchange == "ring":
        return "they would be compiled around attention only (mesh.cp_exchange='ring')"
    if config.schedule.slices > 1:
        return f"they would be compiled around attention only (schedule.slices={config.schedule.slices})"
    if mesh.ep > 1 and Checkpointing.parse(ac).mode == "budget":
        return f"exchanges of experts do not run compiled with engine.ac={ac!r}"
    if mesh.sequence_parallel and not _compiles_gathered():
        return "with mesh.sequence_parallel this version of torch does not compile all of them; torch 2.13 does"
    return ""


def _compiles_gathered() -> bool:
    if find_spec("torch") is None:
        return True
    from zeropipe.engine.torch_private.compile import COMPILES_GATHERED

    return COMPILES_GATHERED
