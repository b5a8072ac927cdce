"""Engine: one rank of a pipeline. Trains, evaluates and runs forward by the schedule it was given."""

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

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.engine import setup
from zeropipe.engine.backward import gradients
from zeropipe.engine.backward.linear import find_deferred, update_hooks
from zeropipe.engine.backward.splitters import Splitter, create_splitter
from zeropipe.engine.blocks.compiling import set_blocks
from zeropipe.engine.checkpoint.catalog import EngineView
from zeropipe.engine.checkpoint.named_weights import named_weights
from zeropipe.engine.comm.broadcast import broadcast_value
from zeropipe.engine.comm.channels import Sender
from zeropipe.engine.comm.collective import on_all_ranks
from zeropipe.engine.comm.communicator import Communicator
from zeropipe.engine.comm.faults import PeerLost, is_transport_error
from zeropipe.engine.comm.heartbeat import BETWEEN_STEPS
from zeropipe.engine.comm.messages import ShapeCache
from zeropipe.engine.layout import Layout
from zeropipe.engine.mesh.shards import Shards, sharded
from zeropipe.engine.mesh.vocabulary import shown_to
from zeropipe.engine.options import Options, require_switch
from zeropipe.engine.stages.contract import Microbatch, StageInfo, describe_stage
from zeropipe.engine.step import equal, modified
from zeropipe.engine.step.agreed import first_difference
from zeropipe.engine.step.clock import Clock
from zeropipe.engine.step.executor import Executor
from zeropipe.engine.step.executors import Executors, Parts
from zeropipe.engine.step.losses import LossFn, StepResult, Tally, combine, require_counted
from zeropipe.engine.step.opening import Opened, open_step, state_of
from zeropipe.engine.step.outputs import Kept
from zeropipe.engine.step.plans import edges_of
from zeropipe.engine.step.recorder import gather
from zeropipe.engine.step.sums import GradientSums, ties
from zeropipe.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from zeropipe.engine.checkpoint.save import SaveHandle


