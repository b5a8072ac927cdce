"""A step of torch's schedules, run by zeropipe's engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from zeropipe.core.files import read_text
from zeropipe.core.formats.csv import from_csv
from zeropipe.core.limits import COMMAND_LINE
from zeropipe.core.lower import lower
from zeropipe.core.placement import Placement
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.core.units import count_text
from zeropipe.engine.backward.gradients import divide_grads
from zeropipe.engine.engine import Engine
from zeropipe.engine.step.in_place import StepOutputs
from zeropipe.engine.step.losses import require_gradient
from zeropipe.errors import ConfigError, EngineError, ZeropipeError, short
from zeropipe.pipelining import private
from zeropipe.pipelining.engines import current_settings, drop_engine, get_engine
from zeropipe.pipelining.plan import build_schedule, check_stages, placement_of, resolve_schedule
from zeropipe.schedules.registry import find

Order = Mapping[int, Sequence[Any]]


class EngineSchedule(private.Base):
    """Base of our schedule classes, before torch's class of the same name.

    torch's code takes the arguments, divides batches into microbatches and merges outputs. Ours runs the microbatches.
    """

    schedule_name: ClassVar[str | None] = None  # in the registry; None: each instance has a schedule of its own

    schedule: Schedule | None = None  # it can be drawn, simulated and compared
    _key: Hashable = None
    _has_begun = False
    _loss_kwargs: dict[str, Any] | None = None

    def _initialize(
        self,
        stages: Sequence[Any],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None,
        args_chunk_spec: Any,
        kwargs_chunk_spec: Any,
        output_merge_spec: Any,
        scale_grads: bool,
    ) -> None:
        """Set the attributes that torch's constructors set; those are not called, as they have limits of their own."""
        if type(n_microbatches) is not int or n_microbatches < 1:
            raise ConfigError(f"n_microbatches={short(n_microbatches)}: must be a positive integer")
        for stage in stages:
            if not hasattr(stage, "num_stages"):
                raise ConfigError(
                    f"{type(self).__name__} got a {type(stage).__name__} for a stage: must be a PipelineStage; "
                    "create one around it, or with pipeline(...).build_stage"
                )
        private.Base.__init__(
            self,
            n_microbatches,
            loss_fn=loss_fn,
            args_chunk_spec=args_chunk_spec,
            kwargs_chunk_spec=kwargs_chunk_spec,
            output_merge_spec=output_merge_spec,
            scale_grads=scale_grads,
        )
        self._local_stages = list(stages)
        self._num_stages = self.num_stages = stages[0].num_stages
        self.pp_group_size, self.rank, self.n_local_stages = stages[0].group_size, stages[0].group_rank, len(stages)

    def _build(self, options: Mapping[str, Any]) -> None:
        assert self.schedule_name is not None
        entry = find(self.schedule_name)
        schedule = build_schedule(entry, self.pp_group_size, self._num_stages, self._n_microbatches, options)
        # an engine runs any number of microbatches, so the number is not part of the key
        self._set_schedule(schedule, (entry.name, self.pp_group_size, self._num_stages, tuple(sorted(options.items()))))

    def _set_schedule(self, schedule: Schedule, key: Hashable = None) -> None:
        check_stages(schedule, self._local_stages, type(self).__name__)
        self.schedule, self._key = schedule, schedule if key is None else key
        self.stage_index_to_group_rank = dict(enumerate(schedule.placement.copies[0]))
        for stage in self._local_stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    # placement

    @classmethod
    def placement_of(cls, num_ranks: int, num_stages: int) -> Placement:
        """Which rank holds which stage."""
        if cls.schedule_name is None:
            raise ConfigError(f"{cls.__name__} has the placement of its schedule; use schedule.placement")
        return placement_of(find(cls.schedule_name), num_ranks, num_stages)

    @classmethod
    def stages_of(cls, rank: int, num_ranks: int, num_stages: int) -> tuple[int, ...]:
        """The stages that a rank holds."""
        placement = cls.placement_of(num_ranks, num_stages)
        if type(rank) is not int or not 0 <= rank < num_ranks:
            raise ConfigError(f"rank={short(rank)}: must be from 0 to {num_ranks - 1} for num_ranks={num_ranks}")
        return placement.stages_of(rank)

    # a step

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forward and backward of a batch, as torch's `step`.

        Positional arguments on the rank with the first stage, keyword arguments on every rank that needs some,
        `target` and `losses` on the rank with the last stage. Instead of a batch, lists of microbatches: `arg_mbs`
        (tuples), `kwarg_mbs` (dicts) and `target_mbs`. Returns the last stage's merged outputs, and None elsewhere.
        """
        engine = self._engine()
        self._has_begun, self._loss_kwargs = False, loss_kwargs
        try:
            if arg_mbs is None and kwarg_mbs is None and target_mbs is None:
                _require_target(target, self._n_microbatches)
                return super().step(  # type: ignore[safe-super]  # of torch's classes
                    *args, target=target, losses=losses, return_outputs=return_outputs, **kwargs
                )
            if args or kwargs or target is not None:
                raise ConfigError("a batch and lists of microbatches were both passed; pass one of them")
            return self._step_lists(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs)
        except Exception as error:
            if not self._has_begun:  # other ranks wait for this one
                is_ours = isinstance(error, ZeropipeError)
                with suppress(ZeropipeError):
                    engine.refuse(str(error) if is_ours else f"{type(error).__name__}: {error}")
            raise
        finally:
            self._loss_kwargs = None

    def _split_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        named = (
            {f"argument {index}": value for index, value in enumerate(args)} if self._args_chunk_spec is None else {}
        )
        for name, value in (named | (kwargs or {} if self._kwargs_chunk_spec is None else {})).items():
            _require_rows(name, value, self._n_microbatches)
        return super()._split_inputs(args, kwargs)

    def _step_lists(self, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, return_outputs: bool) -> Any:
        if self._has_backward and not torch.is_grad_enabled():
            raise RuntimeError("step() under torch.no_grad() would give no gradients: call eval() instead")
        for stage in self._local_stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs)
        last = self._last_stage()
        return self._merge_outputs(last.output_chunks) if last is not None and return_outputs else None

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        last, train = self._last_stage(), self._has_backward
        if train and last is not None and target_mbs is None:
            raise ConfigError("the rank with the last stage has a loss_fn and no target: pass target=, or call eval()")
        first = any(stage.is_first for stage in self._local_stages)
        microbatches = [
            {"args": _as_tuple(args) if first else (), "kwargs": kwargs or {}, "target": target}
            for args, kwargs, target in zip(arg_mbs, kwarg_mbs, target_mbs or [None] * len(arg_mbs))
        ]
        extra = loss_kwargs or self._loss_kwargs or {}
        losses_by_index: dict[int, Tensor] = {}
        order: list[int] = []
        results = StepOutputs()
        merges = return_outputs and self._output_merge_spec is None and "_merge_outputs" not in vars(self)

        def finish(output: Any, microbatch: Mapping[str, Any], index: int) -> Tensor | None:
            order.append(index)
            if merges:
                _require_mergeable(output, last.output_chunks[0] if last.output_chunks else output)
            if return_outputs:
                last.output_chunks.append(
                    results.add(private.detach(output) if train else output, f"{last.stage_index}F{index}")
                )
            if self._loss_fn is None or target_mbs is None:
                return None
            target = microbatch["target"]
            # torch 2.11 has no loss_kwargs
            loss = self._loss_fn(output, target, **extra) if extra else self._compute_loss(output, target)
            _require_loss(loss, train)
            if train:
                require_gradient(loss, output)
            losses_by_index[index] = loss.detach().clone() if train else loss
            return loss if train else None

        engine = self._engine()
        self._has_begun = True
        try:
            same_number = engine.run(microbatches, finish, train=train)
            results.check()
        except EngineError:
            drop_engine(self._local_stages, engine)
            raise
        if last is not None and order != sorted(order) and len(last.output_chunks) == len(order):
            last.output_chunks[:] = [output for _, output in sorted(zip(order, last.output_chunks), key=itemgetter(0))]
        if train and self.scale_grads and not same_number:
            raise ConfigError(
                "pipelines that share weights ran different numbers of microbatches, so gradients cannot be divided by "
                "the number; pass scale_grads=False and a loss that is a share of the full batch's"
            )
        if train and self.scale_grads:
            divide_grads((p for stage in self._local_stages for p in stage.submod.parameters()), len(microbatches))
        if losses_by_index:
            self._internal_losses[:] = [losses_by_index[index] for index in sorted(losses_by_index)]
            self._update_losses(self._local_stages, losses)
        elif last is not None and losses is not None:
            losses.clear()  # of an earlier step

    def timeline(self) -> Timeline:
        """The measured Timeline of the last step, after `configure(record=True)`. Every rank calls this."""
        if not current_settings().record:
            raise ConfigError("no step was recorded: call configure(record=True) before step()")
        return self._engine().timeline()

    def _engine(self) -> Engine:
        if self.schedule is None:
            raise ConfigError(f"{type(self).__name__} has no schedule yet; pass schedule=, or load a CSV")
        return get_engine(self._local_stages, self.schedule, self._key)

    def _last_stage(self) -> Any:
        return next((stage for stage in self._local_stages if stage.is_last), None)

    # torch's private surface, as far as its users touch it

    @property
    def pipeline_order(self) -> dict[int, list[Any]] | None:
        """The schedule as torch's actions."""
        return None if self.schedule is None else private.to_torch_actions(self.schedule.rows)

    @pipeline_order.setter
    def pipeline_order(self, order: Order | None) -> None:
        if order:
            self._prepare_schedule_with_comms(order)

    @property
    def pipeline_order_with_comms(self) -> dict[int, list[Any]] | None:
        """The lowered schedule as torch's actions."""
        return None if self.schedule is None else private.to_torch_actions(lower(self.schedule).rows)

    def _get_pipeline_order(self) -> dict[int, list[Any]] | None:
        return self.pipeline_order

    def _initialize_stage(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: shapes are sent with the data."""

    _initialize_stages = _initialize_stage

    def _prepare_schedule_with_comms(self, actions: Order, format: str = "compute_only") -> None:
        self._load_schedule(from_csv(private.to_csv(actions)))

    def _load_csv(self, filename: str, format: Literal["compute_only", "compute_comms"] = "compute_only") -> None:
        self._load_schedule(from_csv(read_text(filename, COMMAND_LINE), Path(filename).stem))

    def _load_schedule(self, schedule: Schedule) -> None:
        self._set_schedule(resolve_schedule(schedule, self.pp_group_size, self._num_stages, self._n_microbatches))

    def register_custom_function(self, computation_type: Any, custom_function: Any) -> None:
        raise ConfigError(
            f"a custom function for {computation_type} cannot run here: zeropipe's engine runs every action itself, "
            "overlapped ones on two streams; leave the registration out, or use torch's own class"
        )


def _require_target(target: Any, number: int) -> None:
    if target is not None and not isinstance(target, Tensor):
        raise ConfigError(
            f"target is a {type(target).__name__}: step() divides a Tensor into microbatches; pass one, or lists of "
            "microbatches (arg_mbs=, kwarg_mbs=, target_mbs=)"
        )
    _require_rows("target", target, number)


def _require_rows(name: str, value: Any, number: int) -> None:
    """ConfigError for tensors with too few rows for a number of microbatches."""
    for tensor in private.leaves(value):
        if not isinstance(tensor, Tensor) or (tensor.dim() and len(tensor) >= number):
            continue
        rows = count_text(len(tensor), "row") if tensor.dim() else "no rows"
        raise ConfigError(
            f"{name} has {rows} for {count_text(number, 'microbatch')}: must have at least one for each; use fewer "
            "microbatches, or lists of microbatches (arg_mbs=, kwarg_mbs=, target_mbs=)"
        )


def _require_mergeable(output: Any, first: Any) -> None:
    """TypeError for outputs that cannot be concatenated along their first dimension."""
    for leaf, before in zip(private.leaves(output), private.leaves(first)):
        what = f"a {type(leaf).__name__}"
        if isinstance(leaf, Tensor) and leaf.dim():
            if leaf.shape[1:] == before.shape[1:]:
                continue
            what = f"Tensors of shapes {list(before.shape)} and {list(leaf.shape)}"
        elif isinstance(leaf, Tensor):
            what = "a Tensor without dimensions"
        raise TypeError(
            f"the last stage returned {what}, which cannot be merged to a batch; pass output_merge_spec=, or "
            "step(return_outputs=False)"
        )


def _require_loss(loss: Any, train: bool) -> None:
    if isinstance(loss, Tensor) and (loss.numel() == 1 or not train):
        return
    shape = f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else ""
    raise TypeError(f"loss_fn returned a {type(loss).__name__}{shape}: return a Tensor with one number")


def _as_tuple(args: Any) -> tuple[Any, ...]:
    return tuple(args) if isinstance(args, tuple | list) else (args,)
