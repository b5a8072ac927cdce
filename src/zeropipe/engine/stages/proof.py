"""Proves on a small copy of a model that it can be cut: loss and gradients of its stages equal the whole model's.

The copy has every kind of layer that the model has, in the order of its first and last ones, and every layer is a stage
of its own. It runs plain, padded and packed batches on the CPU, without the other ranks. What is not proven is refused.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.engine.stages.families import Family, entry_of, refusal
from zeropipe.engine.stages.find import NotFound, find, kinds, layers_of, per_layer
from zeropipe.engine.stages.hf import HFStage, same_names, sample_lengths
from zeropipe.engine.stages.models import Undrawn, meta_model
from zeropipe.engine.stages.seeds import seeded
from zeropipe.engine.stages.small import length_limit, small_config
from zeropipe.engine.transformers_private import (
    build,
    factors_per_sample,
    forward_keys,
    length_dependent,
    packed_masks,
    quiet,
)
from zeropipe.errors import ConfigError

_FEW = 3  # layers of a copy, or as many as it takes to have every kind
_TRIES = 6  # lengths of a copy that has the first layers and the last ones
_LENGTHS = (5, 6)  # of two sequences; limits of lengths in a small copy divide neither
_TOLERANCE = 1e-4  # in float32; stages do what the whole model does, so mostly there is no difference at all
_ROUNDED = 1e-6  # of the largest gradient: others that should be 0 may be so much
_NEVER = {
    "layerdrop": "it leaves out layers at random",
    "decoder_layerdrop": "it leaves out layers at random",
    "num_kv_shared_layers": "its layers use the keys and values of others",
    "hidden_size_per_layer_input": "each of its layers has an input made of the embeddings",
}
_known: dict[str, Family | str] = {}

Batch = dict[str, Tensor]


def family_of(model: nn.Module) -> Family:
    """How to cut a model (which needs no memory), proven; ConfigError if that cannot be. A config is looked at once."""
    key = _key(model.config)
    if key not in _known:
        try:
            _known[key] = _look(model)
        except ConfigError as error:
            _known[key] = str(error)
    found = _known[key]
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def _key(config: Any, *more: str) -> str:
    return json.dumps([config.to_dict(), config._attn_implementation, *more], sort_keys=True, default=str)


def _look(model: nn.Module) -> Family:
    config = model.config
    for name, reason in _NEVER.items():
        if getattr(config, name, 0):
            raise refusal(config, f"{reason} ({name}={getattr(config, name)})")
    try:
        with apart():
            layers = layers_of(model)
            _check_sharing(model, layers)
            family = _proven(small_model(model, layers), layers)
            limit = length_limit(config)
            if limit is not None and not family.packs and _packs(small_model(model, layers, limits=False)):
                family = replace(family, packs=True, packs_up_to=limit)
    except NotFound as reason:
        raise refusal(config, str(reason)) from None
    except Exception as error:
        raise refusal(config, f"a small copy of it does not run ({words(error)})") from error
    return replace(family, num_layers=len(model.get_submodule(family.layers)))


def _proven(small: nn.Module, layers: str) -> Family:
    """As `prove`, once for models that have the same small copy: those that differ in length only."""
    key = _key(small.config, layers)
    found = _known.get(key)
    if not isinstance(found, Family):
        found = _known[key] = prove(small, layers)
    return found


def small_stage(config: Any, family: Family, shares: int) -> HFStage:
    """A small copy of a model with random weights as one stage, whose heads can be shared out."""
    with apart():
        small = small_model(meta_model(config, torch.float32), family.layers, shares)
        number = len(small.get_submodule(family.layers))
        return HFStage(small, replace(family, num_layers=number), (range(number),), 0)


def _check_sharing(model: nn.Module, layers: str) -> None:
    """A weight that several layers share would be on several stages."""
    owner: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = name.startswith(f"{layers}.")
        place = name.removeprefix(f"{layers}.").partition(".")[0] if inside else ""
        if owner.setdefault(parameter, place) != place:
            raise NotFound(f"{name} is shared between layers")


def small_model(model: nn.Module, layers: str, shares: int = 1, *, limits: bool = True) -> nn.Module:
    """A small copy with random weights that has, layer by layer, the kinds of the model's first and last layers."""
    lists = per_layer(model, layers)
    pattern = kinds(model, layers, lists)
    total = len(pattern)
    for chosen in _choices(pattern):
        try:
            config = small_config(model.config, chosen, total, entry_of(model.config).small, shares, limits=limits)
            with Undrawn(_is_filled_anew):
                small = build(config, torch.float32, kernels=False)
        except Exception:  # some have layers in groups, and no part of a group
            if len(chosen) == total:
                raise
            continue
        found = kinds(small, layers, lists)
        wanted = (_counted([pattern[layer] for layer in some]) for some in _ends(total, len(chosen)))
        if set(found) == set(pattern) and found in wanted:
            return _randomised(small)
    raise NotFound("a small copy of it has other kinds of layers")


