"""What the local ranks run in test_trainer_integration.py: transformers' and TRL's trainers, with and without us."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM, TrainingArguments

from zeropipe.integrations.trainer import pipelined

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip


class Case(NamedTuple):
    """What is trained, and how."""

    output: str
    schedule: str = "1f1b"
    mesh: str = "pp=2"
    microbatches: int | None = None
    args: dict[str, Any] = {}
    resume: bool | str | None = None
    tied: bool = True


class Seen(NamedTuple):
    """The results of a run."""

    logs: list[dict[str, float]]
    weights: dict[str, Tensor]


class Rows(torch.utils.data.Dataset):
    """Rows of random tokens of different lengths."""

    def __init__(self, num_rows: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(4, 17, (num_rows,), generator=generator).tolist()
        self.rows = [torch.randint(1, SIZES["vocab_size"], (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index]}


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows padded to the longest."""
    ids = [torch.as_tensor(row["input_ids"]) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    labels = [torch.as_tensor(row.get("labels", row["input_ids"])) for row in rows]
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad(labels, batch_first=True, padding_value=-100),
    }


def make_model(tied: bool = True) -> Qwen3ForCausalLM:
    torch.manual_seed(1)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=tied, attn_implementation="sdpa"))


def arguments(kind: type, output: str, **changes: Any) -> Any:
    defaults = {
        "output_dir": output, "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 5, "learning_rate": 1e-2,
        "disable_tqdm": True, "bf16": False, "dataloader_pin_memory": False, "seed": 3,
    }  # fmt: skip
    return kind(**defaults | changes)


def set_environment() -> None:
    """What torchrun sets, for the processes that run already."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # not used: the process group is there
    reset_states()


def reset_states() -> None:
    """Accelerate keeps its state between trainers."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def plain(case: Case) -> Seen:
    """One process without zeropipe."""
    reset_states()
    trainer = transformers.Trainer(
        model=make_model(case.tied), args=arguments(TrainingArguments, case.output, **case.args),
        train_dataset=Rows(50), eval_dataset=Rows(11, 7), data_collator=collate,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=case.resume)
    return Seen(trainer.state.log_history, {n: t.detach().clone() for n, t in trainer.model.state_dict().items()})


def ours(case: Case) -> Seen:
    """The same on a pipeline."""
    set_environment()
    kind = pipelined(
        transformers.Trainer, schedule=case.schedule, mesh=case.mesh, microbatches=case.microbatches, timeout=60
    )
    trainer = kind(
        model=make_model(case.tied), args=arguments(TrainingArguments, case.output, **case.args),
        train_dataset=Rows(50), eval_dataset=Rows(11, 7), data_collator=collate,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=case.resume)
    weights = dict(trainer.engine.named_weights())
    trainer.engine.close()
    return Seen(trainer.state.log_history, weights)
