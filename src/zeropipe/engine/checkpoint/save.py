"""save_checkpoint: every rank writes its part, and all of it becomes visible at once."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeropipe.core.schedule import Schedule
from zeropipe.engine.backward.gradients import local
from zeropipe.engine.checkpoint import pieces
from zeropipe.engine.checkpoint.frozen import fingerprint
from zeropipe.engine.checkpoint.manifest import Manifest, NoFolder, Target
from zeropipe.engine.checkpoint.names import Catalog, HasTeam, Team, require_engine
from zeropipe.engine.checkpoint.optimizers import Gives, Kept, Optimized, kind_of_all
from zeropipe.engine.checkpoint.pieces import Written
from zeropipe.engine.checkpoint.randomness import random_states
from zeropipe.engine.checkpoint.saving import Progress, Saving
from zeropipe.engine.checkpoint.values import encode
from zeropipe.engine.comm.collective import on_all_ranks
from zeropipe.engine.layout import Layout
from zeropipe.engine.stages.adapters import described_adapter
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.save import config_of
from zeropipe.engine.torch_private.tensors import like
from zeropipe.errors import ConfigError


def save_checkpoint(
    path: str | Path,
    engine: HasTeam,
    optimizer: Any = None,
    *,
    step: int | None = None,
    extra: Any = None,
    random: bool = False,
    frozen: bool = True,
    asynchronous: bool = False,
) -> Saving:
    """Save weights, buffers and the optimizer's state into the folder `path`, for `load_checkpoint` on any layout.

    All ranks call this alike, with a folder that they all see. It holds the checkpoint that was there before until the
    last moment, and then the new one. `optimizer`: any of torch's whose state is tensors and numbers, MasterWeights, or
    a list of them; learning rates and other options of their groups are saved, too. `extra`: the same on every rank,
    made of numbers, strings, lists, tuples, dicts and tensors (a scheduler's `state_dict()`, say). `random`: the states
    of the random-number generators too, for the same layout. `frozen=False` leaves out parameters that are not trained:
    who loads must have the same ones, which is checked by a fingerprint.

    `asynchronous`: return as soon as the tensors are copied to CPU memory. `wait()` of what is returned ends when the
    checkpoint is there; the next save and `engine.close()` wait for it, too.
    """
    require_engine(engine)
    if engine.saving is not None:
        before, engine.saving = engine.saving, None
        before.wait()
    with engine.together("saving a checkpoint") as team:
        saving = _start(Path(path), team, optimizer, step, extra, random, frozen, asynchronous)
    if asynchronous:
        engine.saving = saving
    else:
        saving.wait()
    return saving


def require_savable(engine: HasTeam, optimizer: Any = None, *, frozen: bool = True) -> None:
    """ConfigError for an engine and an optimizer that no checkpoint can hold; all ranks call this alike.

    Nothing is written. What an optimizer keeps from its first step on is not known before it.
    """
    require_engine(engine)
    with engine.together("looking at what a checkpoint will hold") as team:
        catalog = Catalog(team)
        state: dict[str, Tensor] = {}
        _, shares = on_all_ranks(
            team.fabric, lambda: _share(catalog, state, optimizer, {} if frozen else catalog.frozen)
        )
        pieces.share_out([share.plan for share in shares])
        _optimizer(shares)


class _Share(NamedTuple):
    """What a rank brings to a checkpoint."""

    plan: Any
    kept: Kept | None  # without its tensors
    gives: Gives
    facts: str = ""


def _share(catalog: Catalog, state: dict[str, Tensor], optimizer: Any, left_out: Mapping[str, Tensor]) -> _Share:
    """Add weights and the optimizer's state to `state`, which may hold more, and plan to save all of it."""
    kept_here = {name: tensor for name, tensor in catalog.saved.items() if name not in left_out}
    state.update({f"model.{name}": tensor.detach() for name, tensor in kept_here.items()})
    kept = None if optimizer is None else Optimized(optimizer, catalog).keep()
    if kept is not None:
        state.update({f"optim.{name}": tensor for name, tensor in kept.tensors.items()})
    return _Share(
        pieces.plan_save(state), kept and kept._replace(tensors={}), Gives(kept and kept.kind, catalog.learning)
    )


def _start(
    path: Path, team: Team, optimizer: Any, step: int | None, extra: Any, random: bool, frozen: bool, asynchronous: bool
) -> Saving:
    fabric, catalog = team.fabric, Catalog(team)
    left_out = {} if frozen else catalog.frozen
    base = None if frozen else fingerprint(fabric, catalog)
    state: dict[str, Tensor] = {}
    beside: dict[str, Tensor] = {}

    def prepare() -> _Share:
        if step is not None and type(step) is not int:
            raise ConfigError(f"step={step!r}: give the number of steps done")
        encoded = encode(extra, "extra", beside)
        state.update({f"extra.{name}": tensor for name, tensor in beside.items()})
        if random:
            states = random_states(fabric.device)
            state.update({f"random.{fabric.rank}.{name}": tensor for name, tensor in states.items()})
        sums = [zlib.crc32(staged(tensor).reshape(-1).view(torch.uint8).numpy()) for tensor in beside.values()]
        facts = json.dumps({"path": str(path), "step": step, "extra": encoded, "sums": sums})
        return _share(catalog, state, optimizer, left_out)._replace(facts=facts)

    _, shares = on_all_ranks(fabric, prepare)
    plans, metadata = _shared_out(shares)
    model, optimized = _model(team, catalog) | {"base": base}, _optimizer(shares)
    try:
        _, (token, *_) = on_all_ranks(fabric, lambda: Target.open(path) if fabric.rank == 0 else "")
    except ConfigError as error:
        raise NoFolder(str(error)) from None
    mine = plans[fabric.rank]
    wanted = {item.index.fqn for item in mine.items}
    own = {name: staged(tensor) if asynchronous else tensor for name, tensor in state.items() if name in wanted}
    if fabric.device.type == "cuda":  # the thread that writes has a stream of its own
        torch.cuda.synchronize(fabric.device)
    target = Target(path, token)
    facts = json.loads(shares[0].facts)
    layout = written_by(team.schedule, fabric.layout)

    def write(progress: Progress) -> Written:
        return pieces.write(target.folder, mine, own, progress)

    def finish(parts: list[Written], progress: Progress) -> None:
        progress("writing its index")
        pieces.finish(target.folder, metadata, parts)
        files = pieces.file_sizes(target.folder, parts)
        tensors = pieces.saved_tensors(metadata, parts)
        target.switch(Manifest(target.folder.name, step, layout, model, optimized, facts["extra"], files, tensors))

    return Saving(target, fabric, write, finish)


def _shared_out(shares: list[_Share]) -> tuple[list[Any], Any]:
    for rank, share in enumerate(shares):
        if share.facts != shares[0].facts:
            raise ConfigError(f"rank {rank} saves another path, step or extra than rank 0: give all the same")
    return pieces.share_out([share.plan for share in shares])


def staged(tensor: Any) -> Tensor:
    """A copy on the CPU that later steps do not change."""
    piece = local(tensor.detach())
    copy = torch.empty_like(piece, device="cpu").copy_(piece)
    return like(tensor, copy) if hasattr(tensor, "full_tensor") else copy


def written_by(schedule: Schedule, layout: Layout) -> dict[str, Any]:
    """Which layout wrote a checkpoint: for people, and for random states."""
    return {
        "mesh": dict(layout.sizes), "schedule": schedule.name, "placement": schedule.placement.name,
        "num_stages": schedule.num_stages,
    } | pieces.versions()  # fmt: skip


def _model(team: Team, catalog: Catalog) -> dict[str, Any]:
    stage = next((told.module for told in team.stages.values() if isinstance(told.module, HFStage)), None)
    return described_model(stage, catalog.ties)


def described_model(stage: HFStage | None, ties: Mapping[str, str]) -> dict[str, Any]:
    """What a model directory is made of beside its tensors."""
    if stage is None:
        return {"config": None, "head": None, "origin": "", "ties": dict(ties), "adapter": None}
    config = config_of(stage)
    return {
        "config": json.loads(config.to_json_string()), "head": stage.head, "ties": dict(ties),
        "origin": str(getattr(config, "_name_or_path", "") or ""), "adapter": described_adapter(stage),
    }  # fmt: skip


def _optimizer(shares: list[_Share]) -> dict[str, Any] | None:
    """Numbers and groups of all ranks' optimizers together."""
    kind = kind_of_all([share.gives for share in shares])
    if kind is None:
        return None
    groups: list[dict[str, Any]] = []
    group_of: dict[str, int] = {}
    numbers: dict[str, Mapping[str, Any]] = {}
    for kept in (share.kept for share in shares if share.kept is not None):
        numbers |= kept.numbers
        for name, number in kept.group_of.items():
            options = kept.groups[number]
            if options not in groups:
                groups.append(options)
            if group_of.setdefault(name, groups.index(options)) != groups.index(options):
                raise ConfigError(f"ranks have other options for {name} in their optimizers: give all the same")
    return {"kind": kind, "numbers": numbers, "groups": groups, "group_of": group_of}
