"""Memory of sharded stages: between steps, and within a step what the simulator says against what is there.

    python bench/memory_mesh.py                       # pp=2 x dp_shard=2, four processes on gloo
    python bench/memory_mesh.py --schedule 1f1b

Between steps: bytes of parameters and AdamW state on a process, over those of the same stages unsharded. Within a step:
the simulated peak, from the costs of a recorded step, over the measured one. Measured is every tensor storage that the
step made and that is still alive, after every operator; what was there before the step does not count.
"""

from __future__ import annotations

import argparse
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zeropipe as zp
from zeropipe.engine import Engine, module_stages, parallelize
from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.run.launch import LocalRanks
from zeropipe.sim.fit import fit


class Live(TorchDispatchMode):
    """The storages that operators made, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, Any] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = to_local(tensor).untyped_storage()
                if storage._cdata not in self._storages:
                    self._storages[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.level())
        return out

    def level(self) -> int:
        """Bytes now."""
        total = 0
        for key, ref in list(self._storages.items()):
            storage = ref()
            if storage is None:
                del self._storages[key]
            else:
                total += storage.nbytes()
        return total


class SquareLoss:
    def count(self, microbatch: dict[str, Tensor]) -> int:
        return int(microbatch["inputs"].numel())

    def __call__(self, output: Tensor, microbatch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return output.square().sum(), self.count(microbatch)


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def measure(schedule: zp.Schedule, sizes: dict[str, int], options: dict[str, Any], args: argparse.Namespace) -> Any:
    """Bytes between steps, and the measured and the simulated peak of a step, on this process."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    torch.manual_seed(0)
    blocks = [block(args.width) for _ in range(args.blocks * schedule.num_stages)]
    rank = mesh["pp"].get_local_rank()
    stages = parallelize(dict(module_stages(blocks, schedule, rank)), mesh)
    data = [{"inputs": torch.randn(args.tokens, args.width)} for _ in range(schedule.num_microbatches)]
    live = Live()
    with Engine(schedule, stages, mesh=mesh, **options) as engine:
        optimizer = torch.optim.AdamW(engine.parameters(), lr=1e-3, foreach=False)
        peak = 0
        for _ in range(2):  # the first step makes what stays
            with live:
                before = live.level()
                live.peak = before
                engine.train_step(data, SquareLoss())
                peak = live.peak - before
            optimizer.step()
            optimizer.zero_grad()
        state = [t for some in optimizer.state.values() for t in some.values() if isinstance(t, Tensor)]
        kept = sum(to_local(t).numel() * t.element_size() for t in [*engine.parameters(), *state])
        engine.record = True
        engine.train_step(data, SquareLoss())
        engine.train_step(data, SquareLoss())
        recorded = engine.timeline()
    simulated = zp.simulate(schedule, fit(recorded))
    return kept, peak, recorded.peak_memory[rank], simulated.peak_memory[rank]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="zbv")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--blocks", type=int, default=6, help="of a stage")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    schedule = zp.build(args.schedule, ranks=2, microbatches=args.microbatches)
    print(f"{schedule.name}: {schedule.sizes}, {args.blocks} blocks of width {args.width} in a stage")
    with LocalRanks(4) as ranks:
        whole = ranks.run(measure, schedule, {"pp": 2, "dp_replicate": 2}, {}, args)
        for name, options in (("keep", {}), ("regather", {"regather": True})):
            # a whole backward would make each weight's gradient beside the sum of those before it
            options = {"direct_gradients": True, **options}
            found = ranks.run(measure, schedule, {"pp": 2, "dp_shard": 2}, options, args)
            if name == "keep":
                ratio = max(mine[0] / theirs[0] for mine, theirs in zip(found, whole))
                print(f"between steps, dp_shard=2 over unsharded: {ratio:.3f}")
            peaks = [f"{simulated / measured:.3f}" for _, measured, _, simulated in found[::2]]
            largest = max(measured for _, measured, _, _ in found)
            unsharded = max(measured for _, measured, _, _ in whole)
            print(
                f"within a step, {name}: simulated over measured peak {', '.join(peaks)} (ranks 0, 1); "
                f"measured {largest / 1e6:.1f} MB, unsharded {unsharded / 1e6:.1f} MB beside its weights"
            )


if __name__ == "__main__":
    main()
