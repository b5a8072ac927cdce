"""Loads what was trained in plain transformers: the same loss on the held-out texts, and answers.

python examples/tiny/ask.py out/tiny
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

logging.disable_progress_bar()
QUESTIONS = ("days: friday saturday", "numbers: seven eight", "colours: green blue")


def held_out_loss(model, tokenizer, path: Path) -> float:
    """The mean over all tokens, text by text."""
    total, count = 0.0, 0
    for line in path.read_text().splitlines():
        ids = torch.tensor([[*tokenizer(json.loads(line)["text"]).input_ids, tokenizer.eos_token_id]])
        number = ids.shape[1] - 1
        total, count = total + number * model(input_ids=ids, labels=ids).loss.item(), count + number
    return total / count


@torch.no_grad()
def main(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "run" / "export")
    tokenizer = AutoTokenizer.from_pretrained(folder / "run" / "export")
    metrics = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    last = [line["evaluation_loss"] for line in metrics if "evaluation_loss" in line][-1]
    loss = held_out_loss(model, tokenizer, folder / "held-out.jsonl")
    if abs(loss - last) > 1e-4 * last:
        sys.exit(f"the exported model's loss is {loss:.6f} in transformers, the last evaluation's was {last:.6f}")
    print(f"in plain transformers: {type(model).__name__}, held-out loss {loss:.4f}, as in the last evaluation")
    for question in QUESTIONS:
        ids = tokenizer(question, return_tensors="pt").input_ids
        told = model.generate(ids, max_new_tokens=20, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        answer = tokenizer.decode(told[0][ids.shape[1] :], skip_special_tokens=True)
        print(f"  {question} ->{answer.partition('.')[0]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