class Engine:
    """Runs a Schedule on torch.distributed. Every rank makes one, with its own stages, and calls it alike.

        engine = Engine(schedule, stages)                     # stages: {stage: nn.Module} of this rank
        result = engine.train_step(microbatches, loss_fn)     # the same microbatches on every rank
        engine.clip_grad_norm(1.0); optimizer.step(); optimizer.zero_grad()

    A stage is called as `stage(*tensors_of_the_stage_before, **stage.pick(microbatch))`; without a `pick` the first
    stage is called with `microbatch["inputs"]`. `loss_fn(output, microbatch)` runs on the last stage and returns
    `(sum, count)`, `(sum, count, metrics)`, or a scalar mean (see losses.Tally).

    `group`: the pipeline's ranks (default: all). `mesh`: a DeviceMesh with any of the dimensions pp, dp_replicate,
    dp_shard and tp instead; every pipeline then has its own microbatches, and loss and gradients are those of all of
    them. A step may have any number of microbatches. `record`: measure a Timeline of every train_step; can be switched
    between steps. `options`: compile, ac, split, timeout and the other fields of `Options`.
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
        self._layout = layout = Layout.create(group, mesh)
        setup.check_given(schedule, stages)
        setup.check_sizes(schedule, layout)
        self.schedule, self.record = schedule, record
        order = schedule.placement.stages_of(layout.pipeline_rank)  # what is collective is done in one order everywhere
        self._given = dict(sorted(stages.items(), key=lambda item: order.index(item[0]) if item[0] in order else -1))
        self.stages = {
            stage: given.module if isinstance(given, StageInfo) else given for stage, given in self._given.items()
        }
        self._device = setup.device_of(device, self.stages)
        self._comm = comm = Communicator(layout, self._device, self.options.timeout)
        self.rank = layout.pipeline_rank
        self._outgoing: dict[int, Sender] = {}
        self._finalizer = weakref.finalize(self, _let_go, self._outgoing, comm)
        self._stopped: str | None = None
        self._infos: dict[int, StageInfo] = {}
        self._executors: Executors | None = None
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
        self._compared = False
        comm.status.phase = "set-up, comparing options and stages"
        self._agree()
        deferring = self.options.direct_gradients or setup.splits(schedule, self.rank)
        builders = {stage: info.build_weights for stage, info in self._infos.items() if info.build_weights is not None}
        self._splitter = create_splitter(self.options.split, deferring, builders)
        comm.status.phase = "set-up, preparing stages"
        on_all_ranks(comm, self._prepare)
        self._deferred = [layer for info in self._infos.values() for layer in find_deferred(info.module)]
        self._shards = {
            stage: Shards(stage, info.module, regather=self.options.regather, keeps_factors=info.keeps_factors)
            for stage, info in self._infos.items()
            if sharded(info.module)
        }
        comm.status.phase = "set-up, connecting"
        self._wires = comm.connect(edges_of(schedule.placement), polls=self.options.dynamic_weights)
        self._shapes = ShapeCache(is_dynamic=self.options.shapes == "dynamic")
        self._outgoing.update({b: Sender(wire, self._shapes) for (a, b), wire in self._wires.items() if a == self.rank})
        self._sums = GradientSums(schedule, self._infos, comm)
        self._own = frozenset(id(parameter) for parameter in self._sums.all)
        parts = Parts(
            schedule, self.rank, self._infos, self._outgoing, self._wires, self._shapes, self._device, self._splitter,
            self._shards, self._sums.all, self.options,
        )  # fmt: skip
        self._executors = Executors(parts)
        comm.exchange(None)  # nobody begins a step, or fails in one, while others connect

    def _agree(self) -> None:
        """Options, schedule, stages and ties: proven on every rank before anything is connected."""

        def look() -> Mapping[str, object]:
            self._infos = {stage: describe_stage(stage, given) for stage, given in self._given.items()}
            self.options.check()
            setup.check_stages(self.schedule, self._layout, self._infos, self.options)
            return setup.facts(self.schedule, self.options, self._device)

        setup.require_same_setup(self._comm, look)
        _, everyone = on_all_ranks(self._comm, lambda: ties(self._infos))
        lonely = equal.lonely_tie(everyone)
        if lonely is not None:
            raise ConfigError(lonely)

    def _prepare(self) -> None:
        for stage in self._infos.values():
            self._splitter.prepare(stage.number, stage.module)
            if stage.blocks is not None:
                set_blocks(stage.blocks, stage.first_layer, compile=self.options.compile, ac=self.options.ac)

    # steps

    def train_step(self, microbatches: Sequence[Microbatch], loss_fn: LossFn) -> StepResult:
        """Forward and backward of all microbatches; gradients are added to what is there, as `backward()` does."""
        if not torch.is_grad_enabled():
            raise ConfigError(
                "train_step under torch.no_grad() would give no gradients: use eval_step, or leave it out"
            )
        use, call = "record" if self.record else "train", f"train_step{' with record' * self.record}"
        opened = self._open(microbatches, loss_fn, call, use, self._replaced() or self._left_over())
        with self._guard():
            self._compare(microbatches)
            executor = self._executors.get(use, opened.number, opened.alike)
            late = opened.total is None
            with gradients.stash_gradients(self._sums.all if late else self._sums.shared) as stash:
                tally = Tally(loss_fn, self._num_all(opened), stash, self._own, opened.total)
                if self.record:
                    self._begin_recording()
                self._walk(executor, microbatches, opened, tally.root, tally.see if late else None)
                for shards in self._shards.values():
                    shards.finish()
                if self.record:
                    self._executors.recorder.end()
                self._comm.status.phase = "the sum of losses"
                result, late = self._combine(tally)
                if late:
                    gradients.scale_grads([*self._sums.all, *tally.outside.values()], 1 / (result.count or 1.0))
                self._comm.status.phase = "the sum of shared gradients"
                self._sums.run()
            return result

    def eval_step(self, microbatches: Sequence[Microbatch], loss_fn: LossFn) -> StepResult:
        """The loss without gradients, stages in eval mode; gradients stay as they are."""
        opened = self._open(microbatches, loss_fn, "eval_step", "forward")
        with self._guard(), _eval_mode(self.stages.values()):
            self._compare(microbatches)
            tally = Tally(loss_fn, self._num_all(opened), total=opened.total)
            executor = self._executors.get("forward", opened.number, opened.alike)
            self._walk(executor, microbatches, opened, tally.root)
            self._comm.status.phase = "the sum of losses"
            return combine(self._comm.exchange(tally.sums() if self._layout.counts_losses else None))[0]

    def forward(
        self,
        microbatches: Sequence[Microbatch],
        *,
        post: Callable[[Any, Microbatch], Any] | None = None,
        broadcast: bool = False,
    ) -> list[Any]:
        """The last stage's outputs in microbatch order, in eval mode and without gradients.

        Ranks without the last stage get None in their places (a mirrored pipeline has it on two ranks, each with half
        of the microbatches) unless `broadcast`. `post(output, microbatch)` runs where the output is made: to send
        log-probabilities around, say, and not logits.
        """
        outputs: list[Any] = []

        last, kept = self.schedule.num_stages - 1, Kept()

        def keep(output: Any, microbatch: Microbatch, index: int) -> None:
            output = shown_to(post, output)
            outputs[index] = kept.add(output if post is None else post(output, microbatch), f"{last}F{index}")

        opened = self._open(microbatches, None, f"forward{' with broadcast' * broadcast}", "forward")
        outputs += [None] * opened.number
        with self._guard(), _eval_mode(self.stages.values()):
            self._compare(microbatches)
            executor = self._executors.get("forward", opened.number, opened.alike)
            self._walk(executor, microbatches, opened, keep)
            kept.check()
            if not broadcast:
                self._comm.exchange(None)
                return outputs
            self._comm.status.phase = "sharing the outputs"
            homes = [executor.schedule.placement.rank_of(last, index) for index in range(len(outputs))]
            for home in sorted(set(homes)):
                there = [index for index, rank in enumerate(homes) if rank == home]
                shared = broadcast_value(self._comm, [outputs[index] for index in there], home, self._device)
                for index, output in zip(there, shared):
                    outputs[index] = output
            return outputs

    def run(
        self, microbatches: Sequence[Microbatch], finish: Callable[[Any, Microbatch, int], Any], *, train: bool = True
    ) -> bool:
        """The schedule alone, for callers with losses and sums of their own; gradients are added to what is there.

        Each rank has the microbatches that its own stages need. `finish(output, microbatch, index)` gets the last
        stage's outputs where they are made, in the schedule's order, and returns what backward starts from. Without
        `train`, forwards only. Nothing is counted or scaled, modes stay as they are, and sharded stages are summed
        over the processes that share them alone. Returns whether all pipelines had the same number of microbatches.
        """
        use = "forward" if not train else "record" if self.record else "train"
        call = {"forward": "an evaluation", "record": "a step with record", "train": "a step"}[use]
        opened = self._open(microbatches, None, call, use, self._left_over() if train else None)
        with self._guard(), _no_inference_mode():
            executor = self._executors.get(use, opened.number, opened.alike)
            if use == "record":
                self._begin_recording()
            self._walk(executor, microbatches, opened, finish)
            for shards in self._shards.values() if train else ():
                shards.finish()
            if use == "record":
                self._executors.recorder.end()
            return opened.alike

    def refuse(self, reason: str) -> None:
        """Instead of a step: this rank cannot take part, and all of them raise why."""
        self._open((), None, None, "train", reason)

    # gradients

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters, each once: for an optimizer."""
        return list(self._sums.all)

    def grad_norm(self) -> float:
        """The 2-norm of the whole model's gradient, the same on every rank; copies and ties count once."""
        with self._guard("the gradient norm"):
            return float(sum(self._comm.exchange(self._sums.squares())) ** 0.5)

    def clip_grad_norm(self, max_norm: float) -> float:
        """Scale all gradients so that the whole model's norm is at most `max_norm`; returns the norm before."""
        if not (hasattr(max_norm, "__float__") and float(max_norm) >= 0):
            raise ConfigError(f"clip_grad_norm({max_norm!r}): give the largest norm, a number from 0 on")
        norm = self.grad_norm()
        if norm > max_norm:
            gradients.scale_grads(self._sums.all, max_norm / (norm + 1e-6))
        return norm

    # weights

    def named_weights(
        self, ranks: Iterable[int] | None = None, *, merge: bool = False, published: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """(Name, whole tensor) of the whole model, stage by stage, one at a time: to hand weights to other programs.

        Every rank iterates; those in `ranks` (all if not given) get the tensors, copies on the engine's device, the
        others nothing. Names are those of the model's `state_dict()`; a tied tensor comes once, a sharded one whole.
        `merge`: with a LoRA adapter added to the weights. `published`: a Hugging Face model's tensors as its family is
        published, which other programs load.
        """
        return named_weights(self.together, ranks, merge, published)

    @contextmanager
    def together(self, where: str, refusing: bool = True) -> Iterator[EngineView]:
        """Around what all ranks do beside steps: an error of one of them stops all."""
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
            return gather(recorder, self._executors.recorded, self._comm, self._clock)

    def close(self) -> None:
        """Give the connections back. Call it on every rank, after the last step. Waits for a checkpoint's end."""
        try:
            if self._stopped is None and self.saving is not None:
                self.saving.wait()
        finally:
            self._close()

    def _close(self) -> None:
        if self._stopped is None and self._comm.is_nccl:
            self._comm.synchronize()
        self._finalizer()
        self._executors.close()
        self._outgoing.clear()
        self._wires.clear()
        self._sums.close()
        self._stopped = self._stopped or "it was closed"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._stopped is None:  # the other ranks hear why this one leaves
            self._stop(str(self._comm.explain(error, BETWEEN_STEPS)))
        self.close()

    # inside

    def _open(
        self, microbatches: Sequence[Microbatch], loss_fn: Any, call: str | None, use: str, refusal: str | None = None
    ) -> Opened:
        """Tell all ranks what this step is. What does not fit is refused on all of them, and the engine goes on."""
        with self._guard(refusing=True):
            self._comm.status.call = call
            last = self.schedule.placement.copies[0][-1]
            counting = self._layout.counts_losses and self.rank == last
            stages, state = self._infos.values(), state_of(self._sums.all, self._device)
            opened = open_step(
                self._comm, self._layout, self._shapes, stages, state, microbatches, loss_fn, counting,
                partial(self._executors.orders, use), refusal,
            )  # fmt: skip
            if self._shards and self.options.regather and not opened.alike:
                raise ConfigError(
                    f"pipelines pass {sorted(set(opened.numbers))} microbatches: with regather=True each gathers "
                    "weights once per microbatch, so give all the same number, or leave regather out"
                )
            self._agree_on_order(opened, use)
            return opened

    def _agree_on_order(self, opened: Opened, use: str) -> None:
        """ConfigError on all ranks if two that hold the same sharded stages would not gather and reduce alike."""
        for first, *others in self._layout.stage_holders:
            other = next((rank for rank in others if opened.order_of(rank) != opened.order_of(first)), None)
            if other is not None:
                lines = self._comm.exchange(self._executors.order_lines(use, opened.number, opened.alike))
                raise ConfigError(first_difference(first, other, lines))

    def _replaced(self) -> str | None:
        """Parameters that came after the Engine was made would get gradients that nobody scales, sums or clips."""
        for stage, module in self.stages.items():
            if stage not in self._shards and any(id(parameter) not in self._own for parameter in module.parameters()):
                name = next(name for name, p in module.named_parameters() if id(p) not in self._own)
                return (
                    f"stage {stage}: the parameter {name} came after the Engine was made: change parameters in place "
                    "(load_state_dict without assign=True), or make a new Engine and optimizer"
                )
        return None

    def _left_over(self) -> str | None:
        """What a backward outside of a step added to sharded weights would be counted with this one's gradients."""
        stages = [stage for stage, shards in self._shards.items() if shards.forget_gradients()]
        if not stages:
            return None
        return (
            f"stage {stages[0]}: a backward outside of a step gave its sharded weights gradients, which nobody sums "
            "over dp_shard; they are dropped: run it inside a step, or call the stage under torch.no_grad()"
        )

    def _num_all(self, opened: Opened) -> int:
        """Microbatches of all pipelines."""
        same = self._layout.size // self._layout.num_pipelines  # ranks that say the same number
        return sum(opened.numbers) // same

    def _walk(
        self, executor: Executor, microbatches: Sequence[Microbatch], opened: Opened, finish: Any, see: Any = None
    ) -> None:
        update_hooks(self._deferred)
        with self._comm.status.executing(executor):
            executor.run(microbatches, opened.kinds, finish, see)

    def _begin_recording(self) -> None:
        self._comm.status.phase = "the comparison of clocks"
        self._clock = self._clock or Clock(self._comm)
        self._executors.recorder.begin()

    def _combine(self, tally: Tally) -> tuple[StepResult, bool]:
        """The step's result, and whether gradients are still to be divided; what would be wrong is refused."""
        sums = tally.sums() if self._layout.counts_losses else None
        everyone = self._comm.exchange((sums, self._sums.flags()))
        if equal.difference([flags for _, flags in everyone]) is not None:
            self._refuse_unlike(equal.shared_weights(self.schedule, self._infos, self._layout, values=False))
        result, late = combine([sums for sums, _ in everyone])
        require_counted(result, tally.total)
        if late and tally.not_leaf:
            raise ConfigError(
                "a microbatch holds a tensor that was computed from others and needs a gradient, and the loss has no "
                "count(): give the loss a count(microbatch), or pass a detached leaf"
            )
        return result, late

    def _compare(self, microbatches: Sequence[Microbatch]) -> None:
        """Copies and ties start equal: checked before the first step, with check_equal before every one."""
        if self._compared and not self.options.check_equal:
            return
        self._comm.status.phase = "the comparison of weights"
        claims = equal.shared_weights(self.schedule, self._infos, self._layout, values=True)
        if self.options.check_equal:
            claims += equal.microbatch_claims(microbatches, self._layout)
        self._refuse_unlike(claims)
        self._compared = True

    def _refuse_unlike(self, claims: equal.Claims) -> None:
        unlike = equal.difference(self._comm.exchange(claims))
        if unlike is not None:
            raise ConfigError(unlike)

    @contextmanager
    def _guard(self, where: str = "the start of the step", refusing: bool = False) -> Iterator[None]:
        """An error in here stops all ranks with one message. `refusing`: all of them raise a ConfigError anyway."""
        if self._stopped is not None:
            raise EngineError(f"this engine has stopped: {self._stopped}")
        status = self._comm.status
        status.enter(where)
        try:
            yield
            status.enter(BETWEEN_STEPS)
        except BaseException as error:
            if refusing and isinstance(error, ConfigError):
                raise
            explained = self._comm.explain(modified.explained(error, self._infos), status.where)
            self._stop(str(explained))
            if isinstance(error, PeerLost) or is_transport_error(error):  # the transport's own words help nobody
                raise explained from None
            if isinstance(error, StopIteration):  # one that is given as the cause, contextmanager would raise itself
                raise explained from None
            if isinstance(error, Exception):
                raise explained from error
            raise

    def _stop(self, reason: str) -> None:
        """Break the connections, and keep nothing of the step alive."""
        self._stopped = reason
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
    """What a sharded stage keeps from its first step on, no training could use if it were made in inference mode."""
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def _let_go(outgoing: Mapping[int, Sender], comm: Communicator) -> None:
    for edge in outgoing.values():
        edge.close()
    comm.close(thread for edge in outgoing.values() for thread in edge.threads)
