"""Engine: one rank of a pipeline, which trains, evaluates and runs forward by a schedule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeropipe.core.gradient_policy import GradientPolicy
from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.engine import setup
from zeropipe.engine.backward import gradients
from zeropipe.engine.backward.linear import find_deferred, update_hooks
from zeropipe.engine.backward.splitters import Splitter, create_splitter
from zeropipe.engine.blocks.compiling import set_blocks, warn_once
from zeropipe.engine.checkpoint.catalog import EngineView
from zeropipe.engine.checkpoint.named_weights import named_weights
from zeropipe.engine.comm.broadcast import broadcast_value
from zeropipe.engine.comm.channels import Sender
from zeropipe.engine.comm.collective import on_all_ranks
from zeropipe.engine.comm.communicator import Communicator
from zeropipe.engine.comm.faults import PeerLost, is_transport_error
from zeropipe.engine.comm.heartbeat import BETWEEN_STEPS
from zeropipe.engine.comm.messages import ShapeCache
from zeropipe.engine.comm.threads import HelperThread
from zeropipe.engine.float8 import keep_copies, require_float8, set_float8
from zeropipe.engine.head.fused import fuse_head
from zeropipe.engine.head.passes import PLAIN, compiled_passes
from zeropipe.engine.layout import Layout
from zeropipe.engine.mesh.context_parallel import enable_graph_breaks, has_graph_breaks
from zeropipe.engine.mesh.reduce_limit import ReduceLimit
from zeropipe.engine.mesh.sharded_stage import ShardedStage, is_sharded
from zeropipe.engine.mesh.slice_check import prepare_slices
from zeropipe.engine.options import Options, require_switch
from zeropipe.engine.stages.contract import Microbatch, StageInfo
from zeropipe.engine.stages.slices import cut_microbatches
from zeropipe.engine.step import equal
from zeropipe.engine.step.agreement import AgreedStep, StepRequest, agree_on_step, hash_state
from zeropipe.engine.step.cell_runner import FindTargets, Finish, OnInput
from zeropipe.engine.step.clock import Clock
from zeropipe.engine.step.executor import Executor, ExecutorContext
from zeropipe.engine.step.executor_cache import ExecutorCache, describe_difference, find_edges
from zeropipe.engine.step.in_place import StepOutputs, explain_modified
from zeropipe.engine.step.losses import (
    LossAccumulator,
    LossFn,
    StepResult,
    call_on_output,
    combine_losses,
    find_targets,
    require_counted,
    takes_parts,
)
from zeropipe.engine.step.offload import Offloader
from zeropipe.engine.step.recorder import gather_timeline
from zeropipe.engine.step.sums import GradientSums
from zeropipe.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from zeropipe.engine.checkpoint.save import SaveHandle


class Engine:
    """Runs a Schedule on torch.distributed. Every rank creates one, with its own stages, and makes the same calls.

        engine = Engine(schedule, stages)                     # stages: {stage: nn.Module} of this rank
        result = engine.train_step(microbatches, loss_fn)     # the same microbatches on every rank
        engine.clip_grad_norm(1.0); optimizer.step(); optimizer.zero_grad()

    A stage is called as `stage(*tensors_of_the_stage_before, **stage.pick(microbatch))`; without a `pick` the first
    stage is called with `microbatch["inputs"]`. `loss_fn(output, microbatch)` runs on the last stage and returns
    `(sum, count)`, `(sum, count, metrics)`, or a scalar mean (see losses.LossAccumulator).

    `group`: the pipeline's ranks (default: all). `mesh`: a DeviceMesh with any of the dimensions pp, dp_replicate,
    dp_shard, cp and tp instead; every pipeline then has its own microbatches, and loss and gradients are those of all
    of them. A step may have any number of microbatches. `record`: measure a Timeline of every train_step; can be
    switched between steps. `options`: compile, ac, split, timeout and the other fields of `Options`.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Mapping[int, nn.Module | StageInfo],
        *,
        group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        record: bool = False,
        **options: Any,
    ) -> None:
        self.options = Options.of(options)
        require_switch("record", record)
        setup.check_types(schedule, stages)
        self._layout = layout = Layout.create(
            group, mesh, setup.find_mesh(stages, "expert_mesh"), setup.find_mesh(stages, "shard_mesh")
        )
        setup.check_sizes(schedule, layout)
        self.schedule, self.record = schedule, record
        order = schedule.placement.stages_of(layout.pipeline_rank)  # the order of collectives
        self._stages_passed = dict(
            sorted(stages.items(), key=lambda item: order.index(item[0]) if item[0] in order else -1)
        )
        self.stages = {
            stage: given.module if isinstance(given, StageInfo) else given
            for stage, given in self._stages_passed.items()
        }
        self._device = setup.choose_device(device, self.stages)
        self._comm = comm = Communicator(layout, self._device, self.options.timeout)
        self.rank = layout.pipeline_rank
        self._senders: dict[int, Sender] = {}
        self._helper = HelperThread()
        self._finalizer = weakref.finalize(self, _close_connections, self._senders, self._helper, comm)
        self._stop_reason: str | None = None
        self._infos: dict[int, StageInfo] = {}
        self._executors: ExecutorCache | None = None
        self._splitter: Splitter | None = None
        self.saving: SaveHandle | None = None  # a checkpoint that is being written
        try:
            with self._guard("set-up", refusing=True):
                self._set_up()
        except BaseException:
            self._finalizer()
            raise

    def _set_up(self) -> None:
        comm, schedule = self._comm, self.schedule
        self._clock: Clock | None = None
        self._has_compared = False
        comm.status.phase = "set-up, comparing options and stages"
        found = setup.agree_on_setup(comm, schedule, self.options, self._device, self._stages_passed)
        self._infos, self._has_ties = found
        deferring = self.options.direct_gradients or setup.leaves_weights(schedule, self.rank, self.options)
        builders = {stage: info.build_weights for stage, info in self._infos.items() if info.build_weights is not None}
        self._splitter = create_splitter(self.options.split, deferring, builders)
        comm.status.phase = "set-up, preparing stages"
        on_all_ranks(comm, self._prepare)
        self._deferred = [layer for info in self._infos.values() for layer in find_deferred(info.module)]
        limit = ReduceLimit(GradientPolicy.parse(self.options.gradients).max_reduces)
        self._shards = {
            stage: ShardedStage(
                stage, info.module, regather=self.options.regather, keeps_factors=info.keeps_factors, limit=limit
            )
            for stage, info in self._infos.items()
            if is_sharded(info.module)
        }
        comm.status.phase = "set-up, connecting"
        self._channels = comm.connect(find_edges(schedule.placement), polls=self.options.dynamic_weights)
        self._shapes = ShapeCache(is_dynamic=self.options.shapes == "dynamic")
        for (source, target), channel in self._channels.items():
            if source == self.rank:
                self._senders[target] = Sender(channel, self._shapes)
        self._sums = GradientSums(schedule, self._infos, comm)
        self._part = setup.find_part(self.stages.values())
        self._parameter_ids = frozenset(id(parameter) for parameter in self._sums.all)
        context = ExecutorContext(
            schedule, self.rank, self._infos, self._senders, self._channels, self._shapes, self._device, self._splitter,
            self._shards, self._sums.all, self.options, self._helper, Offloader(self._device),
        )  # fmt: skip
        self._executors = ExecutorCache(context)
        comm.exchange(None)  # no rank begins a step, or fails in one, while others connect

    def _prepare(self) -> None:
        modules = [info.module for info in self._infos.values()]
        stages, sizes = self._infos.values(), self._layout.sizes | {"ep": self._layout.ep}
        require_float8(self.options.float8, self.schedule, sizes, stages, self._device)
        prepare_slices(self.schedule, modules, self.options.slice_sizes)
        if self.options.compile:
            enable_graph_breaks()
        for stage in stages:
            self._splitter.prepare(stage.number, stage.module)
            set_float8(stage, self.options.float8)
            if stage.blocks is not None:
                set_blocks(
                    stage.blocks, stage.first_layer, compile=self.options.compile, ac=self.options.ac,
                    turns=self.options.overlap == "turns", by_schedule=bool(self.schedule.checkpointed),
                    graph_breaks=has_graph_breaks(stage.module),
                )  # fmt: skip
            is_last = stage.number == self.schedule.num_stages - 1
            if self.options.fused_head and is_last and setup.find_part([stage.module]) is None:
                self._fuse_head(stage.module)

    def _fuse_head(self, stage: nn.Module) -> None:
        """Let the last stage compute its losses in chunks, or say why it does not."""
        passes = compiled_passes() if self.options.compile else PLAIN
        reason = fuse_head(stage, passes, in_forward=setup.adds_in_forward(self.schedule, self.rank, self.options))
        if reason is not None:
            warn_once(f"the logits of the last stage stay whole: {reason}; fused_head=False silences this")

    # steps

    def train_step(self, microbatches: Sequence[Microbatch], loss_fn: LossFn) -> StepResult:
        """Forward and backward of all microbatches; gradients are added to `.grad`, as `backward()` does."""
        if not torch.is_grad_enabled():
            raise ConfigError(
                "train_step under torch.no_grad() would give no gradients: use eval_step, or leave it out"
            )
        use, call = "record" if self.record else "train", f"train_step{' with record' * self.record}"
        refusal = self._find_replaced() or self._find_outside_gradients() or self._refuse_loss(loss_fn)
        step = self._agree_on_step(microbatches, loss_fn, call, use, refusal)
        with self._guard():
            self._compare(microbatches)
            executor = self._executors.get(use, step.num_microbatches, step.is_uniform)
            divides_late = step.total_count is None
            with gradients.stash_gradients(self._sums.all if divides_late else self._sums.shared) as stash:
                losses = LossAccumulator(
                    loss_fn, self._count_microbatches(step), stash, self._parameter_ids, step.total_count, self._part
                )
                if self.record:
                    self._begin_recording()
                on_input = losses.add_input if divides_late else None
                self._execute(executor, self._cut(microbatches), step, losses.add, on_input, losses.targets)
                for shards in self._shards.values():
                    shards.finish()
                if self.record:
                    self._executors.recorder.end()
                self._comm.status.phase = "the sum of losses"
                result, divides_late = self._combine(losses)
                if divides_late:
                    gradients.scale_grads([*self._sums.all, *losses.other_leaves.values()], 1 / (result.count or 1.0))
                self._comm.status.phase = "the sum of shared gradients"
                self._sums.run()
            return result

    def eval_step(self, microbatches: Sequence[Microbatch], loss_fn: LossFn) -> StepResult:
        """The loss without gradients, stages in eval mode; gradients stay as they are."""
        step = self._agree_on_step(microbatches, loss_fn, "eval_step", "forward")
        with self._guard(), _eval_mode(self.stages.values()):
            self._compare(microbatches)
            losses = LossAccumulator(
                loss_fn, self._count_microbatches(step), total_count=step.total_count, part=self._part
            )
            executor = self._executors.get("forward", step.num_microbatches, step.is_uniform)
            self._execute(executor, microbatches, step, losses.add, find_targets=losses.targets)
            self._comm.status.phase = "the sum of losses"
            sums = losses.sums() if self._counts(loss_fn) else None
            return combine_losses(self._comm.exchange(sums))[0]

    def forward(
        self,
        microbatches: Sequence[Microbatch],
        *,
        post: Callable[[Any, Microbatch], Any] | None = None,
        broadcast: bool = False,
    ) -> list[Any]:
        """The last stage's outputs in microbatch order, in eval mode and without gradients.

        Ranks without the last stage get None instead (a mirrored pipeline has it on two ranks, each with half
        of the microbatches) unless `broadcast`. `post(output, microbatch)` runs on the rank that has the output:
        to broadcast log-probabilities, for example, and not logits.
        """
        outputs: list[Any] = []

        last, results = self.schedule.num_stages - 1, StepOutputs()

        def add_output(output: Any, microbatch: Microbatch, index: int) -> None:
            output = call_on_output(post or _whole, output, microbatch, self._part)
            outputs[index] = results.add(output, f"{last}F{index}")

        step = self._agree_on_step(microbatches, None, f"forward{' with broadcast' * broadcast}", "forward")
        outputs += [None] * step.num_microbatches
        with self._guard(), _eval_mode(self.stages.values()):
            self._compare(microbatches)
            executor = self._executors.get("forward", step.num_microbatches, step.is_uniform)
            self._execute(executor, microbatches, step, add_output, find_targets=find_targets(post))
            results.check()
            if not broadcast:
                self._comm.exchange(None)
                return outputs
            self._comm.status.phase = "the broadcast of outputs"
            roots = [executor.schedule.placement.rank_of(last, index) for index in range(len(outputs))]
            for root in sorted(set(roots)):
                indices = [index for index, rank in enumerate(roots) if rank == root]
                received = broadcast_value(self._comm, [outputs[index] for index in indices], root, self._device)
                for index, output in zip(indices, received):
                    outputs[index] = output
            return outputs

    def run(
        self, microbatches: Sequence[Microbatch], finish: Callable[[Any, Microbatch, int], Any], *, train: bool = True
    ) -> bool:
        """Run the schedule alone, for callers with losses and sums of their own; gradients are added to `.grad`.

        Each rank has the microbatches that its own stages need. `finish(output, microbatch, index)` gets the
        last stage's outputs on their rank, in the schedule's order, and returns what backward starts from. Without
        `train`, forwards only. Nothing is counted or scaled, modes stay as they are, and gradients are summed over
        the processes that share a sharded stage and over ties alone. Returns whether all pipelines had the same
        number of microbatches.
        """
        use = "forward" if not train else "record" if self.record else "train"
        call = {"forward": "an evaluation", "record": "a step with record", "train": "a step"}[use]
        if self.schedule.num_slices > 1:
            raise ConfigError("run() takes no schedule with slices, whose losses are of parts of rows: use train_step")
        step = self._agree_on_step(microbatches, None, call, use, self._find_outside_gradients() if train else None)
        tied = self._sums.tied if train else ()
        with self._guard(), _no_inference_mode(), gradients.stash_gradients(tied):
            if self._has_ties:
                self._compare_ties()
            executor = self._executors.get(use, step.num_microbatches, step.is_uniform)
            if use == "record":
                self._begin_recording()
            self._execute(executor, microbatches, step, finish)
            for shards in self._shards.values() if train else ():
                shards.finish()
            if use == "record":
                self._executors.recorder.end()
            if train:
                self._sums.run(ties_only=True)
            return step.is_uniform

    def refuse(self, reason: str) -> None:
        """Take part in a step that this rank cannot run: all ranks raise the reason."""
        self._agree_on_step((), None, None, "train", reason)

    # gradients

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, each once: for an optimizer."""
        return list(self._sums.all)

    def grad_norm(self) -> float:
        """The 2-norm of the full model's gradient, the same on every rank; copies and ties count once."""
        with self._guard("the gradient norm"):
            return float(sum(self._comm.exchange(self._sums.squared_norm())) ** 0.5)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all gradients so that the full model's norm is at most `max_norm`; returns the norm before."""
        if not (hasattr(max_norm, "__float__") and float(max_norm) >= 0):
            raise ConfigError(f"clip_grad_norm({max_norm!r}): must be a non-negative number")
        norm = self.grad_norm()
        factor = gradients.clip_factor(norm, max_norm)
        if factor != 1:
            gradients.scale_grads(self._sums.all, factor)
        return norm

    # weights

    def named_weights(
        self, ranks: Iterable[int] | None = None, *, merge: bool = False, published: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """(Name, full tensor) of the full model, stage by stage, one at a time: to pass weights to other programs.

        Every rank iterates; those in `ranks` (all if not given) get the tensors, copies on the engine's device, the
        others nothing. Names are those of the model's `state_dict()`; a tied tensor comes once, a sharded one in full.
        `merge`: with a LoRA adapter added to the weights. `published`: a Hugging Face model's tensors as its family is
        published, which other programs load.
        """
        return named_weights(self.together, ranks, merge, published)

    @contextmanager
    def together(self, where: str, refusing: bool = True) -> Iterator[EngineView]:
        """Around other work that all ranks do: an error of one of them stops all."""
        with self._guard(where, refusing):
            yield EngineView(self.schedule, self._infos, self._comm)

    # measurements

    def timeline(self) -> Timeline:
        """The Timeline of the last recorded step; every rank calls this and gets the same one."""
        recorder = self._executors.recorder
        if recorder is None:
            raise EngineError("no step was recorded: set record=True before train_step")
        with self._guard("gathering the timeline"):
            assert self._clock is not None
            self._clock.measure()
            return gather_timeline(recorder, self._executors.recorded, self._comm, self._clock)

    def close(self) -> None:
        """Close the connections, after a checkpoint is written. Call it on every rank, after the last step."""
        try:
            if self._stop_reason is None and self.saving is not None:
                self.saving.wait()
        finally:
            self._close()

    def _close(self) -> None:
        if self._stop_reason is None and self._comm.is_nccl:
            self._comm.synchronize()
        self._finalizer()
        self._executors.close()
        self._senders.clear()
        self._channels.clear()
        self._sums.close()
        self._stop_reason = self._stop_reason or "it was closed"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._stop_reason is None:  # the other ranks raise the same error
            self._stop(str(self._comm.explain(error, BETWEEN_STEPS)))
        self.close()

    # inside

    def _agree_on_step(
        self, microbatches: Sequence[Microbatch], loss_fn: Any, call: str | None, use: str, refusal: str | None = None
    ) -> AgreedStep:
        """Agree on a step with all ranks; ConfigError on all of them for a step that cannot run."""
        with self._guard(refusing=True):
            self._comm.status.call = call
            last = self.schedule.placement.copies[0][-1]
            counts_tokens = self._layout.counts_tokens and self.rank == last
            state = hash_state(self._sums.all, self._device)
            request = StepRequest(
                self._infos.values(), state, microbatches, loss_fn, counts_tokens,
                partial(self._executors.order_digests, use), self._cut if use != "forward" else list, refusal,
            )  # fmt: skip
            step = agree_on_step(self._comm, self._shapes, request)
            if self._shards and self.options.regather and not step.is_uniform:
                raise ConfigError(
                    f"pipelines pass {sorted(set(step.all_num_microbatches))} microbatches: with regather=True each "
                    "gathers weights once per microbatch, so all must pass the same number; or leave out regather"
                )
            if self._shards and self.options.gradients != "whole" and use != "forward" and not step.is_uniform:
                raise ConfigError(
                    f"pipelines pass {sorted(set(step.all_num_microbatches))} microbatches: with "
                    f"gradients={self.options.gradients!r} they reduce gradients together, so all must pass the same "
                    "number; or leave out gradients"
                )
            if self._layout.ep > 1 and not step.is_uniform:
                raise ConfigError(
                    f"pipelines pass {sorted(set(step.all_num_microbatches))} microbatches: with ep={self._layout.ep} "
                    "they exchange tokens in each, so all must pass the same number; or leave out ep"
                )
            self._check_order(step, use)
            return step

    def _check_order(self, step: AgreedStep, use: str) -> None:
        """ConfigError on all ranks if two that hold the same stages would gather and reduce in different orders."""
        for first, *others in self._layout.stage_holders:
            other = next((rank for rank in others if step.order_digest(rank) != step.order_digest(first)), None)
            if other is not None:
                lines = self._comm.exchange(self._executors.describe_order(use, step.num_microbatches, step.is_uniform))
                raise ConfigError(describe_difference(first, other, lines))

    def _cut(self, microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
        """The slices of microbatches, if the schedule has any."""
        if self.schedule.num_slices == 1:
            return microbatches
        return cut_microbatches(microbatches, self.options.shares(self.schedule.num_slices))

    def _refuse_loss(self, loss_fn: LossFn) -> str | None:
        """The error for a loss of whole rows, of which a schedule with slices has only parts."""
        if self.schedule.num_slices == 1 or takes_parts(loss_fn) or not callable(loss_fn):
            return None
        return (
            f"the loss {type(loss_fn).__name__} takes logits of whole rows, and the schedule has slices: use one with "
            "takes_parts = True, like CausalLMLoss, or a schedule without slices"
        )

    def _find_replaced(self) -> str | None:
        """The error for a parameter that was added after set-up: its gradient would not be scaled or summed."""
        for stage, module in self.stages.items():
            if stage not in self._shards and any(
                id(parameter) not in self._parameter_ids for parameter in module.parameters()
            ):
                name = next(name for name, p in module.named_parameters() if id(p) not in self._parameter_ids)
                return (
                    f"stage {stage}: the parameter {name} was added after the Engine was created: change parameters "
                    "in place (load_state_dict without assign=True), or create a new Engine and optimizer"
                )
        return None

    def _find_outside_gradients(self) -> str | None:
        """The error for gradients that a backward outside of a step added to sharded weights; they are deleted."""
        stages = [stage for stage, shards in self._shards.items() if shards.discard_gradients()]
        if not stages:
            return None
        return (
            f"stage {stages[0]}: a backward outside of a step gave its sharded weights gradients, which are not "
            "summed over dp_shard; they are deleted: run it inside a step, or call the stage under torch.no_grad()"
        )

    def _count_microbatches(self, step: AgreedStep) -> int:
        """The number of microbatches of all pipelines."""
        ranks_per_pipeline = self._layout.size // self._layout.num_pipelines
        return sum(step.all_num_microbatches) // ranks_per_pipeline

    def _execute(
        self,
        executor: Executor,
        microbatches: Sequence[Microbatch],
        step: AgreedStep,
        finish: Finish,
        on_input: OnInput | None = None,
        find_targets: FindTargets | None = None,
    ) -> None:
        update_hooks(self._deferred)
        converts = self.options.float8 != "none" and not self.options.regather
        with keep_copies(self._deferred if converts else ()), self._comm.status.executing(executor):
            executor.run(microbatches, step.kinds, finish, on_input, find_targets)

    def _begin_recording(self) -> None:
        self._comm.status.phase = "the comparison of clocks"
        self._clock = self._clock or Clock(self._comm)
        self._executors.recorder.begin()

    def _counts(self, loss_fn: LossFn) -> bool:
        """Whether this process's losses are counted: with cp, each has those of its tokens, or all have the same."""
        return self._layout.counts_losses if takes_parts(loss_fn) else self._layout.counts_tokens

    def _combine(self, losses: LossAccumulator) -> tuple[StepResult, bool]:
        """The step's result, and whether gradients have to be divided; ConfigError where they would be wrong."""
        sums = losses.sums() if self._counts(losses.loss_fn) else None
        everyone = self._comm.exchange((sums, self._sums.flags()))
        if equal.find_difference([flags for _, flags in everyone]) is not None:
            self._require_equal(equal.describe_shared_weights(self.schedule, self._infos, self._layout, values=False))
        result, divides_late = combine_losses([sums for sums, _ in everyone])
        require_counted(result, losses.total_count)
        if divides_late and losses.has_outer_graph:
            raise ConfigError(
                "a microbatch holds a tensor that was computed from others and needs a gradient, and the loss has no "
                "count(): add a count(microbatch) to the loss, or pass a detached leaf"
            )
        return result, divides_late

    def _compare(self, microbatches: Sequence[Microbatch]) -> None:
        """Copies and ties start equal: checked before the first step, with check_equal before every one."""
        if self._has_compared and not self.options.check_equal:
            return
        self._comm.status.phase = "the comparison of weights"
        facts = equal.describe_shared_weights(self.schedule, self._infos, self._layout, values=True)
        if self.options.check_equal:
            facts += equal.describe_microbatches(microbatches, self._layout)
        self._require_equal(facts)
        self._has_compared = True

    def _compare_ties(self) -> None:
        """Ties start equal, and both ends of each are trained or none."""
        self._comm.status.phase = "the comparison of tied weights"
        values = not self._has_compared or self.options.check_equal
        self._require_equal(equal.describe_ties(self._infos, self._layout, values))
        self._has_compared = True

    def _require_equal(self, facts: equal.Facts) -> None:
        error = equal.find_difference(self._comm.exchange(facts))
        if error is not None:
            raise ConfigError(error)

    @contextmanager
    def _guard(self, where: str = "the start of the step", refusing: bool = False) -> Iterator[None]:
        """Stop all ranks with one message at an error. `refusing`: not at a ConfigError, which all of them raise."""
        if self._stop_reason is not None:
            raise EngineError(f"this engine has stopped: {self._stop_reason}")
        status = self._comm.status
        status.enter(where)
        try:
            yield
            status.enter(BETWEEN_STEPS)
        except BaseException as error:
            if refusing and isinstance(error, ConfigError):
                raise
            explained = self._comm.explain(explain_modified(error, self._infos), status.where)
            self._stop(str(explained))
            if isinstance(error, PeerLost) or is_transport_error(error):  # the transport's own text adds nothing
                raise explained from None
            if isinstance(error, StopIteration):  # as a cause, contextmanager would raise it again
                raise explained from None
            if isinstance(error, Exception):
                raise explained from error
            raise

    def _stop(self, reason: str) -> None:
        """Break the connections, and release everything of the step."""
        self._stop_reason = reason
        self._comm.abort()
        if self._executors is not None:
            self._executors.close()
        self._comm.status.enter(BETWEEN_STEPS)
        if self._splitter is not None:
            self._splitter.clear()


@contextmanager
def _eval_mode(stages: Any) -> Iterator[None]:
    """Eval mode and no gradients inside; every module's mode as it was afterwards."""
    modes = [(module, module.training) for stage in stages for module in stage.modules()]
    for module, _ in modes:
        module.training = False
    try:
        with torch.no_grad(), _no_inference_mode():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _no_inference_mode() -> Iterator[None]:
    """Leave inference mode: tensors that a sharded stage creates there could not be used for training."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _whole(output: Any, microbatch: Microbatch) -> Any:
    return output


def _close_connections(senders: Mapping[int, Sender], helper: HelperThread, comm: Communicator) -> None:
    for sender in senders.values():
        sender.close()
    helper.close()
    comm.close([*helper.threads, *(thread for sender in senders.values() for thread in sender.threads)])
