"""save_checkpoint: every rank writes its shards, then the first rank commits all of them at once.

collect    each rank lists its tensors and the rest of its state; all ranks learn what the others have
plan       every shard gets one rank that writes it; the manifest is complete but for files and checksums
write      a thread on every rank, over the engine's error board and not its connections: steps can go on
commit     the first rank's thread, when all have written; an error on one rank is raised on all
"""

from __future__ import annotations

import json
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from zeropipe.core.schedule import Schedule
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.checkpoint import writer
from zeropipe.engine.checkpoint.catalog import Catalog, EngineLike, EngineView, require_engine
from zeropipe.engine.checkpoint.fingerprint import compute_fingerprint
from zeropipe.engine.checkpoint.manifest import Manifest, encode
from zeropipe.engine.checkpoint.optimizers import (
    NamedOptimizer,
    OptimizerState,
    OptimizerUse,
    free_masters,
    merge_states,
)
from zeropipe.engine.checkpoint.random_states import get_random_states
from zeropipe.engine.checkpoint.writer import FolderError, StagedCheckpoint, WrittenShards
from zeropipe.engine.comm.collective import on_all_ranks
from zeropipe.engine.comm.communicator import Communicator
from zeropipe.engine.comm.faults import PeerLost
from zeropipe.engine.comm.heartbeat import BETWEEN_STEPS
from zeropipe.engine.layout import Layout
from zeropipe.engine.stages.adapters import describe_adapter
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.save import config_to_save
from zeropipe.engine.torch_private.tensors import sharded_like
from zeropipe.errors import ConfigError, EngineError, ZeropipeError, first_line

T = TypeVar("T")


def save_checkpoint(
    path: str | Path,
    engine: EngineLike,
    optimizer: Any = None,
    *,
    step: int | None = None,
    extra: Any = None,
    random: bool = False,
    frozen: bool = True,
    asynchronous: bool = False,
) -> SaveHandle:
    """Save weights, buffers and the optimizer's state into the folder `path`, for `load_checkpoint` on any layout.

    All ranks call this, with a folder that they all see. Until the save is complete the folder holds the checkpoint
    that was there before. `optimizer`: any of torch's whose state is tensors and numbers, MasterWeights, or a list of
    them; learning rates and other options of their groups are saved, too. `extra`: the same on every rank, made of
    numbers, strings, lists, tuples, dicts and tensors (a scheduler's `state_dict()`, say). `random`: also the states
    of the random-number generators, for the same layout. `frozen=False` leaves out parameters that are not trained:
    the model that loads the checkpoint must have the same ones, which is checked by a fingerprint.

    `asynchronous`: return as soon as the tensors are copied to CPU memory. `wait()` of the returned handle ends when
    the checkpoint is complete; the next save and `engine.close()` wait for it, too.
    """
    require_engine(engine)
    if engine.saving is not None:
        before, engine.saving = engine.saving, None
        before.wait()
    with engine.together("saving a checkpoint") as view:
        planned = _plan_save(view, Path(path), optimizer, step, extra, random=random, frozen=frozen)
        if asynchronous:
            planned = replace(planned, tensors={name: _copy_to_cpu(t) for name, t in planned.tensors.items()})
        if view.comm.device.type == "cuda":  # the thread that writes has a stream of its own
            torch.cuda.synchronize(view.comm.device)
        handle = SaveHandle(view.comm, planned)
    if asynchronous:
        engine.saving = handle
    else:
        handle.wait()
    free_masters(optimizer)
    return handle


def require_savable(engine: EngineLike, optimizer: Any = None, *, frozen: bool = True) -> None:
    """ConfigError for an engine and an optimizer whose state cannot be saved; all ranks call this.

    Nothing is written. State that an optimizer creates in its first step is not checked before it.
    """
    require_engine(engine)
    with engine.together("checking the state for checkpoints") as view:
        catalog = Catalog(view)
        _, ranks = on_all_ranks(view.comm, lambda: _collect(catalog, optimizer, frozen, {}))
        writer.plan_global([rank.plan for rank in ranks])
        merge_states([rank.optimizer_use for rank in ranks], [rank.optimizer for rank in ranks])
    free_masters(optimizer)


# collect and plan


class _RankState(NamedTuple):
    """The state of a rank without its tensors, as all ranks get it."""

    plan: SavePlan
    optimizer: OptimizerState | None
    optimizer_use: OptimizerUse
    arguments: str = ""  # of save_checkpoint, as JSON: the same on all ranks


