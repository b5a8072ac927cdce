"""Rules about what a training file names: the model's directory, data, folders to write to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from zeropipe.core.model.configs import BUILT_IN
from zeropipe.engine.checkpoint.manifest import followed
from zeropipe.errors import MissingExtra
from zeropipe.train.config.models import BYTE_TOKENIZER, LoraTable, RunConfig
from zeropipe.train.inputs import count_layers, is_shape_name

ADAPTER = "adapter_config.json"
TOKENIZER = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def model_faults(config: RunConfig, starts: bool = True) -> Iterator[str]:
    """A directory with weights, a config, or a built-in model; for a dry run a name or a config will do."""
    model, path = config.model, Path(config.model.path)
    named = f"model.path={model.path!r}"
    if model.path in BUILT_IN:
        if model.weights == "load" and starts:
            yield f"{named} is built in and has no weights to load: set model.weights='random', or give a directory"
        return
    for field in ("num_layers", "vocabulary"):
        if getattr(model, field) is not None:
            yield f"model.{field}={getattr(model, field)}: only built-in models can be changed; leave it out"
    if is_shape_name(config):
        if starts:
            yield f"{named} is a name for planning: give the directory of its weights as --model.path"
        return
    if path.is_dir() and (path / ADAPTER).is_file() and not (path / "config.json").is_file():
        yield f"{named} is an adapter: give it as lora.adapter, and the model that it belongs to as model.path"
        return
    count_layers(config)  # says what is wrong with its config
    if model.weights == "random":
        return
    if not starts or has_weights(model.path):
        return
    if path.is_file():
        yield f"{named} is a config without weights: set model.weights='random', or give a directory"
    else:
        yield f"{named} has no weights (*.safetensors): set model.weights='random', or save them there"


def has_weights(path: str) -> bool:
    """Whether a model's directory has weights."""
    return any(file for pattern in WEIGHTS for file in Path(path).glob(pattern))


def adapter_faults(config: RunConfig) -> Iterator[str]:
    if config.lora is None:
        return
    given = config.lora.adapter
    if given is not None and not (Path(given) / ADAPTER).is_file():
        yield f"lora.adapter={given!r} is no adapter directory: it has no {ADAPTER}; give one that peft saved"
    for name in ("rank", "alpha", "dropout", "target_modules") if given is not None else ():
        value = getattr(config.lora, name)
        if value != LoraTable.model_fields[name].default:
            yield f"lora.{name}={value!r}: the saved adapter in {given} says that; leave it out"
    if find_spec("peft") is None:
        yield f"lora: {MissingExtra('peft', 'peft')}"


def data_faults(config: RunConfig) -> Iterator[str]:
    """What is known of data without reading it."""
    data = config.data
    if data.kind == "synthetic" and data.path is not None:
        yield f"data.path={data.path!r}: data.kind='synthetic' reads no files; set data.kind, or leave the path out"
    if data.kind == "datasets" and find_spec("datasets") is None:
        yield f"data.kind='datasets': {MissingExtra('datasets', 'datasets')}"
    if config.model.path not in BUILT_IN and not Path(config.model.path).exists():
        return  # told already
    from zeropipe.train.data.request import build_requests

    for request in build_requests(config).values():
        folder = Path(str(request.tokenizer))
        if request.tokenizer in (None, BYTE_TOKENIZER):
            return
        if not any(any(folder.glob(pattern)) for pattern in TOKENIZER):
            yield f"data.tokenizer: {folder} has no tokenizer.json or other tokenizer; save one there, or name another"
        return  # it is the same for evaluation


def output_faults(config: RunConfig) -> Iterator[str]:
    """A folder that can be made and written to; a checkpoint to go on from."""
    output = Path(config.train.output)
    there = next((one for one in (output, *output.parents) if one.exists()), Path())
    named = f"train.output={config.train.output!r}"
    if not there.is_dir():
        yield f"{named}: {there} is a file; give a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"{named}: {there} cannot be written to; give another folder"
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not followed(Path(resume)).is_dir():
        yield f"checkpoint.resume={resume!r} is not there: give a checkpoint's folder, auto or never"
