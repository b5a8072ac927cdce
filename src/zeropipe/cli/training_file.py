"""A training file in place of a job file: its schedule and sizes, and its model as options of `zeropipe run`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from zeropipe.core.files import SCHEDULE_SUFFIXES, has_suffix
from zeropipe.core.mesh import format_mesh
from zeropipe.errors import ConfigError, MissingExtra

if TYPE_CHECKING:
    from zeropipe.train.config.tables import RunConfig

# fields that only `zeropipe train` uses: other commands refuse them
TRAIN_ONLY = (
    "mesh.sequence_parallel", "mesh.dispatch", "engine.shards", "engine.offload", "engine.direct_gradients",
    "engine.attention", "engine.fused_head", "engine.float8",
)  # fmt: skip


def is_training_file(data: dict[str, Any]) -> bool:
    """Whether the table of a .toml file is that of a training file."""
    return isinstance(data.get("schedule"), dict) or isinstance(data.get("model"), dict)


def from_training_file(path: str) -> dict[str, Any]:
    """The fields of a JobFile."""
    if find_spec("pydantic") is None:
        raise MissingExtra("pydantic", "train")
    from zeropipe.train.config.read import read_run
    from zeropipe.train.config.rules import check_batch, qualify_error
    from zeropipe.train.inputs import choose_stages_per_rank
    from zeropipe.train.stage_costs import RunCosts

    config = read_run(path)
    _require_runnable(path, config)
    for error in check_batch(config):
        raise ConfigError(f"{path}: {error}")
    table = config.schedule
    found: dict[str, Any] = {"schedule": (table.name,), "options": dict(table.options)}
    if not has_suffix(table.name, *SCHEDULE_SUFFIXES):
        found |= {"ranks": (config.mesh.pp,), "microbatches": (config.num_microbatches,)}
        try:
            per_rank = choose_stages_per_rank(config)
        except ConfigError as error:
            raise ConfigError(f"{path}: {qualify_error('schedule', error)}") from None
        found |= {"stages_per_rank": (per_rank,)} if per_rank else {}
    if table.costs is not None:
        found["costs"] = RunCosts(config, path)
    return {**found, "run": _run_options(config)}


def _require_runnable(path: str, config: RunConfig) -> None:
    """ConfigError for a field that only `zeropipe train` uses."""
    for name in TRAIN_ONLY:
        table, _, field = name.partition(".")
        value = getattr(getattr(config, table), field)
        if value != type(getattr(config, table)).model_fields[field].default:
            raise ConfigError(f"{path}: {name}={value!r} is only for `zeropipe train`: leave it out")
    if config.lora is not None:
        raise ConfigError(f"{path}: [lora] is only for `zeropipe train`: leave it out")
    if config.schedule.balance == "time":
        raise ConfigError(f"{path}: schedule.balance='time' is only for `zeropipe train`: set schedule.layers")


def _run_options(config: RunConfig) -> dict[str, Any]:
    """Options of `zeropipe run`."""
    from zeropipe.train.compiling import is_compiled

    model, table, engine, data = config.model, config.schedule, config.engine, config.data
    options: dict[str, Any] = {
        "model": model.path, "dtype": model.dtype, "microbatch": data.microbatch, "sequence": data.sequence,
        "ac": engine.ac, "compile": engine.compile, "split": engine.split, "dynamic_weights": engine.dynamic_weights,
        "overlap_mode": engine.overlap,
        "first_less": table.first_less, "last_less": table.last_less, "num_layers": model.num_layers,
        "vocabulary": model.vocabulary, "layers": None if table.layers is None else list(table.layers),
        "device": engine.device,
    }  # fmt: skip
    sizes = {name: size for name, size in config.mesh.sizes.items() if size > 1 or name == "pp"}
    if len(sizes) > 1:
        options["mesh"] = format_mesh(sizes)
    if engine.compile == "auto" and not is_compiled(config, "cuda"):
        options["compile"] = False
    return {name: value for name, value in options.items() if value is not None}
