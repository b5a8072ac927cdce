"""Rules for the files and folders that a training file names: model, adapter, data, output."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from zeropipe.core.model.configs import find_built_in
from zeropipe.engine.checkpoint.manifest import resolve_pointer
from zeropipe.errors import MissingExtra
from zeropipe.train.config.tables import BYTE_TOKENIZER, LoraTable, RunConfig
from zeropipe.train.data.request import build_requests
from zeropipe.train.inputs import count_layers

ADAPTER_CONFIG = "adapter_config.json"
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")


def check_model(config: RunConfig, starts: bool = True) -> Iterator[str]:
    """model.path must have weights, or be initialized at random. A dry run (not `starts`) only needs its shapes."""
    model, path = config.model, Path(config.model.path)
    named = f"model.path={model.path!r}"
    if find_built_in(model.path) is not None:
        if model.weights == "load" and starts:
            yield f"{named} is built in and has no weights; use model.weights='random', or a model directory"
        return
    for field in ("num_layers", "vocabulary"):
        if getattr(model, field) is not None:
            yield f"model.{field}={getattr(model, field)} is for built-in models; leave it out"
    if path.is_dir() and (path / ADAPTER_CONFIG).is_file() and not (path / "config.json").is_file():
        yield f"{named} is an adapter; use it as lora.adapter, and its base model as model.path"
        return
    count_layers(config)  # raises if the config is invalid
    if model.weights == "random" or not starts or has_weights(model.path):
        return
    if path.is_file():
        yield f"{named} is a config without weights; use model.weights='random', or a model directory"
    else:
        yield f"{named} has no weights (*.safetensors); use model.weights='random', or save them there"


def has_weights(path: str) -> bool:
    """Whether a model directory has weights."""
    return any(file for pattern in _WEIGHT_FILES for file in Path(path).glob(pattern))


def check_adapter(config: RunConfig) -> Iterator[str]:
    """lora.adapter must be an adapter directory, whose settings are not changed; peft must be installed."""
    if config.lora is None:
        return
    path = config.lora.adapter
    if path is not None and not (Path(path) / ADAPTER_CONFIG).is_file():
        yield f"lora.adapter={path!r} has no {ADAPTER_CONFIG}; use a directory that peft saved"
    for name in ("rank", "alpha", "dropout", "target_modules") if path is not None else ():
        value = getattr(config.lora, name)
        if value != LoraTable.model_fields[name].default:
            yield f"lora.{name}={value!r} is set by the saved adapter {path}; leave it out"
    if find_spec("peft") is None:
        yield f"lora: {MissingExtra('peft', 'peft')}"


def check_data(config: RunConfig) -> Iterator[str]:
    """Data files and the tokenizer must exist. They are not read."""
    data = config.data
    if data.kind == "synthetic" and data.path is not None:
        yield f"data.path={data.path!r}: data.kind='synthetic' reads no files; set data.kind, or leave out the path"
    if data.kind == "datasets" and find_spec("datasets") is None:
        yield f"data.kind='datasets': {MissingExtra('datasets', 'datasets')}"
    if find_built_in(config.model.path) is None and not Path(config.model.path).exists():
        return  # check_model reports it
    for request in build_requests(config).values():
        folder = Path(str(request.tokenizer))
        if request.tokenizer in (None, BYTE_TOKENIZER):
            return
        if not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
            yield f"data.tokenizer: {folder} has no tokenizer.json or other tokenizer; save one there, or use another"
        return  # evaluation has the same tokenizer


def check_output(config: RunConfig) -> Iterator[str]:
    """train.output must be writable, and checkpoint.resume must exist."""
    output = Path(config.train.output)
    existing = next((path for path in (output, *output.parents) if path.exists()), Path())
    named = f"train.output={config.train.output!r}"
    if not existing.is_dir():
        yield f"{named}: {existing} is a file; use a folder"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"{named}: {existing} is not writable; use another folder"
    resume = config.checkpoint.resume
    if resume not in ("auto", "never") and not resolve_pointer(Path(resume)).is_dir():
        yield f"checkpoint.resume={resume!r} does not exist; use the folder of a checkpoint, auto or never"
