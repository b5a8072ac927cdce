"""A run in words."""

from __future__ import annotations

from pathlib import Path

from zeropipe.core.model.layers import counts_text
from zeropipe.core.units import count_text
from zeropipe.train.config.tables import RunConfig


def title_text(config: RunConfig) -> str:
    return f"{Path(config.model.path).name} trained with {config.schedule.name}"


def mesh_text(config: RunConfig) -> str:
    return " x ".join(f"{name} {size}" for name, size in config.mesh.sizes.items() if size > 1) or "one process"


def facts_text(config: RunConfig) -> str:
    """What there is to know about the run, in one line."""
    data = config.data
    words = [
        mesh_text(config),
        f"{count_text(data.batch, 'sequence')} of up to {count_text(data.sequence, 'token')} per step",
        f"{count_text(config.num_microbatches, 'microbatch')} per pipeline",
        config.model.dtype,
        *(["LoRA"] if config.lora else []),
        *(["compiled"] if config.engine.compile else []),
        *([f"checkpointing {config.engine.ac}"] if config.engine.ac != "none" else []),
    ]
    return " · ".join(words)


def setup_text(config: RunConfig) -> str:
    """What must be the same for two steps to take the same time, in words."""
    data, engine = config.data, config.engine
    layers = f" layers {counts_text(config.schedule.layers)}" if config.schedule.layers else ""
    more = "".join(f", {name}" for name in ("compile", "dynamic_weights", "offload") if getattr(engine, name))
    return (
        f"{config.schedule.name}{layers} on {mesh_text(config)}: {config.num_microbatches} x {data.microbatch} x "
        f"{data.sequence}, ac {engine.ac}{more}"
    )
