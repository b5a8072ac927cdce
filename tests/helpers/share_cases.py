"""What the local ranks run in test_broadcast.py."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from engine_helpers import SquareLoss, blocks, microbatches, own, plain_step
from torch import Tensor, nn

from zeropipe.core.schedule import Schedule
from zeropipe.core.timeline import Timeline
from zeropipe.engine import Engine
from zeropipe.engine.comm.broadcast import broadcast_value
from zeropipe.engine.comm.communicator import Communicator
from zeropipe.engine.layout import Layout
from zeropipe.engine.step import clock


class Pair(NamedTuple):
    """A kind of output that broadcast_value() does not know."""

    logits: Tensor
    name: str


def shared_values() -> list[bool]:
    """Whether values of many kinds come to all ranks as they were, from every rank, in small pieces."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(40, 30, generator=generator)
    value = {
        "plain": wide, "transposed": wide.T, "half": wide.bfloat16(), "bool": wide > 0, "word": torch.tensor(3),
        "none": torch.empty(0, 4), "complex": torch.complex(wide, wide).conj(), "twice": [wide, wide],
        "sparse": (wide > 1).float().to_sparse(), "pair": Pair(wide[3], "x" * 5000), "other": (1, None, "word"),
    }  # fmt: skip
    comm = Communicator(Layout.create(None), torch.device("cpu"), 60.0)
    found = []
    with mock.patch("zeropipe.engine.comm.broadcast.CHUNK_BYTES", 1000):
        for root in range(comm.size):
            got = broadcast_value(comm, value if comm.rank == root else None, root, torch.device("cpu"))
            same = (got["pair"].name, got["other"]) == (value["pair"].name, value["other"])
            same &= all(_equal(got[key], value[key]) for key in ("plain", "transposed", "half", "bool", "word", "none"))
            same &= _equal(got["complex"], value["complex"]) and _equal(
                got["sparse"].to_dense(), value["sparse"].to_dense()
            )
            same &= got["twice"][0] is got["twice"][1] and _equal(got["pair"].logits, value["pair"].logits)
            found.append(bool(same))
    comm.close()
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def broadcast_memory(schedule: Schedule, megabytes: int) -> float:
    """How much more memory this rank needed while outputs were sent to all, in sizes of all outputs together."""
    stages = own(blocks(schedule.num_stages), schedule)
    size = megabytes * 2**20
    each = size // 4 // schedule.num_microbatches
    with Engine(schedule, stages) as engine:
        batches = microbatches(schedule.num_microbatches)
        engine.forward(batches, broadcast=True)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        before = _status("VmHWM")
        outputs = engine.forward(batches, post=lambda output, _: torch.full((each,), 1.0), broadcast=True)
        assert all(float(output.sum()) == each for output in outputs)
        return (_status("VmHWM") - before) / size


def _status(name: str) -> int:
    """An entry of the kernel's in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


def always_new_values(schedule: Schedule, steps: int) -> tuple[float, int]:
    """Steps whose microbatches hold a number that was never there before; the largest error, and what is remembered."""
    plain, stages = blocks(schedule.num_stages), own(blocks(schedule.num_stages), schedule)
    loss_fn, error = SquareLoss(), 0.0
    with Engine(schedule, stages) as engine:
        engine._shapes._max_kinds = 10
        for step in range(steps):
            batches = microbatches(schedule.num_microbatches, seed=step)
            for index, batch in enumerate(batches):
                batch["identity"] = f"{step}/{index}"
            wanted = plain_step(nn.Sequential(*plain), batches, loss_fn)
            error = max(error, abs(engine.train_step(batches, loss_fn).loss - wanted))
            error = max(error, abs(engine.eval_step(batches, loss_fn).loss - wanted))
        shapes = Counter(key[:2] if key[0] in ("sent", "received") else key[0] for key in engine._shapes._shapes)
        return error, max(len(engine._shapes._kinds), *shapes.values())


def drifting_clocks(schedule: Schedule, steps: int) -> list[Timeline]:
    """Timelines of ranks on two machines, as they believe, where rank 1's clock runs half as fast again."""
    rank, real = dist.get_rank(), time.perf_counter

    def drifting() -> float:
        return 1.5 * real() + 100 if rank else real()

    found = []
    with (
        mock.patch.object(clock, "machine_name", return_value=f"machine {rank}"),
        mock.patch("time.perf_counter", drifting),
        Engine(schedule, own(blocks(schedule.num_stages), schedule), record=True) as engine,
    ):
        for _ in range(steps):
            engine.train_step(microbatches(schedule.num_microbatches), SquareLoss())
            found.append(engine.timeline())
            time.sleep(0.3)
    return found
