"""The runs of the walks in docs/architecture.md, each recorded: `python walk_cases.py COMMAND FUNCTIONS.json`.

Prints the calls of the given functions, in order, as JSON: [["cli/simulate.py", "simulate"], ...].
"""

import io
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import zeropipe

SOURCE = Path(zeropipe.__file__).parent
Call = tuple[str, str]  # file under src/zeropipe, qualified name

COMMANDS = {
    "simulate": ["simulate", "1f1b", "--ranks", "4", "--microbatches", "8"],
    "search": ["search", "--ranks", "4", "--microbatches", "8", "--memory-limit", "3", "--search-steps", "5"],
    "plan": [
        "plan", "qwen3-8b", "--gpus", "4", "--batch", "16", "--tp", "1", "--microbatch", "1", "--ac", "none",
        "--schedules", "1f1b,zbv", "--search-seconds", "0", "--workers", "1",
    ],
    "train": [
        "train", "--model.path", "tiny-qwen3", "--model.weights", "random", "--model.num_layers", "2",
        "--schedule.name", "zb-h1", "--mesh.pp", "1", "--data.kind", "synthetic", "--data.sequence", "16",
        "--data.batch", "2", "--train.steps", "1", "--train.output", "out", "--engine.device", "cpu",
    ],
}  # fmt: skip


def record(function: Callable[[], object], wanted: set[Call]) -> list[Call]:
    """The calls of the wanted functions while `function` runs, in all threads, in the order of their beginnings."""
    root, calls = f"{SOURCE}{os.sep}", []

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root):
            call = (code.co_filename.removeprefix(root).replace(os.sep, "/"), code.co_qualname)
            if call in wanted:
                calls.append(call)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


def run_command(name: str) -> None:
    from zeropipe.cli.main import app

    if name == "train":  # the only process of torchrun: all calls are in this one
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        one = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1") | dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
        os.environ |= one | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with redirect_stdout(io.StringIO()):
        app(COMMANDS[name], standalone_mode=False)


if __name__ == "__main__":
    functions = {(file, name) for file, name in json.loads(Path(sys.argv[2]).read_text())}
    print(json.dumps(record(lambda: run_command(sys.argv[1]), functions)))
