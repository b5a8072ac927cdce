"""How fast schedules are built, checked and simulated, beside torch's own simulation of the same schedules.

    python bench/simulate.py [--sizes 10000,100000,1000000,10000000] [--schedules 1f1b,zbv,interleaved] [--plain]
                             [--json FILE]

Prints actions per second and the growth exponent (1 = linear). torch's `_simulate_comms_compute` runs where it ends
within a minute; the ratio is of the two measured in the same run. Each size runs in a process of its own, so that the
peak memory belongs to it. The kernels are compiled before the clock starts, as in a process that lives on; with --plain
they are not, as in a small command.
"""

import argparse
import itertools
import json
import math
import resource
import subprocess
import sys
import time

RANKS = 16
TORCH_LIMIT = 1_500_000  # actions; beyond this torch takes minutes


def microbatches_for(name: str, size: int) -> int:
    """The number of microbatches that gives about `size` actions on RANKS ranks."""
    import zeropipe as zp

    per_microbatch = zp.build(name, ranks=RANKS, microbatches=2 * RANKS).num_actions / (2 * RANKS)
    return max(2 * RANKS, round(size / per_microbatch / RANKS) * RANKS)


def measure(name: str, size: int, plain: bool) -> dict:
    """One size of one schedule, in this process."""
    import zeropipe as zp
    from zeropipe.core import jit

    if plain:
        jit.COMPILE_FROM_SIZE = jit.COMPILE_AFTER_ACTIONS = sys.maxsize
    else:
        jit.use_compiled()
        warm = zp.build(name, ranks=RANKS, microbatches=8 * RANKS)
        zp.check(warm)
        _ = zp.simulate(warm).makespan
        assert warm.num_actions >= jit.MIN_COMPILED_SIZE

    microbatches = microbatches_for(name, size)
    clock = [time.perf_counter()]
    schedule = zp.build(name, ranks=RANKS, microbatches=microbatches)
    clock.append(time.perf_counter())
    zp.check(schedule)
    clock.append(time.perf_counter())
    timeline = zp.simulate(schedule, zp.Costs(p2p=0.01))
    clock.append(time.perf_counter())
    build, check, simulate = (b - a for a, b in itertools.pairwise(clock))
    row = {
        "schedule": name, "actions": schedule.num_actions, "build": build, "check": check, "simulate": simulate,
        "bubble": timeline.bubble, "peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }  # fmt: skip
    if schedule.num_actions <= TORCH_LIMIT and len(schedule.placement.copies) == 1:
        row["torch"] = torch_seconds(schedule)
    return row


def torch_seconds(schedule) -> float | None:
    """Seconds torch's simulation takes for the same lowered schedule (None without torch)."""
    try:
        from torch.distributed.pipelining.schedules import _Action, _simulate_comms_compute
    except ImportError:
        return None
    import zeropipe as zp

    rows = {
        rank: [_Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(zp.to_csv(zp.lower(schedule)).splitlines())
    }
    begin = time.perf_counter()
    _simulate_comms_compute(rows, schedule.placement.rank_of, schedule.num_stages)
    return time.perf_counter() - begin


def in_its_own_process(name: str, size: int, plain: bool) -> dict:
    command = [sys.executable, __file__, "--one", name, str(size), *["--plain"] * plain]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def exponent(rows: list[dict], what: str) -> float:
    """Growth from the second-largest to the largest size: t ~ n^exponent."""
    small, large = rows[-2], rows[-1]
    return math.log(large[what] / small[what]) / math.log(large["actions"] / small["actions"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10000,100000,1000000,10000000")
    parser.add_argument("--schedules", default="1f1b,interleaved,zbv")
    parser.add_argument("--plain", action="store_true", help="without compiled kernels")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one[0], int(args.one[1]), args.plain)))
        return
    everything = []
    print(f"{'schedule':12} {'actions':>10} {'build/s':>11} {'check/s':>11} {'simulate/s':>11} {'all/s':>11}"
          f" {'peak GB':>8} {'torch/ours':>11}")  # fmt: skip
    for name in args.schedules.split(","):
        rows = []
        for size in map(int, args.sizes.split(",")):
            row = in_its_own_process(name, size, args.plain)
            rows.append(row)
            n = row["actions"]
            total = row["build"] + row["check"] + row["simulate"]
            ratio = f"{row['torch'] / row['simulate']:.0f}x" if row.get("torch") else "-"
            speeds = [n / seconds for seconds in (row["build"], row["check"], row["simulate"], total)]
            columns = " ".join(f"{speed:11,.0f}" for speed in speeds)
            print(f"{name:12} {n:10,} {columns} {row['peak_rss_gb']:8.2f} {ratio:>11}", flush=True)
        if len(rows) > 1:
            growth = ", ".join(f"{what} {exponent(rows, what):.2f}" for what in ("build", "check", "simulate"))
            print(f"{name:12} growth exponent from {rows[-2]['actions']:,} to {rows[-1]['actions']:,}: {growth}")
        everything += rows
    if args.json:
        with open(args.json, "w") as file:
            json.dump(everything, file, indent=2)


if __name__ == "__main__":
    main()
