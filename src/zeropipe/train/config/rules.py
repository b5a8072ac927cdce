"""What holds between the fields of a training file, and with the model, the schedule, the files and this machine.

Everything that can be known before a process starts is checked here, as a whole: one line for each mistake. A rule that
another part has already is asked of it, not stated again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from zeropipe.core.files import SCHEDULES, has_suffix
from zeropipe.core.mesh import format_mesh
from zeropipe.core.units import count_text
from zeropipe.engine.run.spec import require_cores
from zeropipe.errors import ConfigError, MissingExtra, ZeropipeError
from zeropipe.train.config.files import adapter_faults, data_faults, model_faults, output_faults
from zeropipe.train.config.models import RunConfig
from zeropipe.train.config.overrides import tables
from zeropipe.train.config.words import MOST_LINES
from zeropipe.train.inputs import build_schedule, choose_layers, load_layer_costs, load_text_config

SIZE_FIELDS = {"ranks": "mesh.pp", "microbatches": "data.batch", "stages_per_rank": "schedule.stages_per_rank"}
SIZES = set(SIZE_FIELDS)
# fields that only some choice reads: what is given beside another choice would be left out without a word
ONLY_WITH = {
    "optimizer.momentum": ("optimizer.name", ("sgd",)), "optimizer.betas": ("optimizer.name", ("adamw", "adam")),
    "optimizer.eps": ("optimizer.name", ("adamw", "adam")), "rate.decay": ("rate.shape", ("wsd",)),
    "rate.final": ("rate.shape", ("linear", "cosine", "wsd")),
}  # fmt: skip


def check_run(config: RunConfig, world: int | None = None, *, starts: bool = True) -> None:
    """ConfigError with a line for each rule that is broken. `world` is the number of processes that torchrun started;
    without it, and with `starts`, they will be started here."""
    faults: list[str] = []
    for rule in (_mesh, batch_faults, _lengths, _engine, _optimizer, _choices, _log, adapter_faults, output_faults):
        faults += told(rule, config)
    about_model = told(lambda one: model_faults(one, starts), config)
    faults += about_model
    if not about_model:  # else these would say it again
        faults += told(data_faults, config)
        faults += told(_tensor, config) or told(_schedule, config)
    if starts:
        faults += told(lambda one: _machine(one, world), config)
    faults = list(dict.fromkeys(faults))
    if faults:
        more = len(faults) - MOST_LINES
        raise ConfigError("\n".join(faults[:MOST_LINES] + ([f"and {more} more"] if more > 0 else [])))


def told(rule: Callable[[RunConfig], Iterator[str]], config: RunConfig) -> list[str]:
    """The faults that a rule finds; what it raises is the last one."""
    found: list[str] = []
    try:
        for fault in rule(config):
            found.append(fault)
    except ZeropipeError as error:
        found.append(str(error).splitlines()[0])
    return found


def _machine(config: RunConfig, world: int | None) -> Iterator[str]:
    number = config.mesh.num_processes
    if world is None:
        require_cores(number)
    elif world != number:
        yield (
            f"mesh {format_mesh(config.mesh.sizes)} is of {count_text(number, 'process')}, torchrun started {world}: "
            f"start {number}, or change the mesh"
        )
    if config.engine.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            yield "engine.device='cuda': torch sees no GPU here; use cpu or auto"


def _mesh(config: RunConfig) -> Iterator[str]:
    mesh, engine = config.mesh, config.engine
    if mesh.sequence_parallel and mesh.tp == 1:
        yield "mesh.sequence_parallel=true shares sequences over tp: give mesh.tp of 2 or more, or leave it out"
    if mesh.dp_shard == 1:
        if engine.offload:
            yield "engine.offload=true is for sharded weights: give mesh.dp_shard of 2 or more, or leave it out"
        if engine.shards == "regather":
            yield "engine.shards='regather' is for sharded weights: give mesh.dp_shard of 2 or more, or leave it out"
    elif engine.shards == "regather" and engine.split == "autograd":
        yield "engine.split='autograd' may read weights in W, which shards='regather' has let go: use split='store'"
    if config.lora is not None and mesh.tp > 1:
        yield f"mesh.tp={mesh.tp}: adapters (lora) cannot be spread over tp: use dp_shard, or leave lora out"


def batch_faults(config: RunConfig) -> Iterator[str]:
    """Every pipeline has a whole number of microbatches."""
    data, pipelines = config.data, config.mesh.num_pipelines
    each = pipelines * data.microbatch
    if data.batch % each:
        low = data.batch // each * each
        near = f"{low} or {low + each}" if low else str(each)
        yield (
            f"data.batch={data.batch} cannot be shared out over {count_text(pipelines, 'pipeline')} in "
            f"microbatches of {data.microbatch}: give a multiple of {each}, like {near}"
        )


def _lengths(config: RunConfig) -> Iterator[str]:
    train, data, rate = config.train, config.data, config.rate
    if train.steps is None and train.epochs is None:
        yield "train.steps is missing: say how long to train, with train.steps or train.epochs"
    if train.steps is not None and train.epochs is not None:
        yield f"train.steps={train.steps} and train.epochs={train.epochs:g} say the same in two ways: give one of them"
    if train.epochs is not None and data.kind == "synthetic":
        yield f"train.epochs={train.epochs:g}: data.kind='synthetic' has no end; give train.steps"
    if train.steps is not None and rate.warmup > train.steps:
        yield f"rate.warmup={rate.warmup} is more than train.steps={train.steps}: give at most that"


def _tensor(config: RunConfig) -> Iterator[str]:
    """As the engine refuses it at set-up, where it also proves that the model's plan is right."""
    mesh, data = config.mesh, config.data
    if mesh.tp == 1:
        return
    model = load_text_config(config)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = model.get(name)
        if isinstance(heads, int) and heads % mesh.tp:
            yield f"mesh.tp={mesh.tp} must divide {name}={heads} of {config.model.path}: give another tp"
            return
    if mesh.sequence_parallel and not data.packing and data.kind != "synthetic":
        yield "mesh.sequence_parallel=true needs sequences of one length: set data.packing=true, or leave it out"
    elif mesh.sequence_parallel and data.sequence % mesh.tp:
        near = max(mesh.tp, data.sequence // mesh.tp * mesh.tp)
        yield f"data.sequence={data.sequence}: mesh.sequence_parallel needs a multiple of tp={mesh.tp}; give {near}"


def _schedule(config: RunConfig) -> Iterator[str]:
    table = config.schedule
    for name in SIZES & set(table.options):
        yield f"schedule.options.{name} is a size, not an option: {SIZE_FIELDS[name]} says it"
        return
    if table.layers is not None:
        for name in ("first_less", "last_less", "layers_per_stage"):
            if getattr(table, name):
                yield f"schedule.layers says each stage's layers already: leave schedule.{name} out"
        if table.balance == "time":
            yield "schedule.layers says each stage's layers already: leave schedule.balance out"
    elif table.balance == "time" and (table.first_less or table.last_less):
        yield "schedule.balance='time' finds what first_less and last_less are for: leave them out"
    if config.data.batch % (config.mesh.num_pipelines * config.data.microbatch):
        return  # the number of microbatches is not known
    try:
        schedule = build_schedule(config)
        if has_suffix(table.name, *SCHEDULES):
            from zeropipe.core.check import check

            check(schedule)
        choose_layers(config, schedule)
        load_layer_costs(config)
    except ZeropipeError as error:
        yield named("schedule", error)


def named(table: str, error: ZeropipeError) -> str:
    """What another part says about a field, with the field's name in the file."""
    text = str(error).splitlines()[0]
    if text.startswith(f"{table}."):
        return text
    return f"{table}.{text}" if text.partition("=")[0] in tables()[table].model_fields else f"{table}: {text}"


def _engine(config: RunConfig) -> Iterator[str]:
    """The engine's own rules."""
    from zeropipe.engine.options import Options

    table = config.engine
    try:
        Options(
            compile=table.compile, ac=table.ac, split=table.split, direct_gradients=table.direct_gradients,
            dynamic_weights=table.dynamic_weights, regather=table.shards == "regather", timeout=table.timeout,
        ).check()  # fmt: skip
    except ConfigError as error:
        yield named("engine", error)


def _optimizer(config: RunConfig) -> Iterator[str]:
    table = config.optimizer
    if table.fused == "yes" and table.name == "adafactor":
        yield "optimizer.fused='yes': torch has no fused adafactor; use auto"
    yield from adafactor_faults(config)


def adafactor_faults(config: RunConfig) -> Iterator[str]:
    """Asked by the loop too, for those who call it from Python."""
    if config.optimizer.name == "adafactor" and (config.mesh.dp_shard > 1 or config.mesh.tp > 1):
        yield (
            "optimizer.name='adafactor' keeps sums over rows and columns, which pieces of a weight do not have: use "
            "adamw, or mesh.dp_shard=1 and mesh.tp=1"
        )


def _choices(config: RunConfig) -> Iterator[str]:
    for name, (other, choices) in ONLY_WITH.items():
        (table, field), chosen = name.split("."), _value(config, other)
        if chosen not in choices and _value(config, name) != tables()[table].model_fields[field].default:
            yield f"{name}={_value(config, name)} is for {other}={' or '.join(choices)}, not {chosen}: leave it out"


def _value(config: RunConfig, name: str) -> Any:
    table, field = name.split(".")
    return getattr(getattr(config, table), field)


def _log(config: RunConfig) -> Iterator[str]:
    if config.log.tensorboard and find_spec("tensorboard") is None:
        yield f"log.tensorboard=true: {MissingExtra('tensorboard', 'tensorboard')}"
    if config.log.wandb is not None and find_spec("wandb") is None:
        yield f"log.wandb={config.log.wandb!r}: {MissingExtra('wandb', 'wandb')}"


def world_size() -> int | None:
    """How many processes torchrun started; None if it did not start this one."""
    given = os.environ.get("WORLD_SIZE", "")
    return int(given) if "RANK" in os.environ and given.isdecimal() else None
