"""From a training file to an Engine on this rank."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zeropipe.core.files import has_suffix
from zeropipe.core.mesh import DATA_DIMENSIONS
from zeropipe.engine.backward.gradients import main_gradients
from zeropipe.engine.engine import Engine
from zeropipe.engine.mesh.parallelize import parallelize
from zeropipe.engine.run.job import DTYPES, device_of, mesh_of
from zeropipe.engine.run.meeting import require_same
from zeropipe.engine.stages.build import hf_stages
from zeropipe.engine.stages.chance import chances
from zeropipe.errors import ConfigError, MissingExtra
from zeropipe.train.config.file_rules import ADAPTER_CONFIG
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.data import EvaluationData, TrainingData
from zeropipe.train.inputs import build_schedule, choose_layers, load_model_config, load_text_config

TAIL = 65536  # bytes of a file that are compared between machines


@dataclass(frozen=True)
class Place:
    """Where this process is."""

    device: torch.device
    mesh: Any
    rank: int  # in its pipeline
    pipeline: int  # of those that have microbatches of their own


def place_of(config: RunConfig) -> Place:
    """Device and mesh: the pipeline's dimension, and others that have more than one process.

    ConfigError on all ranks unless they have the same training file and the same model.
    """
    wanted = config.engine.device
    device = device_of(("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted)
    require_same(_fields(config), "training file and options")
    require_same(_files(config), "files of the model")
    sizes = tuple((name, size) for name, size in config.mesh.sizes.items() if size > 1 or name == "pp")
    mesh = mesh_of(sizes, device)
    place = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate()))
    pipeline = 0
    for name in DATA_DIMENSIONS:
        pipeline = pipeline * dict(sizes).get(name, 1) + place.get(name, 0)
    return Place(device, mesh, place["pp"], pipeline)


def _fields(config: RunConfig) -> dict[str, object]:
    """All of them, by the names they have on the command line."""
    tables = config.model_dump(mode="json")
    return {f"{table}.{name}": value for table, fields in tables.items() for name, value in (fields or {}).items()}


def _files(config: RunConfig) -> dict[str, object]:
    """What tells copies of a model on several machines apart: sizes, and the last values of each file."""
    path = Path(config.model.path)
    found = sorted([*path.glob("*.safetensors"), path / "config.json"] if path.is_dir() else [path])
    if config.model.weights != "load":
        found = [file for file in found if has_suffix(file, ".json")]
    return {str(file): _signed(file) for file in found if file.is_file()}


def _signed(file: Path) -> str:
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - TAIL))
        return f"{size} bytes, sum {zlib.crc32(opened.read()):08x}"


def make_engine(config: RunConfig, place: Place) -> Engine:
    """The Engine with this rank's stages."""
    schedule = build_schedule(config)
    computed = DTYPES[config.model.dtype]
    stages = hf_stages(
        _model(config), schedule, place.rank, layers=choose_layers(config, schedule), dtype=kept_dtype(config),
        device=place.device, seed=config.train.seed, adapter=_adapter(config),
    )  # fmt: skip
    is_mixed = config.mesh.dp_shard > 1 and computed == torch.bfloat16
    parallelize(
        stages, place.mesh, sequence_parallel=config.mesh.sequence_parallel, offload=config.engine.offload,
        dtype=computed if is_mixed else None,
    )  # fmt: skip
    if not is_mixed and computed == torch.bfloat16 and config.optimizer.master_weights:
        for stage in stages.values():
            main_gradients(stage, torch.float32)
    table = config.engine
    return Engine(
        schedule, stages, mesh=place.mesh, device=place.device, compile=table.compile, ac=table.ac, split=table.split,
        dynamic_weights=table.dynamic_weights, direct_gradients=table.direct_gradients,
        regather=table.shards == "regather", timeout=table.timeout,
    )  # fmt: skip


def require_packing(engine: Engine, *sets: TrainingData | EvaluationData | None) -> None:
    """ConfigError at the start for packed rows of a model that would not keep samples apart."""
    if not any(data is not None and data.is_packed for data in sets):
        return
    stages: list[Any] = list(engine.stages.values())
    for stage in stages:
        if not stage.family.packs:
            raise ConfigError(
                f"data.packing=true: model_type={stage.lm.config.model_type!r} does not keep packed samples apart; "
                "set data.packing=false"
            )


def kept_dtype(config: RunConfig) -> torch.dtype:
    """What weights are kept in: sharded ones that are learned in float32 are float32 themselves, as is usual there.

    FSDP casts them when it gathers them. Elsewhere the optimizer has the float32 weights beside those in 16 bits.
    """
    dtype = DTYPES[config.model.dtype]
    learned = config.optimizer.master_weights and config.lora is None
    return torch.float32 if dtype == torch.bfloat16 and config.mesh.dp_shard > 1 and learned else dtype


def _model(config: RunConfig) -> Any:
    """A directory whose weights are loaded, or a config."""
    path = Path(config.model.path)
    if config.model.weights == "load":
        return path
    from transformers import AutoConfig

    found = AutoConfig.for_model(**load_model_config(config))
    found._name_or_path = str(path) if path.is_dir() else ""  # its tokenizer goes with the export
    return found


def _adapter(config: RunConfig) -> Any:
    table = config.lora
    if table is None:
        return None
    if table.adapter is not None:
        return table.adapter
    try:
        from peft import LoraConfig
    except ImportError:
        raise MissingExtra("peft", "peft") from None
    wanted = table.target_modules
    return LoraConfig(
        r=table.rank, lora_alpha=table.alpha, lora_dropout=table.dropout,
        target_modules=wanted if isinstance(wanted, str) else list(wanted), task_type="CAUSAL_LM",
    )  # fmt: skip


def chances_of(config: RunConfig) -> dict[str, float]:
    """By what the model or its adapter draws random numbers: dropout and its kin, above 0."""
    found = chances(load_text_config(config))
    table = config.lora
    if table is not None and table.adapter is None:
        found |= chances({"lora.dropout": table.dropout})
    elif table is not None:
        found |= chances(json.loads((Path(str(table.adapter)) / ADAPTER_CONFIG).read_text()))
    return found


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """torch's deterministic algorithms, and afterwards what was set before."""
    before, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = cudnn
