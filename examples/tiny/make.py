"""Makes what `run.toml` trains: a small text of words in their order, a tokenizer for it, a tiny Qwen3.

python examples/tiny/make.py out/tiny
"""

import json
import random
import shutil
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config

ROUNDS = {
    "days": ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"],
    "months": ["january", "february", "march", "april", "may", "june", "july", "august", "september", "october",
               "november", "december"],
    "numbers": ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"],
    "colours": ["red", "orange", "yellow", "green", "blue", "indigo", "violet"],
}  # fmt: skip
END = "<|end|>"


def sentence(chance: random.Random) -> str:
    """Some words of a round, in order, from anywhere on."""
    name, words = chance.choice(list(ROUNDS.items()))
    start = chance.randrange(len(words))
    return f"{name}: {' '.join(words[(start + n) % len(words)] for n in range(chance.randint(4, 8)))}."


def write_texts(path: Path, number: int, seed: int) -> list[str]:
    """Documents of a few sentences each, as JSONL."""
    chance = random.Random(seed)
    texts = [" ".join(sentence(chance) for _ in range(chance.randint(2, 4))) for _ in range(number)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def tokenizer_of(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte pairs of these texts: any other text has tokens, too."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = write_texts(folder / "train.jsonl", 6000, seed=0)
    write_texts(folder / "held-out.jsonl", 60, seed=1)
    tokenizer = tokenizer_of(texts)
    tokenizer.save_pretrained(folder / "model")
    Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=192, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.1, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder / "model")  # fmt: skip
    shutil.copy(Path(__file__).with_name("run.toml"), folder)
    print(f"{folder}: {len(texts)} texts, {len(tokenizer)} tokens, like: {texts[0]}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
