"""Load what a training file names: the model's config, the schedule, the layers of each stage, the costs of layers.

Nothing here needs torch, except counting the parameters of a model whose shapes are not tabulated.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropipe.core.files import COSTS_SUFFIXES, SCHEDULE_SUFFIXES, has_suffix, read_text
from zeropipe.core.limits import COMMAND_LINE
from zeropipe.core.model.configs import find_built_in, suggest_model
from zeropipe.core.model.cp_exchange import HEADS, AttentionHeads
from zeropipe.core.model.layers import layer_counts, num_stages_for, read_num_layers, require_layer_counts
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Origin, Timeline
from zeropipe.core.units import count_text
from zeropipe.engine.run.spec import Job, built_in_config
from zeropipe.errors import ConfigError
from zeropipe.schedules.user import load_any
from zeropipe.sim.layer_costs import LayerCosts
from zeropipe.train.compiling import is_compiled, is_estimated_compiled, predicted_device
from zeropipe.train.config.tables import LoraTable, RunConfig

if TYPE_CHECKING:
    from zeropipe.estimating.counted import CountedModel
    from zeropipe.estimating.model import ShapedModel

_HUB_NAME = re.compile(r"[\w-]+/[\w.-]+")


def load_model_config(config: RunConfig) -> dict[str, Any]:
    """The config of a model directory, a config.json or a built-in model, as a dict."""
    model = config.model
    if find_built_in(model.path) is not None:
        return built_in_config(
            Job(model.path, num_layers=model.num_layers, vocabulary=model.vocabulary, sequence=config.data.sequence)
        )
    file = Path(model.path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        # a run downloads nothing
        download = f" (`hf download {model.path} --local-dir ...`)" if _HUB_NAME.fullmatch(model.path) else ""
        raise ConfigError(
            f"model.path={model.path!r} does not exist; use a directory with a config.json{download}, or a built-in "
            f"model: {suggest_model(model.path)}"
        )
    try:
        data = json.loads(read_text(file, COMMAND_LINE, "the model's config"))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        data = None
    if not isinstance(data, dict):
        raise ConfigError(f"{file} is not a model config; write one with save_pretrained")
    return data


def load_text_config(config: RunConfig) -> dict[str, Any]:
    """The model's config, with the fields of its text decoder at the top level."""
    data = load_model_config(config)
    text = data.get("text_config")
    return {**data, **text} if isinstance(text, dict) else data


def open_shapes(config: RunConfig) -> ShapedModel | CountedModel:
    """The model as the estimator sees it. The last one is cached, because counting a model builds it."""
    return _open_shapes(json.dumps(load_model_config(config)))


@lru_cache(maxsize=1)
def _open_shapes(data: str) -> ShapedModel | CountedModel:
    from zeropipe.estimating.model import open_model

    return open_model(json.loads(data))


def count_layers(config: RunConfig) -> int:
    """The number of layers of the model."""
    found = read_num_layers(load_text_config(config))
    if not isinstance(found, int):
        raise ConfigError(f"{config.model.path}: its config has no num_hidden_layers, so it cannot be cut into stages")
    return found


def choose_stages_per_rank(config: RunConfig) -> int | None:
    """Stages on each rank: `stages_per_rank`, or as `layers_per_stage` implies. None: the schedule's default."""
    table, ranks = config.schedule, config.mesh.pp
    if table.layers_per_stage is None:
        return table.stages_per_rank
    stages = num_stages_for(count_layers(config), table.layers_per_stage, ranks, table.first_less, table.last_less)
    if table.stages_per_rank is not None and table.stages_per_rank * ranks != stages:
        raise ConfigError(
            f"schedule.layers_per_stage={table.layers_per_stage} makes {stages // ranks} stages per rank, not "
            f"stages_per_rank={table.stages_per_rank}; leave out one of them"
        )
    return stages // ranks


def build_schedule(config: RunConfig) -> Schedule:
    """The schedule of one pipeline."""
    table, ranks = config.schedule, config.mesh.pp
    is_file = has_suffix(table.name, *SCHEDULE_SUFFIXES)
    found = load_any(
        table.name,
        ranks=None if is_file else ranks,
        microbatches=None if is_file else config.num_microbatches,
        stages_per_rank=choose_stages_per_rank(config),
        **({} if table.slices == 1 else {"slices": table.slices}),
        **table.options,
    )
    schedule = found.schedule if isinstance(found, Timeline) else found
    if schedule.num_ranks != ranks:
        raise ConfigError(
            f"schedule.name={table.name!r} is for {count_text(schedule.num_ranks, 'rank')}, mesh.pp={ranks}; set "
            f"mesh.pp={schedule.num_ranks}, or use another schedule"
        )
    return schedule


