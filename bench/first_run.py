"""From an empty environment to the first picture of a schedule, and to the first training step.

    make dist && python bench/first_run.py

Seconds of the clock, and of all processors together: of a machine that does nothing else the clock is close to the
latter, where the network is fast. Each goal starts from nothing but Python and the wheel in dist/.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PICTURE = ["zeropipe", "draw", "zbv", "--ranks", "4", "--microbatches", "8", "-o", "first.html"]
STEP = ["zeropipe", "train", "tiny/run.toml", "--train.steps", "1", "--rate.warmup", "1"]
GOALS = {  # extra, and what is run after the installation
    "the first picture": ("", [PICTURE]),
    "the first training step": ("[train]", [["python", str(ROOT / "examples/tiny/make.py"), "tiny"], STEP]),
}


def main() -> None:
    """Print a row for each step of each goal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--goal", choices=GOALS, action="append", help="one of them; both by default")
    (wheel,) = (ROOT / "dist").glob("*.whl")
    print("| goal | step | clock, s | processors, s |\n|---|---|---:|---:|")
    for goal in parser.parse_args().goal or GOALS:
        extra, commands = GOALS[goal]
        with tempfile.TemporaryDirectory() as folder:
            install = ["python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            install += ["-c", str(ROOT / "constraints.txt"), f"{wheel}{extra}"]
            steps = [[sys.executable, "-m", "venv", "venv"], install, *commands]
            times = [run(command, Path(folder)) for command in steps]
        for command, (clock, processors) in zip(steps, times):
            name = " ".join(Path(word).name for word in command[:3])
            print(f"| {goal} | {name} | {clock:.1f} | {processors:.1f} |")
        print(f"| {goal} | all | {sum(clock for clock, _ in times):.1f} | {sum(used for _, used in times):.1f} |")


def run(command: list[str], folder: Path) -> tuple[float, float]:
    """Run a command of the environment; the seconds of the clock, and of its processes."""
    program = folder / "venv" / "bin" / command[0]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(
        [str(program) if program.exists() else command[0], *command[1:]], cwd=folder, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return time.perf_counter() - start, used


if __name__ == "__main__":
    main()