def _collect(
    catalog: Catalog, optimizer: Any, frozen: bool, tensors: dict[str, Tensor], arguments: str = ""
) -> _RankState:
    """Add weights, buffers and the optimizer's state to `tensors`, and plan to save all of them."""
    tensors |= {f"model.{n}": t.detach() for n, t in catalog.savable.items() if frozen or n not in catalog.frozen}
    state = None if optimizer is None else NamedOptimizer(optimizer, catalog).collect_state()
    if state is not None:
        tensors |= {f"optim.{name}": tensor for name, tensor in state.tensors.items()}
        state = state._replace(tensors={})
    use = OptimizerUse(state and state.kind, catalog.trained_name)
    return _RankState(writer.plan_local(tensors), state, use, arguments)


def _encode_arguments(path: Path, step: int | None, extra: Any, tensors: dict[str, Tensor]) -> str:
    """Arguments of save_checkpoint as JSON, with checksums of tensors in `extra`, which are added to `tensors`."""
    if step is not None and type(step) is not int:
        raise ConfigError(f"step={step!r}: must be an integer or None")
    found: dict[str, Tensor] = {}
    encoded = encode(extra, "extra", found)
    sums = [zlib.crc32(_copy_to_cpu(tensor).reshape(-1).view(torch.uint8).numpy()) for tensor in found.values()]
    tensors |= {f"extra.{name}": tensor for name, tensor in found.items()}
    return json.dumps({"path": str(path), "step": step, "extra": encoded, "sums": sums})


@dataclass(frozen=True)
class PlannedSave:
    """A checkpoint of which this rank writes its shards, and the first rank the indexes."""

    staged: StagedCheckpoint
    plan: SavePlan
    tensors: Mapping[str, Tensor]
    metadata: Metadata  # DCP's, of all ranks
    manifest: Manifest  # without files and tensors


def _plan_save(
    view: EngineView, path: Path, optimizer: Any, step: int | None, extra: Any, *, random: bool, frozen: bool
) -> PlannedSave:
    """Collect the state of all ranks, assign every shard to one of them, and create the folder."""
    comm, catalog = view.comm, Catalog(view)
    base = None if frozen else compute_fingerprint(comm, catalog)
    tensors: dict[str, Tensor] = {}

    def collect() -> _RankState:
        arguments = _encode_arguments(path, step, extra, tensors)
        states = get_random_states(comm.device) if random else {}
        tensors.update({f"random.{comm.rank}.{name}": tensor for name, tensor in states.items()})
        return _collect(catalog, optimizer, frozen, tensors, arguments)

    _, ranks = on_all_ranks(comm, collect)
    for rank, state in enumerate(ranks):
        if state.arguments != ranks[0].arguments:
            raise ConfigError(f"rank {rank} saves another path, step or extra than rank 0; pass the same on all ranks")
    plans, metadata = writer.plan_global([rank.plan for rank in ranks])
    module = next((stage.module for stage in view.stages.values() if isinstance(stage.module, HFStage)), None)
    manifest = Manifest(
        folder="",
        step=step,
        written_by=describe_layout(view.schedule, comm.layout),
        model=describe_model(module, catalog.ties) | {"base": base},
        optimizer=merge_states([rank.optimizer_use for rank in ranks], [rank.optimizer for rank in ranks]),
        extra=json.loads(ranks[0].arguments)["extra"],
    )
    staged, plan = _create_folder(comm, path), plans[comm.rank]
    names = {item.index.fqn for item in plan.items}
    own = {name: tensor for name, tensor in tensors.items() if name in names}
    return PlannedSave(staged, plan, own, metadata, manifest)


def _create_folder(comm: Communicator, path: Path) -> StagedCheckpoint:
    """The first rank creates the folder; FolderError on all ranks if it cannot."""
    try:
        _, tokens = on_all_ranks(comm, lambda: StagedCheckpoint.create_folder(path) if comm.rank == 0 else "")
    except ConfigError as error:
        raise FolderError(str(error)) from None
    return StagedCheckpoint(path, tokens[0])


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which later steps do not change."""
    shard = to_local(tensor.detach())
    copy = torch.empty_like(shard, device="cpu").copy_(shard)
    return sharded_like(tensor, copy) if isinstance(tensor, DTensor) else copy


def describe_layout(schedule: Schedule, layout: Layout) -> dict[str, Any]:
    """The layout that writes a checkpoint, and its versions."""
    return {
        "mesh": dict(layout.sizes), "schedule": schedule.name, "placement": schedule.placement.name,
        "num_stages": schedule.problem.num_stages,
    } | writer.describe_versions()  # fmt: skip


def describe_model(stage: HFStage | None, ties: Mapping[str, str]) -> dict[str, Any]:
    """The manifest's entry for the model: what a model directory has beside tensors."""
    if stage is None:
        return {"config": None, "head": None, "origin": "", "ties": dict(ties), "adapter": None}
    config = config_to_save(stage)
    return {
        "config": json.loads(config.to_json_string()), "head": stage.head, "ties": dict(ties),
        "origin": str(getattr(config, "_name_or_path", "") or ""), "adapter": describe_adapter(stage),
    }  # fmt: skip