def _choices(pattern: list[int]) -> Iterable[tuple[int, ...]]:
    """Which layers to copy: few ones that are of every kind, then more, at last all. Of as many, mostly first ones."""
    total = len(pattern)
    found = []
    for number in range(min(_FEW, total), total + 1):
        found += [some for some in _ends(total, number) if {pattern[layer] for layer in some} == set(pattern)][:1]
        if found and found[-1] == tuple(range(number)):  # the first layers are enough
            break
    return dict.fromkeys((*found[:_TRIES], found[-1], tuple(range(total))))


def _counted(pattern: list[int]) -> list[int]:
    """The same pattern, with kinds counted as they come up."""
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(pattern))}
    return [numbers[kind] for kind in pattern]


def _ends(total: int, number: int) -> list[tuple[int, ...]]:
    """All ways to take some of the first layers and some of the last ones, together `number`."""
    return [(*range(first), *range(total - number + first, total)) for first in range(number, 0, -1)]


def prove(small: nn.Module, layers: str) -> Family:
    """How to cut a small model between its layers, proven on it."""
    batches = list(_batches(small))
    family = find(_untied(copy.deepcopy(small)), layers, batches[1], same_names(small))
    stages = copy.deepcopy(small, _shared(small))  # before anything has run: a model may keep what it made
    packs = _packs(small)
    try:
        bare = replace(family, bare_ends=True)
        _compare(small, _stages(stages, bare), batches)
        family = bare
    except NotFound:
        _compare(small, _stages(stages, family), batches)
    return replace(family, packs=packs)


def _batches(model: nn.Module) -> Iterator[Batch]:
    """A padded, a plain and a packed batch."""
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(min(5, size - 1), size, (2, sum(_LENGTHS)), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, _LENGTHS[1] :] = 0
    yield {"input_ids": ids, "attention_mask": mask}
    yield {"input_ids": ids}
    yield {"input_ids": ids[:1], "position_ids": torch.cat([torch.arange(length) for length in _LENGTHS])[None]}


def _stages(model: nn.Module, family: Family) -> list[HFStage]:
    """One stage for each layer, and for what is before and after them if that is possible."""
    cut = [range(index, index + 1) for index in range(family.num_layers)]
    if family.bare_ends:
        cut = [range(0), *cut, range(family.num_layers, family.num_layers)]
    layers, tensors, stages = list(model.get_submodule(family.layers).children()), _shared(model), []
    for stage, own in enumerate(cut):
        others = {id(layer): layer for index, layer in enumerate(layers) if index not in own}
        stages.append(HFStage(copy.deepcopy(model, tensors | others), family, tuple(cut), stage))
        stages[-1].tie()
    return stages


def _compare(model: nn.Module, stages: Sequence[HFStage], batches: Sequence[Batch]) -> None:
    """NotFound unless stages that share the model's weights give what the whole model gives."""
    family = stages[0].family
    for number, batch in enumerate(batches):
        if not batch.keys() <= family.keys:
            continue
        with torch.set_grad_enabled(number == 0):  # the way back is the same for all
            whole = model(**batch, use_cache=False, **({"labels": batch["input_ids"]} if family.balances else {}))
            try:
                (found, *parts), way_back = _forward(stages, batch)
            except Exception as error:
                raise NotFound(f"its layers do not run apart from each other ({words(error)})") from error
        if not whole.logits.isfinite().all():
            raise NotFound("a small copy of it gives infinite numbers")
        if not close(found, whole.logits):
            raise NotFound("cut into stages it gives other logits")
        rest = [_routers_part(model, whole, batch)] if family.balances else []
        if not all(map(close, parts, rest)):
            raise NotFound("cut into stages it gives another load-balancing loss: set output_router_logits=False")
        if number == 0:
            slopes = [torch.randn_like(whole.logits), *[torch.full_like(part, 100.0) for part in rest]]
            model.zero_grad()
            torch.autograd.backward([whole.logits, *rest], slopes)
            gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
            model.zero_grad()
            way_back(slopes)
            rounded = rounding(gradients.values())
            for name, parameter in model.named_parameters():
                if not close(parameter.grad, gradients[name], rounded):
                    raise NotFound(f"cut into stages it gives another gradient of {name}")


