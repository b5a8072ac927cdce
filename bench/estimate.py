"""Estimates beside measurements: layers of a model on the GPU at hand, in every mode of activation checkpointing.

    python bench/estimate.py                                          # Qwen3-8B on an H200, compiled, bfloat16
    python bench/estimate.py --model qwen3-8b --gpu h200 --sequence 4096 --eager --out costs.json

Ratios are estimated over measured: 1.00 is right. `held` is what F keeps until I, `kept` what is left from I until W;
`all` is F + I + W. The last line has the worst ratio of a decoder layer's times and sizes over all modes.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from zeropipe.core.model.configs import CONFIGS
from zeropipe.engine.run.launch import LocalRanks
from zeropipe.estimating.estimate import estimate
from zeropipe.profiling.measure import profile
from zeropipe.profiling.spec import ProfileJob, list_settings
from zeropipe.sim.layer_costs import LayerCost, LayerCosts, Setting
from zeropipe.sim.layer_file import to_layer_json
from zeropipe.sim.profile_costs import costs_from_profile

MODES = "none,full,selective:op,memory_budget:0.5"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--microbatch-size", type=int, default=1)
    parser.add_argument("--ac", default=MODES)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the measured costs")
    args = parser.parse_args()
    begun = time.perf_counter()
    dtype = "bfloat16" if args.device == "cuda" else "float32"
    settings = list_settings(tuple(args.ac.split(",")), (args.microbatch_size,), (not args.eager,))
    job = ProfileJob(args.model, CONFIGS[args.model], settings, args.sequence, args.device, dtype, args.steps)
    with LocalRanks(1) as ranks:
        measured = costs_from_profile(ranks.run(profile, job, timeout=600)[0])
    if args.out:
        args.out.write_text(to_layer_json(measured))
    guess = estimate(
        args.model, gpu=args.gpu, sequence=args.sequence, dtype=dtype, microbatch_size=args.microbatch_size,
        ac=[setting.ac for setting in settings], compile=not args.eager,
    )  # fmt: skip
    print(
        f"{args.model} on {measured.machine.get('gpu', 'a CPU')}, {args.sequence} tokens, {dtype}, {measured.versions}"
    )
    worst = {"time": 1.0, "size": 1.0}
    for setting in measured.settings:
        ratios = compared(measured, setting, guess)
        for name in ratios:
            worst[name] = max(worst[name], ratios[name])
    print(f"worst layer: times off by {100 * (worst['time'] - 1):.0f}%, sizes by {100 * (worst['size'] - 1):.0f}%; "
          f"{time.perf_counter() - begun:.0f} s in all")  # fmt: skip


def compared(measured: LayerCosts, setting: Setting, guess: LayerCosts) -> dict[str, float]:
    """Print one mode; how far the worst time and size of a decoder layer are off, as a factor."""
    other = guess.setting(ac=setting.ac, microbatch_size=setting.microbatch_size, compile=setting.compile)
    print(f"\n{setting}")
    print(f"{'':12} {'F ms':>8} {'I ms':>8} {'W ms':>8} {'all ms':>8} {'held MiB':>9} {'kept MiB':>9}"
          f" | {'F':>5} {'I':>5} {'W':>5} {'all':>5} {'held':>5} {'kept':>5}  spread of F, I, W")  # fmt: skip
    worst = {"time": 1.0, "size": 1.0}
    for kind in (*measured.before, *dict.fromkeys(measured.layers), *measured.after):
        real, estimated = _row(setting.kinds[kind]), _row(_estimated(other, kind, guess))
        ratios = [b / a if a else float("nan") for a, b in zip(real, estimated, strict=True)]
        times, sizes = (f"{1e3 * x:8.3f}" for x in real[:4]), (f"{x / 2**20:9.1f}" for x in real[4:])
        spread = setting.kinds[kind].spread
        print(f"{kind:12} {' '.join(times)} {' '.join(sizes)} | {' '.join(f'{r:5.2f}' for r in ratios)}  "
              + ", ".join(f"{100 * spread.get(name, 0):.1f}%" for name in "fiw"))  # fmt: skip
        if kind in measured.layers:
            for name, some in (("time", ratios[:4]), ("size", ratios[4:])):
                worst[name] = max(worst[name], *(max(r, 1 / r) for r in some if r > 0))
    each = setting.kinds[measured.each[0]]
    print(f"{'every stage':12} {' '.join(f'{1e3 * x:8.3f}' for x in _row(each)[:4])}")
    return worst


def _estimated(setting: Setting, kind: str, guess: LayerCosts) -> Any:
    """The head is measured with its loss."""
    parts = [setting.kinds[kind], *(setting.kinds[k] for k in guess.after if kind == "head" and k != "head")]
    sums = {name: sum(getattr(part, name) for part in parts) for name in ("f", "i", "w", "activation", "stash")}
    return LayerCost(**sums)


def _row(cost: LayerCost) -> list[float]:
    return [cost.f, cost.i, cost.w, cost.f + cost.i + cost.w, cost.activation, cost.stash]


if __name__ == "__main__":
    main()
