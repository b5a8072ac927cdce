"""Rules between the fields of a training file, and with the model, the schedule, the files and this machine.

Everything that can be checked before a process starts is checked here, with one line for each error. A rule of another
package is not repeated: its own check is called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from zeropipe.core.files import SCHEDULE_SUFFIXES, has_suffix
from zeropipe.core.mesh import format_mesh, refuse_ep
from zeropipe.core.model.checkpointing import Checkpointing
from zeropipe.core.units import count_text
from zeropipe.engine.run.spec import require_cores
from zeropipe.errors import ConfigError, MissingExtra, ZeropipeError, first_line
from zeropipe.train.config.fields import tables
from zeropipe.train.config.file_rules import check_adapter, check_data, check_model, check_output
from zeropipe.train.config.read import limit_lines
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.inputs import choose_layers, load_layer_costs, load_text_config
from zeropipe.train.schedule import build_run_schedule

SIZE_FIELDS = {
    "ranks": "mesh.pp", "microbatches": "data.batch", "stages_per_rank": "schedule.stages_per_rank",
    "slices": "schedule.slices",
}  # fmt: skip
# field -> the choice that reads it; with another choice it would be ignored
ONLY_WITH = {
    "optimizer.momentum": ("optimizer.name", ("sgd",)), "optimizer.betas": ("optimizer.name", ("adamw", "adam")),
    "optimizer.eps": ("optimizer.name", ("adamw", "adam")), "rate.decay": ("rate.shape", ("wsd",)),
    "rate.final": ("rate.shape", ("linear", "cosine", "wsd")),
}  # fmt: skip
Rule = Callable[[RunConfig], Iterator[str]]  # yields a line for each error


def check_run(config: RunConfig, world_size: int | None = None, *, starts: bool = True) -> None:
    """Raise ConfigError with a line for each broken rule.

    `starts`: the run starts now. `world_size` is the number of processes that torchrun started; None: local processes.
    """
    errors: list[str] = []
    for rule in (
        _check_mesh, check_batch, _check_lengths, _check_engine, _check_optimizer, _check_choices, _check_log,
        check_adapter, check_output,
    ):  # fmt: skip
        errors += _apply(rule, config)
    model_errors = _apply(lambda config: check_model(config, starts), config)
    errors += model_errors
    if not model_errors:  # these need the model's config
        errors += _apply(check_data, config)
        errors += _apply(_check_tensor_parallel, config) or _apply(_check_schedule, config)
    if starts:
        errors += _apply(lambda config: _check_machine(config, world_size), config)
    if errors:
        raise ConfigError("\n".join(limit_lines(list(dict.fromkeys(errors)))))


def _apply(rule: Rule, config: RunConfig) -> list[str]:
    """The errors of a rule. One that it raises is the last."""
    errors: list[str] = []
    try:
        for error in rule(config):
            errors.append(error)
    except ZeropipeError as error:
        errors.append(first_line(error))
    return errors


def _check_machine(config: RunConfig, world_size: int | None) -> Iterator[str]:
    number = config.mesh.num_processes
    if world_size is None:
        require_cores(number)
    elif world_size != number:
        yield (
            f"mesh {format_mesh(config.mesh.sizes)} has {count_text(number, 'process')}, torchrun started "
            f"{world_size}; start {number}, or change the mesh"
        )
    if config.engine.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            yield "engine.device='cuda': torch finds no GPU; use cpu or auto"


def _check_mesh(config: RunConfig) -> Iterator[str]:
    mesh, engine = config.mesh, config.engine
    if mesh.sequence_parallel and mesh.tp == 1:
        yield "mesh.sequence_parallel=true shards sequences over tp; use mesh.tp of at least 2, or leave it out"
    if mesh.shard_cp and (mesh.cp == 1 or mesh.ep > 1):
        yield "mesh.shard_cp=true shards weights over cp, without ep; use mesh.cp of at least 2 and mesh.ep=1"
    if mesh.cp_exchange != "auto" and mesh.cp == 1:
        yield f"mesh.cp_exchange={mesh.cp_exchange!r} is for mesh.cp of at least 2; use that, or leave it out"
    has_graph_breaks = mesh.cp_exchange == "ring" or config.schedule.slices > 1
    if has_graph_breaks and engine.compile is True and Checkpointing.parse(engine.ac).mode == "op":
        yield (
            f"engine.ac={engine.ac!r} does not run with engine.compile=true and slices or a ring; use 'full', "
            "'selective:2' or 'none', or engine.compile=false"
        )
    if mesh.num_shards == 1:
        if engine.offload:
            yield "engine.offload=true is for sharded weights; use mesh.dp_shard of at least 2, or leave it out"
        if engine.shards == "regather":
            yield "engine.shards='regather' is for sharded weights; use mesh.dp_shard of at least 2, or leave it out"
        if engine.gradients != "whole":
            yield (
                f"engine.gradients={engine.gradients!r} is for sharded weights; use mesh.dp_shard of at least 2, or "
                "leave it out"
            )
    if reason := refuse_ep(mesh.sizes):
        yield f"mesh.{reason}"
    if mesh.ep > 1 and mesh.ep == mesh.dp_shard and engine.offload:
        yield f"engine.offload=true with mesh.ep={mesh.ep}=mesh.dp_shard: experts are not sharded; use less mesh.ep"
    if config.lora is not None and config.lora.dropout and mesh.tp > 1:
        yield (
            f"lora.dropout={config.lora.dropout:g} with mesh.tp={mesh.tp}: processes of tp would draw different random "
            "numbers for the same tokens; leave out one of them"
        )


def check_batch(config: RunConfig) -> Iterator[str]:
    """Every pipeline must have the same number of full microbatches."""
    data, pipelines = config.data, config.mesh.num_pipelines
    multiple = pipelines * data.microbatch
    if data.batch % multiple:
        low = data.batch // multiple * multiple
        near = f"{low} or {low + multiple}" if low else str(multiple)
        yield (
            f"data.batch={data.batch} cannot be divided over {count_text(pipelines, 'pipeline')} in microbatches of "
            f"{data.microbatch}: must be a multiple of {multiple}, like {near}"
        )


def _check_lengths(config: RunConfig) -> Iterator[str]:
    train, data, rate = config.train, config.data, config.rate
    if train.steps is None and train.epochs is None:
        yield "train.steps is missing; set train.steps or train.epochs"
    if train.steps is not None and train.epochs is not None:
        yield f"train.steps={train.steps} and train.epochs={train.epochs:g} exclude each other; leave out one of them"
    if train.epochs is not None and data.kind == "synthetic":
        yield f"train.epochs={train.epochs:g}: data.kind='synthetic' has no end; use train.steps"
    if train.steps is not None and rate.warmup > train.steps:
        yield f"rate.warmup={rate.warmup}: must be at most train.steps={train.steps}"


def _check_tensor_parallel(config: RunConfig) -> Iterator[str]:
    """Only what is known before set-up, where the engine verifies the model's tensor-parallel plan."""
    mesh, data = config.mesh, config.data
    if mesh.tp == 1:
        return
    model = load_text_config(config)
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = model.get(name)
        if isinstance(heads, int) and heads % mesh.tp:
            yield f"mesh.tp={mesh.tp}: must divide {name}={heads} of {config.model.path}"
            return
    if mesh.sequence_parallel and not data.packing and data.kind != "synthetic":
        yield "mesh.sequence_parallel=true needs sequences of equal length; use data.packing=true, or leave it out"
    elif mesh.sequence_parallel and data.sequence % mesh.tp:
        near = max(mesh.tp, data.sequence // mesh.tp * mesh.tp)
        yield (
            f"data.sequence={data.sequence}: must be a multiple of mesh.tp={mesh.tp} (mesh.sequence_parallel); use "
            f"{near}"
        )


def _check_schedule(config: RunConfig) -> Iterator[str]:
    table = config.schedule
    for name in SIZE_FIELDS.keys() & table.options.keys():
        yield f"schedule.options.{name} is not an option of schedules; use {SIZE_FIELDS[name]}"
        return
    if config.mesh.cp > 1 and table.slices > 1:
        yield f"schedule.slices={table.slices}: slices do not run with mesh.cp={config.mesh.cp}; use one of them"
        return
    if config.mesh.sequence_parallel and table.slices > 1:
        yield f"schedule.slices={table.slices}: slices do not run with mesh.sequence_parallel=true; use one of them"
        return
    if table.checkpointing is not None:
        others = {
            "engine.ac": (config.engine.ac, "none"), "schedule.slices": (table.slices, 1),
            "schedule.offload": (table.offload, None), "engine.shards": (config.engine.shards, "keep"),
        }  # fmt: skip
        for name, (value, wanted) in others.items():
            if value != wanted:
                yield f"{name}={value!r} does not run with schedule.checkpointing='fit'; leave out one of them"
    if table.slice_sizes is not None and len(table.slice_sizes) != table.slices:
        yield f"schedule.slice_sizes has {len(table.slice_sizes)} numbers: must be schedule.slices={table.slices}"
        return
    if table.layers is not None:
        redundant = [name for name in ("first_less", "last_less", "layers_per_stage") if getattr(table, name)]
        for name in [*redundant, *(["balance"] if table.balance == "time" else [])]:
            yield f"schedule.layers and schedule.{name} exclude each other; leave out schedule.{name}"
    elif table.balance == "time" and (table.first_less or table.last_less):
        yield "schedule.balance='time' chooses all layers; leave out first_less and last_less"
    if config.data.batch % (config.mesh.num_pipelines * config.data.microbatch):
        return  # the number of microbatches is not known
    try:
        schedule = build_run_schedule(config)
        if has_suffix(table.name, *SCHEDULE_SUFFIXES):
            from zeropipe.core.check import check

            check(schedule)
        if schedule.checkpointed and config.engine.ac != "none":
            yield f"engine.ac={config.engine.ac!r} does not run with the checkpointed F of {table.name}; use 'none'"
        choose_layers(config, schedule)
        load_layer_costs(config)
    except ZeropipeError as error:
        yield qualify_error("schedule", error)


def qualify_error(table: str, error: ZeropipeError) -> str:
    """The message of another package's check, with the field's full name: `layers=...` -> `schedule.layers=...`."""
    text = first_line(error)
    if text.startswith(f"{table}."):
        return text
    return f"{table}.{text}" if text.partition("=")[0] in tables()[table].model_fields else f"{table}: {text}"


def _check_engine(config: RunConfig) -> Iterator[str]:
    from zeropipe.engine.options import Options

    table = config.engine
    try:
        Options(
            compile=table.compile is True, ac=table.ac, split=table.split, dynamic_weights=table.dynamic_weights,
            overlap=table.overlap, regather=table.shards == "regather", gradients=table.gradients,
            timeout=table.timeout,
        ).check()  # fmt: skip
    except ConfigError as error:
        yield qualify_error("engine", error)


def _check_optimizer(config: RunConfig) -> Iterator[str]:
    table = config.optimizer
    if table.fused == "yes" and table.name == "adafactor":
        yield "optimizer.fused='yes': torch has no fused adafactor; use auto"
    yield from check_adafactor(config)


def check_adafactor(config: RunConfig) -> Iterator[str]:
    """Adafactor needs unsharded weights. The loop calls this too, for runs that are started from Python."""
    if config.optimizer.name == "adafactor" and (config.mesh.num_shards > 1 or config.mesh.tp > 1):
        yield (
            "optimizer.name='adafactor' keeps sums over rows and columns, which shards of a weight do not have; use "
            "adamw, or mesh.dp_shard=1 and mesh.tp=1"
        )


def _check_choices(config: RunConfig) -> Iterator[str]:
    for name, (other, choices) in ONLY_WITH.items():
        (table, field), chosen = name.split("."), _get_value(config, other)
        value = _get_value(config, name)
        if chosen not in choices and value != tables()[table].model_fields[field].default:
            yield f"{name}={value} is for {other}={' or '.join(choices)}, not {chosen}; leave it out"


def _get_value(config: RunConfig, name: str) -> Any:
    table, field = name.split(".")
    return getattr(getattr(config, table), field)


def _check_log(config: RunConfig) -> Iterator[str]:
    if config.log.tensorboard and find_spec("tensorboard") is None:
        yield f"log.tensorboard=true: {MissingExtra('tensorboard', 'tensorboard')}"
    if config.log.wandb is not None and find_spec("wandb") is None:
        yield f"log.wandb={config.log.wandb!r}: {MissingExtra('wandb', 'wandb')}"


def torchrun_world_size() -> int | None:
    """The number of processes that torchrun started; None if it did not start this one."""
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if "RANK" in os.environ and size.isdecimal() else None
