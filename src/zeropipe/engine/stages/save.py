"""Writes stages back as a Hugging Face model directory."""

from __future__ import annotations

import json
import re
from pathlib import Path

from zeropipe.core.placement import Placement
from zeropipe.engine.stages.hf import HFStage, meta_model


def save_stages(stages: dict[int, HFStage], placement: Placement, rank: int, directory: str | Path) -> None:
    """Write this rank's part of the model; once every rank has, `from_pretrained(directory)` loads it whole.

    A stage that two ranks hold is written by one of them, a tied weight by the stage that embeds.
    """
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for number, stage in stages.items():
        if placement.rank_of(number) != rank:
            continue
        names = stage.full_names()
        tensors = {names[name]: p.detach().contiguous().cpu() for name, p in stage.named_parameters()}
        if stage.is_tied:
            tensors.pop("lm_head.weight", None)
        save_file(tensors, directory / _file(number, len(stage.cut)), metadata={"format": "pt"})
        if stage.is_first:
            stage.whole_config.save_pretrained(directory)
            index = {"metadata": {}, "weight_map": _weight_map(stage)}
            (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _file(stage: int, num_stages: int) -> str:
    return f"model-{stage + 1:05d}-of-{num_stages:05d}.safetensors"


def _weight_map(first: HFStage) -> dict[str, str]:
    """Which file holds which tensor, of all stages: known from the cut alone."""
    whole = meta_model(first.whole_config, first.lm.dtype)
    last = len(first.cut) - 1
    tied = first.whole_config.tie_word_embeddings
    files = {}
    for name, _ in whole.named_parameters():  # names a tied weight once, by its embedding
        if match := re.match(r"\w+\.layers\.(\d+)\.", name):
            stage = next(s for s, layers in enumerate(first.cut) if int(match[1]) in layers)
        else:
            stage = 0 if "embed" in name else last
        if name == "lm_head.weight" and (tied or first.head == "score"):
            continue
        files[name] = _file(stage, last + 1)
    if first.head == "score":
        files["score.weight"] = _file(last, last + 1)
    return files