def choose_layers(config: RunConfig, schedule: Schedule) -> tuple[int, ...]:
    """The number of layers of each stage: `schedule.layers`, balanced by time, or even."""
    table, num_layers = config.schedule, count_layers(config)
    if table.layers is not None:
        return require_layer_counts(table.layers, num_layers, schedule.num_stages)
    if table.balance == "time":
        from zeropipe.balancing.balance import balance

        costs = load_layer_costs(config)
        if costs is None:
            raise ConfigError(
                "schedule.balance='time' needs costs; set schedule.costs to a costs file or the name of a GPU"
            )
        setting = costs.setting(
            ac=config.engine.ac, microbatch_size=config.data.microbatch, tp=config.mesh.tp,
            compile=is_compiled(config, predicted_device(config, costs)),
            sequence_parallel=config.mesh.sequence_parallel,
            ep=config.mesh.ep if any(setting.ep == config.mesh.ep for setting in costs.settings) else 1,
            cp=config.mesh.cp,
        )  # fmt: skip
        return balance(costs, schedule, setting=setting, ac=config.engine.ac, shards=config.mesh.num_shards).counts
    return layer_counts(num_layers, schedule.num_stages, table.first_less, table.last_less)


def describe_origin(config: RunConfig, schedule: Schedule) -> Origin:
    """The settings of this run that a recorded step is stored with. What `engine.compile` came to is settled."""
    data, engine = config.data, config.engine
    sequence = data.sequence if data.packing or data.kind == "synthetic" else 0  # padded rows differ in length
    return Origin(
        choose_layers(config, schedule), engine.ac, data.microbatch, sequence, config.model.dtype, config.mesh.tp,
        engine.compile is True, config.lora is not None, config.mesh.sequence_parallel,
    )  # fmt: skip


def estimated_rank(config: RunConfig) -> int | None:
    """The rank of the adapters that the run trains, if they can be estimated."""
    from zeropipe.estimating.estimate import can_estimate_adapters

    table = config.lora
    if table is None or explain_adapter(table) or not can_estimate_adapters(open_shapes(config)):
        return None
    return table.rank


def explain_adapter(table: LoraTable) -> str:
    """Why costs do not describe these adapters; empty if they may."""
    default = LoraTable()
    if table.adapter is not None:
        return "the run trains a saved adapter (lora.adapter), costs are for a new one"
    for name in ("target_modules", "dropout"):
        if getattr(table, name) != getattr(default, name):
            return f"costs of adapters are for lora.{name}={getattr(default, name)!r}, not {getattr(table, name)!r}"
    return ""


def has_dense_mask(config: RunConfig) -> bool:
    """Whether rows of several samples attend with a mask on a GPU, as no kernel keeps the samples apart.

    No kernel does it for a part of the tokens, as `cp` has them without an exchange of heads.
    """
    if not config.data.packing or config.data.kind == "synthetic":
        return False
    attention = config.engine.attention
    is_masked = attention == "sdpa" or (attention == "auto" and config.model.dtype != "bfloat16")
    return is_masked or not _has_whole_rows(config)


def _has_whole_rows(config: RunConfig) -> bool:
    """Whether processes of `cp` attend to whole rows, with some of the heads."""
    mesh = config.mesh
    if mesh.cp == 1 or mesh.cp_exchange != "auto":
        return mesh.cp == 1 or mesh.cp_exchange == HEADS
    heads = load_text_config(config).get("num_attention_heads")
    return AttentionHeads(heads if isinstance(heads, int) else None, 1, 1, mesh.tp).allow_exchange(mesh.cp)


def _list_modes(config: RunConfig) -> list[str]:
    """The modes of activation checkpointing whose costs a prediction needs, that of the run first.

    `none` says what is recomputed, `full` what F cost that the schedule says are checkpointed.
    """
    mode = config.engine.ac
    if mode != "none":
        return [mode, "none"]
    marks = config.schedule.checkpointing is not None or has_suffix(config.schedule.name, *SCHEDULE_SUFFIXES)
    return ["none", "full"] if marks else ["none"]


def load_layer_costs(config: RunConfig) -> LayerCosts | None:
    """`schedule.costs`: the costs of layers from a file, or estimated for a GPU. None if it is not set."""
    from zeropipe.estimating.estimate import estimate
    from zeropipe.estimating.gpus import GPUS
    from zeropipe.sim.costs_file import load_costs

    source = config.schedule.costs
    if source is None:
        return None
    if not has_suffix(source, *COSTS_SUFFIXES):
        dtype = config.model.dtype if config.model.dtype != "float64" else "float32"
        if source.lower() not in GPUS:
            raise ConfigError(
                f"schedule.costs={source!r} must be a costs file (.json, .toml) or one of the GPUs {', '.join(GPUS)}"
            )
        return estimate(
            open_shapes(config), gpu=source, sequence=config.data.sequence, dtype=dtype,
            ac=_list_modes(config),
            microbatch_size=config.data.microbatch, tp=config.mesh.tp,
            compile=is_estimated_compiled(config),
            sequence_parallel=config.mesh.sequence_parallel, lora=estimated_rank(config), ep=config.mesh.ep,
            dispatch=config.mesh.dispatch, dense_mask=has_dense_mask(config), cp=config.mesh.cp,
            fused_head=config.engine.fused_head, cp_exchange=config.mesh.cp_exchange,
            gpus_per_node=config.schedule.gpus_per_node,
        )  # fmt: skip
    costs = load_costs(source)
    if not isinstance(costs, LayerCosts):
        raise ConfigError(
            f"schedule.costs={source!r} has no costs of layers; create it with `zeropipe profile` or `estimate`"
        )
    if len(costs.layers) != count_layers(config):
        raise ConfigError(
            f"schedule.costs={source!r} is for {costs.model} with {count_text(len(costs.layers), 'layer')}, the model "
            f"has {count_layers(config)}; create it for this model"
        )
    return costs
