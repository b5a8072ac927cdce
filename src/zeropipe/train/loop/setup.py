"""From a training file to an Engine on this rank, and the checks of set-up."""

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
from zeropipe.engine.comm.collective import nothing, on_all_ranks, require_same
from zeropipe.engine.comm.ranks import Ranks
from zeropipe.engine.engine import Engine
from zeropipe.engine.mesh.parallelize import parallelize
from zeropipe.engine.run.job import DTYPES, create_mesh, select_device
from zeropipe.engine.stages.adapters import compute_adapters_in
from zeropipe.engine.stages.build import hf_stages
from zeropipe.engine.stages.small_model import nonzero_dropout
from zeropipe.errors import ConfigError, MissingExtra, first_line
from zeropipe.train.compiling import is_compiled
from zeropipe.train.config.file_rules import ADAPTER_CONFIG
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.data.loader import EvaluationData, TrainingData
from zeropipe.train.inputs import choose_layers, has_dense_mask, load_model_config, load_text_config
from zeropipe.train.schedule import build_run_schedule

COMPARED_BYTES = 65536  # at the end of a file, between machines


@dataclass(frozen=True)
class RankPosition:
    """The device of this process, and its position in the mesh."""

    device: torch.device
    mesh: Any
    rank: int  # in its pipeline
    pipeline: int  # index of its pipeline, which has its own microbatches


def find_position(config: RunConfig, ranks: Ranks) -> RankPosition:
    """The position of this process. The mesh has pp, and the other dimensions of more than one process.

    ConfigError on all ranks if their training files or model files differ.
    """
    kind = config.engine.device
    device = select_device(("cuda" if torch.cuda.is_available() else "cpu") if kind == "auto" else kind)
    ranks.enter("comparing options and files")
    require_same(ranks, lambda: _list_fields(config), "training file and options")
    require_same(ranks, lambda: _list_files(config), "files of the model")
    sizes = tuple((name, size) for name, size in config.mesh.sizes.items() if size > 1 or name == "pp")
    mesh = create_mesh(sizes, device, ranks)
    coordinate = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate()))
    pipeline = 0
    for name in DATA_DIMENSIONS:
        pipeline = pipeline * dict(sizes).get(name, 1) + coordinate.get(name, 0)
    return RankPosition(device, mesh, coordinate["pp"], pipeline)


def _list_fields(config: RunConfig) -> dict[str, object]:
    """The values of all fields by dotted name."""
    tables = config.model_dump(mode="json")
    return {f"{table}.{name}": value for table, fields in tables.items() for name, value in (fields or {}).items()}


def _list_files(config: RunConfig) -> dict[str, object]:
    """A signature of each file of the model, to compare the copies of several machines."""
    path = Path(config.model.path)
    found = sorted([*path.glob("*.safetensors"), path / "config.json"] if path.is_dir() else [path])
    if config.model.weights != "load":
        found = [file for file in found if has_suffix(file, ".json")]
    return {str(file): _sign_file(file) for file in found if file.is_file()}


def _sign_file(file: Path) -> str:
    """The size of a file, and a checksum of its last bytes."""
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - COMPARED_BYTES))
        return f"{size} bytes, sum {zlib.crc32(opened.read()):08x}"


def build_stages(config: RunConfig, position: RankPosition, ranks: Ranks) -> dict[int, Any]:
    """This rank's stages, prepared for the mesh, once all ranks have built theirs."""
    ranks.enter("building its stages", busy=True)
    stages, _ = on_all_ranks(ranks, lambda: _build_stages(config, position), share=nothing, names_rank=False)
    return stages


def _build_stages(config: RunConfig, position: RankPosition) -> dict[int, Any]:
    schedule = build_run_schedule(config)
    dtype = DTYPES[config.model.dtype]
    stages = hf_stages(
        _model_source(config), schedule, position.rank, layers=choose_layers(config, schedule),
        dtype=stored_dtype(config), device=position.device, seed=config.train.seed, adapter=_adapter_source(config),
        attention=config.engine.attention,
    )  # fmt: skip
    is_mixed = config.mesh.num_shards > 1 and dtype == torch.bfloat16
    parallelize(
        stages, position.mesh, sequence_parallel=config.mesh.sequence_parallel, offload=config.engine.offload,
        dtype=dtype if is_mixed else None, ep=config.mesh.ep, dispatch=config.mesh.dispatch,
        cp_exchange=config.mesh.cp_exchange, shard_cp=config.mesh.shard_cp,
        sequence=None if is_compiled(config, position.device.type) or has_dense_mask(config) else config.data.sequence,
    )  # fmt: skip
    if config.lora is not None and dtype == torch.bfloat16 and position.device.type == "cuda":
        for stage in stages.values():
            compute_adapters_in(stage, dtype)  # a GPU computes float32 products without tensor cores
    if not is_mixed and dtype == torch.bfloat16 and config.optimizer.master_weights:
        for stage in stages.values():
            main_gradients(stage, torch.float32)
    return stages