# write and commit


class SaveHandle:
    """A checkpoint that is being written by a thread of each rank, as `save_checkpoint` returns it."""

    def __init__(self, comm: Communicator, planned: PlannedSave) -> None:
        self.path: Path = planned.staged.path
        self._comm, self._planned, self._key = comm, planned, f"checkpoint/{planned.staged.folder.name}"
        self._activity, self._error = "its start", ""
        self._size_read_at, self._num_bytes = time.monotonic(), 0
        self._awaited: tuple[int, ...] = ()  # ranks that this one waits for
        self._thread = threading.Thread(target=self._run, name="zeropipe-saving", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the checkpoint is complete; EngineError on every rank if one of them could not write it."""
        status = self._comm.status
        if not self.done:
            status.enter(f"the checkpoint {self.path}")
            while not self.done:
                status.phase = f"the checkpoint {self.path}, {self._activity}{self._read_size()}"
                status.waits_for = self._awaited
                self._thread.join(0.02)
            status.waits_for = ()
            status.enter(BETWEEN_STEPS)
        self._thread.join()
        error, self._error = self._error, ""  # raised once
        if error:
            raise EngineError(error)

    def _run(self) -> None:
        board = self._comm.board
        try:
            if self._comm.device.type == "cuda":  # a thread starts on the first GPU
                torch.cuda.set_device(self._comm.device)
            board.set(f"{self._key}/{self._comm.rank}", pickle.dumps(_result_or_error(self._write)))
            if self._comm.rank == 0:
                error = self._commit_all()
                board.set(f"{self._key}/done", error)
            else:
                self._wait_for((0,), "done")
                error = board.get(f"{self._key}/done").decode()
            self._error = f"the checkpoint {self.path} was not saved: {error}" if error else ""
        except PeerLost as lost:
            self._error = str(board.explain(lost, f"the checkpoint {self.path}"))
        except Exception as error:  # in a thread: `wait` raises it
            self._error = f"the checkpoint {self.path} was not saved: {_error_text(error)}"

    def _write(self) -> WrittenShards:
        planned = self._planned
        return writer.write_shards(planned.staged.folder, planned.plan, planned.tensors, self._report_progress)

    def _commit_all(self) -> str:
        """On the first rank: wait for all ranks and commit; returns the first error, if any."""
        board, planned, written, error = self._comm.board, self._planned, [], ""
        for rank in range(self._comm.size):
            self._wait_for((rank,) if rank else (), str(rank))
            result = pickle.loads(board.get(f"{self._key}/{rank}"))
            board.delete(f"{self._key}/{rank}")
            if isinstance(result, str):
                error = error or f"rank {rank}: {result}"
            else:
                written.append(result)
        if not error:
            self._report_progress("writing its index")
            outcome = _result_or_error(lambda: planned.staged.commit(planned.manifest, planned.metadata, written))
            error = f"rank 0: {outcome}" if isinstance(outcome, str) else ""
        if error:
            planned.staged.discard()
        return error

    def _wait_for(self, ranks: tuple[int, ...], key: str) -> None:
        """Wait for a note on the board, without a time-out; PeerLost if there is an error on it instead."""
        self._awaited, self._activity = ranks, "waiting for other ranks"
        pause, board = 0.001, self._comm.board
        while not board.has(f"{self._key}/{key}"):
            if board.read_error() is not None:
                raise PeerLost((), "another rank failed")
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        self._awaited = ()

    def _report_progress(self, activity: str) -> None:
        self._activity = activity

    def _read_size(self) -> str:
        """The bytes written, read at most once a second: a change of it tells the watchdog that this rank works."""
        if time.monotonic() - self._size_read_at > 1.0:
            self._size_read_at = time.monotonic()
            with suppress(OSError):
                files = self._planned.staged.folder.glob(f"__{self._comm.rank}_*")
                self._num_bytes = sum(file.stat().st_size for file in files)
        return f" ({self._num_bytes:,} bytes)" if self._num_bytes else ""


def _result_or_error(work: Callable[[], T]) -> T | str:
    try:
        return work()
    except Exception as error:
        return _error_text(error)


def _error_text(error: Exception) -> str:
    """One line about an error; of torch's writer the error of the operating system that caused it."""
    if isinstance(error, ZeropipeError):
        return first_line(error)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.strerror}{f' ({cause.filename})' if cause.filename else ''}"
        cause = cause.__cause__ or cause.__context__
    return f"{type(error).__name__}: {first_line(error)}"
