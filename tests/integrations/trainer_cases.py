"""What the local ranks run in test_trainer_integration.py: transformers' and TRL's trainers, with and without us.

    python -m torch.distributed.run --nproc-per-node 2 trainer_cases.py OUTPUT KILLED_AFTER RESUME

trains a case under torchrun, where rank 1 may kill itself after a step.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from zeropipe.integrations.trainer import pipelined

LETTERS = "abcdefghijklmnopqrstuvwxyz .,"
WORDS = ["<pad>", "<eos>", "<user>", "<assistant>", *LETTERS]
SIZES = {
    "vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<assistant>{% generation %}{{ m.content }}<eos>"
    "{% endgeneration %}{% else %}<user>{{ m.content }}{% endif %}{% endfor %}"
)


class Case(NamedTuple):
    """What is trained, and how."""

    output: str
    schedule: str = "1f1b"
    mesh: str = "pp=2"
    microbatches: int | None = None
    data: str = ""  # "text", "prompt" (and completion) or "chat": SFTTrainer; "pairs": DPOTrainer; empty: Trainer
    reference: bool = False  # a reference model of its own for DPOTrainer
    lora: bool = False
    tied: bool = True
    metrics: bool = False
    experts: bool = False
    killed_after: int = 0  # rank 1 kills itself after this step
    args: dict[str, Any] = {}  # noqa: RUF012  # nobody changes it
    options: dict[str, Any] = {}  # noqa: RUF012  # of the Engine
    resume: bool | str | None = None


class Seen(NamedTuple):
    """The results of a run."""

    logs: list[dict[str, float]]
    weights: dict[str, Tensor]
    memory: int = 0  # bytes of the weights of trainer.model


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
    ids, pad = [row["input_ids"] for row in rows], torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(ids, batch_first=True),
        "attention_mask": pad([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad(ids, batch_first=True, padding_value=-100),
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "additional_special_tokens": ["<user>", "<assistant>"]}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    made.chat_template = TEMPLATE
    return made


def make_data(kind: str, num_rows: int, seed: int) -> Dataset:
    """Random letters as texts, as prompts with completions, or as conversations."""
    generator = np.random.default_rng(seed)

    def text() -> str:
        return "".join(generator.choice(list(LETTERS), generator.integers(3, 14)))

    if kind == "text":
        return Dataset.from_list([{"text": text()} for _ in range(num_rows)])
    if kind == "prompt":
        return Dataset.from_list([{"prompt": text(), "completion": text()} for _ in range(num_rows)])
    if kind == "pairs":
        return Dataset.from_list([{"prompt": text(), "chosen": text(), "rejected": text()} for _ in range(num_rows)])
    roles = ("user", "assistant")
    return Dataset.from_list(
        [{"messages": [{"role": role, "content": text()} for role in roles]} for _ in range(num_rows)]
    )


def make_model(case: Case, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    if case.experts:
        sizes = SIZES | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        config = transformers.Qwen3MoeConfig(**sizes, tie_word_embeddings=case.tied, output_router_logits=True)
        config.router_aux_loss_coef = 0.1
        return transformers.Qwen3MoeForCausalLM(config)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=case.tied))


class Killer(TrainerCallback):
    """Ends rank 1 as a machine that fails would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.after and os.environ.get("RANK") == "1":
            os.kill(os.getpid(), signal.SIGKILL)


def accuracy(prediction: Any) -> dict[str, float]:
    """The fraction of tokens that are predicted correctly, and a number that depends on all logits."""
    labels, logits = prediction.label_ids[:, 1:], prediction.predictions[:, :-1]
    mask = labels != -100
    return {"accuracy": float((logits.argmax(-1) == labels)[mask].mean()), "mean": float(np.abs(logits[mask]).mean())}


def make_trainer(case: Case, wrap: Any = lambda kind: kind) -> Any:
    defaults = {
        "output_dir": case.output, "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 5, "learning_rate": 2e-3,
        "disable_tqdm": True, "bf16": False, "dataloader_pin_memory": False, "seed": 3, "eval_strategy": "no",
        "weight_decay": 0.1, "adam_epsilon": 1e-6,
    } | case.args  # fmt: skip
    shared = {
        "model": make_model(case),
        "compute_metrics": accuracy if case.metrics else None,
        "callbacks": [Killer(case.killed_after)],
    }
    if not case.data:
        return wrap(transformers.Trainer)(
            args=TrainingArguments(**defaults), train_dataset=Rows(48), eval_dataset=Rows(11, 7), data_collator=collate,
            **shared,
        )  # fmt: skip
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"], task_type="CAUSAL_LM")
    shared |= {
        "train_dataset": make_data(case.data, 120, 0), "eval_dataset": make_data(case.data, 11, 7),
        "processing_class": make_tokenizer(), "peft_config": lora if case.lora else None,
    }  # fmt: skip
    given = {"gradient_checkpointing": False, "max_length": 24} | defaults
    if case.data == "pairs":
        reference = make_model(case, seed=2) if case.reference else None
        return wrap(DPOTrainer)(ref_model=reference, args=DPOConfig(**given), **shared)
    return wrap(SFTTrainer)(args=SFTConfig(**given), **shared)


def reset_states() -> None:
    """Accelerate keeps its state from one trainer to the next."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


def plain(case: Case) -> Seen:
    """One process without zeropipe."""
    reset_states()
    trainer = make_trainer(case)
    trainer.train(resume_from_checkpoint=case.resume)
    weights = {name.removeprefix("base_model.model."): tensor for name, tensor in trainer.model.state_dict().items()}
    return Seen(trainer.state.log_history, weights)


def ours(case: Case) -> Seen:
    """The same on a pipeline, on a process that is in torch.distributed already."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # not used
    reset_states()
    trainer = run_ours(case)
    weights = dict(trainer.engine.named_weights())
    trainer.engine.close()
    memory = sum(p.nbytes for p in trainer.model.parameters() if not p.is_meta)
    return Seen(trainer.state.log_history, weights, memory)


def run_ours(case: Case) -> Any:
    trainer = make_trainer(
        case,
        lambda kind: pipelined(
            kind, schedule=case.schedule, mesh=case.mesh, microbatches=case.microbatches, timeout=60, **case.options
        ),
    )
    trainer.train(resume_from_checkpoint=case.resume)
    if case.args.get("save_strategy", "no") != "no":
        trainer.save_model()
    return trainer


if __name__ == "__main__":
    output, killed_after, resume = sys.argv[1:]
    saving = {"save_strategy": "steps", "save_steps": 2}
    case = Case(output, "zbv", killed_after=int(killed_after), resume=resume == "resume" or None, args=saving)
    run_ours(case).end()
