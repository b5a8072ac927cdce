"""What a training file means: the model's config, the schedule, the layers of each stage. No torch is needed for it."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeropipe.core.built_in import BUILT_IN
from zeropipe.core.files import COSTS, SCHEDULES, has_suffix, read_text
from zeropipe.core.layers import check_counts, layer_counts, num_stages_for
from zeropipe.core.limits import COMMAND_LINE
from zeropipe.core.origin import Origin
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.core.units import count_text
from zeropipe.engine.run.spec import Job, built_in, num_layers_in
from zeropipe.errors import ConfigError
from zeropipe.schedules.user import load_any
from zeropipe.sim.layer_costs import LayerCosts
from zeropipe.train.config.models import RunConfig

if TYPE_CHECKING:
    from zeropipe.estimating.counted import CountedModel
    from zeropipe.estimating.model import ShapedModel

_HUB = re.compile(r"[\w-]+/[\w.-]+")


def is_planned(config: RunConfig) -> bool:
    """Whether the model is a name of the planner's: its shapes are known, and nothing else."""
    from zeropipe.estimating.known import CONFIGS

    path = config.model.path
    return path not in BUILT_IN and path.lower() in CONFIGS and not Path(path).exists()


def model_data(config: RunConfig) -> dict[str, Any]:
    """The model's config as plain data: of a built-in one, a directory or a config.json, or a name of the planner's."""
    from zeropipe.estimating.known import CONFIGS

    model = config.model
    if is_planned(config):
        return dict(CONFIGS[model.path.lower()])
    if model.path in BUILT_IN:
        return built_in(
            Job(model.path, num_layers=model.num_layers, vocabulary=model.vocabulary, sequence=config.data.sequence)
        )
    file = Path(model.path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        # a name of the Hugging Face hub: nothing is downloaded in the middle of a job
        hub = f" (`hf download {model.path} --local-dir ...` makes one)" if _HUB.fullmatch(model.path) else ""
        raise ConfigError(
            f"model.path={model.path!r} is not there: give a directory with a config.json{hub}, or one of "
            f"{', '.join(BUILT_IN)}"
        )
    try:
        data = json.loads(read_text(file, COMMAND_LINE, "the model's config"))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        data = None
    if not isinstance(data, dict):
        raise ConfigError(f"{file} is not a model's configuration: save one with save_pretrained")
    return data


def shapes_of(config: RunConfig) -> ShapedModel | CountedModel:
    """The model as estimates see it. Opened once: one that has to be counted is built for that."""
    return _opened(json.dumps(model_data(config)))


@lru_cache(maxsize=1)
def _opened(data: str) -> ShapedModel | CountedModel:
    from zeropipe.estimating.model import open_model

    return open_model(json.loads(data))


def text_data(config: RunConfig) -> dict[str, Any]:
    """The part of the model's config that speaks of its decoder."""
    data = model_data(config)
    text = data.get("text_config")
    return {**data, **text} if isinstance(text, dict) else data


def num_layers_of(config: RunConfig) -> int:
    """How many layers the model has."""
    found = num_layers_in(text_data(config))
    if not isinstance(found, int):
        raise ConfigError(f"{config.model.path}: its config has no num_hidden_layers, so it cannot be cut into stages")
    return found


def stages_per_rank_of(config: RunConfig) -> int | None:
    """Stages on each rank; None: the schedule's own number."""
    table, ranks = config.schedule, config.mesh.pp
    per_rank = table.stages_per_rank
    if table.layers_per_stage is not None:
        wanted = num_stages_for(num_layers_of(config), table.layers_per_stage, ranks, table.first_less, table.last_less)
        if per_rank is not None and per_rank * ranks != wanted:
            raise ConfigError(
                f"schedule.layers_per_stage={table.layers_per_stage} makes {wanted // ranks} stages per rank, "
                f"stages_per_rank={per_rank} says another number: give one of them"
            )
        per_rank = wanted // ranks
    return per_rank


def schedule_of(config: RunConfig) -> Schedule:
    """The schedule of a pipeline."""
    table, ranks = config.schedule, config.mesh.pp
    is_file = has_suffix(table.name, *SCHEDULES)
    found = load_any(
        table.name,
        ranks=None if is_file else ranks,
        microbatches=None if is_file else config.num_microbatches,
        stages_per_rank=stages_per_rank_of(config),
        **table.options,
    )
    schedule = found.schedule if isinstance(found, Timeline) else found
    if schedule.num_ranks != ranks:
        raise ConfigError(
            f"schedule.name={table.name!r} is for {count_text(schedule.num_ranks, 'rank')}, mesh.pp={ranks}: make "
            f"mesh.pp={schedule.num_ranks}, or give another schedule"
        )
    return schedule


def layers_of(config: RunConfig, schedule: Schedule) -> tuple[int, ...]:
    """Layers of each stage."""
    table, number = config.schedule, num_layers_of(config)
    if table.layers is not None:
        return check_counts(table.layers, number, schedule.num_stages)
    if table.balance == "time":
        from zeropipe.balancing.balance import balance

        costs = costs_of(config)
        if costs is None:
            raise ConfigError("schedule.balance='time' needs costs: give schedule.costs, a file or the name of a GPU")
        shards = config.mesh.dp_shard
        return balance(costs, schedule, setting=setting_of(config, costs), ac=config.engine.ac, shards=shards).counts
    return layer_counts(number, schedule.num_stages, table.first_less, table.last_less)


def origin_of(config: RunConfig, schedule: Schedule) -> Origin:
    """What a recorded step is of."""
    data, engine = config.data, config.engine
    length = data.sequence if data.packing or data.kind == "synthetic" else 0  # padded rows are as long as they need
    return Origin(
        layers_of(config, schedule), engine.ac, data.microbatch, length, config.model.dtype, config.mesh.tp,
        engine.compile, config.lora is not None,
    )  # fmt: skip


def costs_of(config: RunConfig) -> LayerCosts | None:
    """The costs of the layers: those of a file, or estimated for a GPU; None where none are given."""
    from zeropipe.estimating.estimate import estimate
    from zeropipe.estimating.gpus import GPUS
    from zeropipe.sim.fit import load_costs

    given = config.schedule.costs
    if given is None:
        return None
    if not has_suffix(given, *COSTS):
        dtype = config.model.dtype if config.model.dtype != "float64" else "float32"
        if given.lower() not in GPUS:
            raise ConfigError(
                f"schedule.costs={given!r}: give a costs file (.json, .toml), or one of the GPUs {', '.join(GPUS)}"
            )
        return estimate(
            shapes_of(config), gpu=given, sequence=config.data.sequence, dtype=dtype, ac=config.engine.ac,
            microbatch_size=config.data.microbatch, tp=config.mesh.tp, compile=config.engine.compile,
        )  # fmt: skip
    found = load_costs(given)
    if not isinstance(found, LayerCosts):
        raise ConfigError(f"schedule.costs={given!r} is not of layers: make one with `zeropipe profile` or `estimate`")
    if len(found.layers) != num_layers_of(config):
        raise ConfigError(
            f"schedule.costs={given!r} is of {found.model} with {count_text(len(found.layers), 'layer')}, the model "
            f"has {num_layers_of(config)}: make it for this model"
        )
    return found


def setting_of(config: RunConfig, costs: LayerCosts) -> Any:
    """The setting of the costs that this run has."""
    return costs.setting(
        ac=config.engine.ac, microbatch_size=config.data.microbatch, tp=config.mesh.tp, compile=config.engine.compile
    )
