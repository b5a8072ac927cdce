"""Searches every published result at the memory limit it was published for, and says whether it is met.

    python bench/search.py                    # all tables; most cells take less than a second
    python bench/search.py zb-2p crosspipe    # some of them
    python bench/search.py sizes --seconds 60
    python bench/search.py random --cases 60 --steps 20000   # random cases, the same ones every time

Each line: the case, the published number, what was found, the lower bound in the same unit, the gap between the two,
the seconds (of wall time and of processor time), and whether it is met. Where nothing is published a summary counts the
gaps: the aim is at most 0.3% where memory allows zero bubble, and at most 2% elsewhere. Sources of the numbers: Zero
Bubble (arXiv 2401.10241, tables 5, 8 and 9), CrossPipe (USENIX ATC'25, table 5), Pipeline Parallelism with Controllable
Memory (arXiv 2405.15362).
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path

from search_ablation import PARTS, SETS, ablate
from search_cases import TABLES, UNPUBLISHED, allows_zero_bubble

import zeropipe as zp
from zeropipe.searching.warm_kernels import warm_kernels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help="all by default")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each search")
    parser.add_argument("--steps", type=int, help="of local search instead: as much on a busy machine as on any other")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--cases", type=int, default=60, help="of the table random")
    parser.add_argument("--ablate", nargs="*", choices=[*PARTS, []], help="measure what parts of the search add")
    parser.add_argument("--sets", nargs="*", choices=[*SETS], default=[*SETS][:3], help="of cases for --ablate")
    parser.add_argument("--every", type=int, default=1, help="take every n-th case for --ablate")
    parser.add_argument("--keep", type=Path, help="file of results for --ablate: those that it has are not repeated")
    options = parser.parse_args()
    warm_up()
    if options.ablate is not None:
        parts = options.ablate or [*PARTS][1:]
        ablate(options.sets, parts, options.every, options.cases, options.steps or 3200, options.keep)
        return
    effort = {name: getattr(options, name) for name in ("seconds", "steps", "seed", "workers")}
    missed = total = 0
    for table in options.tables or TABLES:
        heads = ("published", "found", "bound", "gap", "wall s", "cpu s")
        wide, gaps = 64 if table == "random" else 40, []
        print(f"\n{table}\n{'case':{wide}}", *(f"{head:>{width}}" for head, width in zip(heads, (10, 10, 10, 7, 7, 7))))
        for case in islice(TABLES[table](), options.cases if table == "random" else None):
            wall, cpu = time.perf_counter(), time.process_time()
            found = [zp.search(**search, **effort) for search in case.searches]
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            value, best = min(((case.unit(one, one.value), one) for one in found), key=lambda pair: pair[0])
            met = value <= case.published + 0.5 * 10**-case.digits
            total += 1
            missed += not met and table not in UNPUBLISHED
            numbers = f"{case.published:10.{case.digits}f} {value:10.{case.digits + 1}f}"
            bound = f"{case.unit(best, best.bound):10.{case.digits + 1}f} {best.gap:7.2%}"
            verdict = "" if table in UNPUBLISHED else "met" if met else "NOT MET"
            gaps.append((best.gap, all(allows_zero_bubble(search) for search in case.searches)))
            print(f"{case.name:{wide}} {numbers} {bound} {wall:7.1f} {cpu:7.1f}  {verdict}", flush=True)
        if table in UNPUBLISHED:
            print(summary(gaps))
    print(f"\n{total} cases, {missed} not met")


def summary(gaps: list[tuple[float, bool]]) -> str:
    """How many gaps are as small as they should be."""
    parts = [f"{len(gaps)} cases, {sum(gap == 0 for gap, _ in gaps)} proven"]
    for zero, aim, where in ((True, 0.003, "memory allows zero bubble"), (False, 0.02, "elsewhere")):
        some = [gap for gap, flag in gaps if flag == zero]
        above = sum(gap > aim for gap in some)
        parts.append(f"{where}: {above} of {len(some)} above {aim:.1%}, at most {max(some, default=0.0):.2%}")
    return "; ".join(parts)


def warm_up() -> None:
    """Load the compiled kernels, so that they do not count."""
    begin = time.perf_counter()
    warm_kernels(num_actions=1_000_000)
    print(f"kernels loaded in {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