def _routers_part(model: nn.Module, whole: Any, batch: Batch) -> Tensor:
    """What a model adds to the mean loss of the tokens, which is a function of the logits."""
    mean = model.loss_function(whole.logits, batch["input_ids"], model.config.get_text_config().vocab_size)
    return whole.aux_loss * ((whole.loss - mean) / whole.aux_loss).detach()


def _forward(stages: Sequence[HFStage], batch: Batch) -> tuple[tuple[Tensor, ...], Callable[[Sequence[Tensor]], None]]:
    """What the last stage returns, and what takes its gradient back through all stages."""
    handed: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    inputs: tuple[Tensor, ...] = ()
    for stage in stages:
        output = stage(*inputs, **stage.pick(batch))
        outputs = output if isinstance(output, tuple) else (output,)
        handed.append((inputs, outputs))
        inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)

    def way_back(slopes: Sequence[Tensor | None]) -> None:
        for inputs, outputs in reversed(handed):
            pairs = [(tensor, s) for tensor, s in zip(outputs, slopes) if tensor.requires_grad and s is not None]
            torch.autograd.backward([tensor for tensor, _ in pairs], [s for _, s in pairs])
            slopes = [tensor.grad for tensor in inputs]

    return handed[-1][1], way_back


def rounding(gradients: Iterable[Tensor | None]) -> float:
    """How much may be left of a gradient that should be 0."""
    return _ROUNDED * max((float(one.abs().max()) for one in gradients if one is not None), default=0.0)


def close(one: Tensor | None, other: Tensor | None, rounded: float = 0.0) -> bool:
    """Whether they are equal, but for rounding. What is nowhere above `rounded` is nothing else than that."""
    if one is None or other is None:
        rest = other if one is None else one
        return rest is None or float(rest.abs().max()) <= rounded
    return bool((one - other).abs().max() <= max(_TOLERANCE * float(other.abs().max()), rounded))


def _packs(model: nn.Module) -> bool:
    """Whether packed sequences do not see each other, in the model itself."""
    if "position_ids" not in forward_keys(model):
        return False
    *_, packed = _batches(model)
    ids, positions = packed["input_ids"], packed["position_ids"]
    lengths = sample_lengths(torch.tensor([0, *_LENGTHS]).cumsum(0), positions)
    rotary = length_dependent(model)  # they may remember what they have seen
    alone = [copy.deepcopy(model) if rotary else model for _ in _LENGTHS]
    with torch.no_grad():
        apart = [one(input_ids=part, use_cache=False).logits for one, part in zip(alone, ids.split(_LENGTHS, dim=1))]
        with packed_masks(positions), factors_per_sample(rotary, lengths):
            together = model(**packed, use_cache=False).logits
    return close(together, torch.cat(apart, 1))


def _shared(model: nn.Module) -> dict[int, Any]:
    """For a deep copy that has modules of its own, and the same tensors."""
    return {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}


def _randomised(model: nn.Module) -> nn.Module:
    """No weight is zero, or one, so that none can be left out unseen. A model always gets the same ones."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if _is_filled_anew(parameter):  # uniform numbers are drawn in a third of the time of normal ones
                parameter.uniform_(-1, 1, generator=random).mul_(0.8 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.empty_like(parameter).normal_(generator=random), alpha=0.1)
            parameter.requires_grad_()
    return model.train()


def _is_filled_anew(tensor: Tensor) -> bool:
    """Whether a copy gets this weight from us: all but vectors, of which it matters how they begin."""
    return isinstance(tensor, nn.Parameter) and tensor.dim() >= 2


def _untied(model: nn.Module) -> nn.Module:
    """A parameter of its own for each name."""
    seen = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in seen:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(parameter.detach().clone()))
        seen.add(id(parameter))
    return model


@contextmanager
def apart() -> Iterator[None]:
    """The caller's random numbers, default device, modes and warnings stay as they are."""
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)  # everything is small, and takes oneDNN thirty times as long on ARM
        stack.callback(setattr, torch.backends.mkldnn, "enabled", torch.backends.mkldnn.enabled)
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        if torch.get_default_device().type != "cpu":  # a device as a context makes every operation slower
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(quiet())
        warnings.simplefilter("ignore")
        stack.enter_context(seeded(0))
        yield


def words(error: Exception) -> str:
    first, *rest = str(error).split("\n") or [""]
    text = " ".join([first, *rest] if first.endswith(":") else [first])
    return " ".join(f"{type(error).__name__}: {text}".split())[:200]
