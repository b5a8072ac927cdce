"""The runs of the walks in docs/architecture.md, each recorded: `walk_cases.py COMMAND FUNCTIONS.json` under torchrun.

Prints the calls of the given functions, in order, as JSON: [["cli/simulate.py", "simulate"], ...].
"""

import io
import json
import os
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


def record_engine(folder: str, wanted: dict[str, set[Call]]) -> dict[str, list[Call]]:
    """Build stages, run a step and save a checkpoint on a local rank; the calls of each."""
    import torch
    import torch.distributed as dist
    from transformers import Qwen3Config

    from zeropipe.engine import CausalLMLoss, Engine, hf_stages, save_checkpoint

    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "vocab_size": 64}
    config = Qwen3Config(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, **sizes)
    schedule = zeropipe.build("zb-h1", ranks=2, microbatches=4)
    stages, calls = {}, {}
    calls["hf_stages"] = record(
        lambda: stages.update(hf_stages(config, schedule, dist.get_rank())), wanted["hf_stages"]
    )
    tokens = torch.arange(32).reshape(4, 1, 8)
    microbatches = [{"input_ids": row, "labels": row} for row in tokens]
    with Engine(schedule, stages) as engine:
        optimizer = torch.optim.AdamW(engine.parameters())
        calls["train_step"] = record(lambda: engine.train_step(microbatches, CausalLMLoss()), wanted["train_step"])
        optimizer.step()
        calls["save_checkpoint"] = record(lambda: save_checkpoint(folder, engine, optimizer), wanted["save_checkpoint"])
    return calls


def run_command(name: str) -> None:
    from zeropipe.cli.main import app

    with redirect_stdout(io.StringIO()):
        app(COMMANDS[name], standalone_mode=False)


if __name__ == "__main__":
    functions = {(file, name) for file, name in json.loads(Path(sys.argv[2]).read_text())}
    print(json.dumps(record(lambda: run_command(sys.argv[1]), functions)))