def make_engine(config: RunConfig, position: RankPosition, stages: dict[int, Any]) -> Engine:
    """The Engine with this rank's stages."""
    table, kind = config.engine, position.device.type
    direct = table.direct_gradients
    return Engine(
        build_run_schedule(config), stages, mesh=position.mesh, device=position.device,
        compile=is_compiled(config, kind), ac=table.ac, split=table.split, overlap=table.overlap,
        dynamic_weights=table.dynamic_weights,
        direct_gradients=kind == "cuda" if direct is None else direct,
        slice_sizes=config.schedule.slice_sizes, fused_head=table.fused_head, regather=table.shards == "regather",
        float8=table.float8,
        gradients=table.gradients,
        timeout=table.timeout,
    )  # fmt: skip


def require_packing(config: RunConfig, engine: Engine, *sets: TrainingData | EvaluationData | None) -> None:
    """Raise ConfigError for packed data if the model would attend from one sample to another."""
    if not any(data is not None and data.is_packed for data in sets):
        return
    stages: list[Any] = list(engine.stages.values())
    for stage in stages:
        if not stage.family.can_pack:
            raise ConfigError(
                f"data.packing=true: model_type={stage.lm.config.model_type!r} does not separate packed samples; "
                "set data.packing=false"
            )
        most = stage.family.max_packed_row
        if most is not None and config.data.sequence > most:
            raise ConfigError(
                f"data.sequence={config.data.sequence}: model_type={stage.lm.config.model_type!r} separates packed "
                f"samples in rows of at most {most} tokens only; set a smaller data.sequence, or data.packing=false"
            )


def stored_dtype(config: RunConfig) -> torch.dtype:
    """The dtype in which weights are stored.

    Sharded weights with master weights are stored in float32, and FSDP casts them when it gathers them. Without shards
    they are stored in 16 bits, and the optimizer has the float32 master weights.
    """
    dtype = DTYPES[config.model.dtype]
    has_masters = config.optimizer.master_weights and config.lora is None
    return torch.float32 if dtype == torch.bfloat16 and config.mesh.num_shards > 1 and has_masters else dtype


def _model_source(config: RunConfig) -> Any:
    """The directory to load weights from, or a config for random weights."""
    path = Path(config.model.path)
    if config.model.weights == "load":
        return path
    from transformers import AutoConfig

    data = load_model_config(config)
    try:
        found = AutoConfig.for_model(**data)
    except Exception as error:  # of any type: transformers does not know the type, or refuses a value
        raise ConfigError(
            f"model.path={config.model.path!r}: transformers cannot create a model of model_type="
            f"{data.get('model_type')!r}: {first_line(error)}"
        ) from None
    found._name_or_path = str(path) if path.is_dir() else ""  # the export copies its tokenizer
    return found


def _adapter_source(config: RunConfig) -> Any:
    table = config.lora
    if table is None:
        return None
    if table.adapter is not None:
        return table.adapter
    try:
        from peft import LoraConfig
    except ImportError:
        raise MissingExtra("peft", "peft") from None
    targets = table.target_modules
    return LoraConfig(
        r=table.rank, lora_alpha=table.alpha, lora_dropout=table.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets), task_type="CAUSAL_LM",
    )  # fmt: skip


def random_fields(config: RunConfig) -> dict[str, float]:
    """The non-zero fields of the model or its adapter that draw random numbers, like dropout."""
    found = nonzero_dropout(load_text_config(config))
    table = config.lora
    if table is not None and table.adapter is None:
        found |= nonzero_dropout({"lora.dropout": table.dropout})
    elif table is not None:
        found |= nonzero_dropout(json.loads((Path(str(table.adapter)) / ADAPTER_CONFIG).read_text()))
    return found


@contextmanager
def use_deterministic(enabled: bool) -> Iterator[None]:
    """A context with torch's deterministic algorithms, which restores the earlier setting."""
    before, cudnn = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if enabled:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.backends.cudnn.benchmark = cudnn
