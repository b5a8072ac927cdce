"""How fast plans are made: candidates per second, for some models and numbers of GPUs.

python bench/plan.py            # about two minutes on 2 cores
python bench/plan.py --workers 1
"""

from __future__ import annotations

import argparse
import os

import zeropipe as zp

CASES = [("qwen3-8b", 8, 64), ("qwen3-32b", 16, 256), ("llama-3-70b", 64, 512), ("qwen3-235b-a22b", 128, 1024)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--max-candidates", type=int, default=1000, help="candidates to simulate")
    given = parser.parse_args()
    print(f"{'model':18}{'GPUs':>6}{'candidates':>12}{'seconds':>9}{'per second':>12}   best")
    for model, gpus, batch in CASES:
        made = zp.plan(
            model,
            gpus=gpus,
            batch=batch,
            gpu="h200",
            search_seconds=0,
            workers=given.workers,
            max_candidates=given.max_candidates,
        )
        best = str(made.rows[0].candidate) if made.rows else made.describe_closest()
        speed = made.num_tried / made.seconds
        print(f"{model:18}{gpus:6}{made.num_tried:12,}{made.seconds:9.1f}{speed:12.0f}   {best}", flush=True)


if __name__ == "__main__":
    main()
