"""Verifies on a small copy of a model that it can be cut: loss and gradients of the stages equal those of the copy.

The copy has every kind of layer that the model has, in the order of its first and last ones, and every layer is a stage
of its own. It runs plain, padded and packed batches on the CPU, on each rank alone. A model that fails is refused.
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

from zeropipe.engine.stages.families import (
    UNSUPPORTED_FIELDS,
    CannotCut,
    Family,
    detect_family,
    find_layer_list,
    refuse,
)
from zeropipe.engine.stages.hf import HFStage, find_shared_parameters
from zeropipe.engine.stages.packed_attention import KERNELS, PackedAttention, find_head_sizes
from zeropipe.engine.stages.packing import keeps_apart
from zeropipe.engine.stages.skeleton import build_on_meta
from zeropipe.engine.stages.small_model import build_small_model, length_limit, nonzero_dropout
from zeropipe.engine.stages.weights import seeded_rng
from zeropipe.engine.transformers_private import quiet
from zeropipe.errors import ConfigError

SAMPLE_LENGTHS = (5, 6)  # of two packed samples; no limit of lengths in a small copy divides either
TOLERANCE = 1e-4  # in float32, relative to the largest value; mostly there is no difference at all
ZERO_TOLERANCE = 1e-6  # of a gradient that should be 0, relative to the largest gradient
_cache: dict[str, Family | str] = {}  # a family, or the error of a model that cannot be cut
_kernels: dict[str, dict[str, str | None]] = {}  # of packed rows, and why each cannot run

Batch = dict[str, Tensor]


def find_family(model: nn.Module) -> Family:
    """How to cut a model (which may be on the meta device), verified; ConfigError if it cannot be cut.

    Results are cached by config.
    """
    key = _key(model.config)
    if key not in _cache:
        try:
            _cache[key] = _verified_family(model)
        except ConfigError as error:
            _cache[key] = str(error)
    found = _cache[key]
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def _key(config: Any, *more: str) -> str:
    return json.dumps([config.to_dict(), config._attn_implementation, *more], sort_keys=True, default=str)


def _verified_family(model: nn.Module) -> Family:
    config = model.config
    for name, reason in UNSUPPORTED_FIELDS.items():
        if getattr(config, name, 0):
            raise refuse(config, f"{reason} ({name}={getattr(config, name)})")
    try:
        with isolated_torch_state():
            layers = find_layer_list(model)
            _require_unshared_layers(model, layers)
            family = _verify_once(build_small_model(model, layers), layers)
            limit = length_limit(config)
            if limit is not None and not family.can_pack and _can_pack(build_small_model(model, layers, limits=False)):
                family = replace(family, can_pack=True, max_packed_row=limit)
    except CannotCut as reason:
        raise refuse(config, str(reason)) from None
    except Exception as error:
        raise refuse(config, f"a small copy of it does not run ({format_error(error)})") from error
    return replace(family, num_layers=len(model.get_submodule(family.layers)))


def _verify_once(small: nn.Module, layers: str) -> Family:
    """`verify_cut`, once for all models with the same small copy: those that differ in size only."""
    key = _key(small.config, layers)
    found = _cache.get(key)
    if not isinstance(found, Family):
        found = _cache[key] = verify_cut(small, layers)
    return found


def find_packed_attention(model: nn.Module, family: Family, option: str) -> PackedAttention | None:
    """The kernels that keep packed samples of a model apart, by the option `attention`; None for dense masks.

    ConfigError for a kernel that does not. Each is verified on a small copy, with results cached by config.
    """
    config = model.config
    if option in ("sdpa", "flash") or not family.can_pack:
        return None
    key = _key(config, "packed attention")
    if key not in _kernels:
        with isolated_torch_state():
            small = build_small_model(model, family.layers, limits=family.max_packed_row is None)
            _kernels[key] = {kernel: _find_difference(small, kernel) for kernel in KERNELS}
    drops = [f"{name}={value}" for name, value in nonzero_dropout(config.to_dict()).items() if "att" in name]
    reasons = _kernels[key] if not drops else dict.fromkeys(KERNELS, f"its attention has dropout ({', '.join(drops)})")
    if option != "auto" and reasons[option]:
        raise ConfigError(
            f"attention={option!r}: model_type={config.model_type!r} cannot pack with it: {reasons[option]}; use 'auto'"
        )
    return PackedAttention(option, reasons, find_head_sizes(config.get_text_config()))


def _find_difference(small: nn.Module, kernel: str) -> str | None:
    """Why packed samples of a small model cannot run with a kernel; None if they have the logits of each alone."""
    *others, packed = _batches(small)
    attention = PackedAttention(kernel)
    changed = copy.deepcopy(small)
    try:
        if not keeps_apart(changed, packed["input_ids"], SAMPLE_LENGTHS, is_close, attention):
            return "its packed samples have other logits"
        for batch in others:
            with torch.no_grad():
                outputs = [model(**batch, use_cache=False).logits for model in (changed, small)]
            if not is_close(*outputs):
                return "its rows that are not packed have other logits"
    except Exception as error:
        return format_error(error)
    return None


def build_small_stage(config: Any, family: Family, tp: int) -> HFStage:
    """A small copy of a model with random weights as one stage; its number of heads is a multiple of `tp`."""
    with isolated_torch_state():
        small = build_small_model(build_on_meta(config, torch.float32), family.layers, tp)
        number = len(small.get_submodule(family.layers))
        return HFStage(small, replace(family, num_layers=number), (range(number),), 0)


def _require_unshared_layers(model: nn.Module, layers: str) -> None:
    """CannotCut for a parameter that several layers share: it would be on several stages."""
    owner: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = name.startswith(f"{layers}.")
        layer = name.removeprefix(f"{layers}.").partition(".")[0] if inside else ""
        if owner.setdefault(parameter, layer) != layer:
            raise CannotCut(f"{name} is shared between layers")


def verify_cut(small: nn.Module, layers: str) -> Family:
    """Detect how to cut a small model between its layers, and compare its stages with it."""
    batches = list(_batches(small))
    family = detect_family(_untie(copy.deepcopy(small)), layers, batches[1], find_shared_parameters(small))
    copied = copy.deepcopy(small, _tensor_memo(small))  # before anything has run: a model may cache values
    can_pack = _can_pack(small)
    try:
        with_empty_ends = replace(family, allows_empty_ends=True)
        _compare(small, _build_stages(copied, with_empty_ends), batches)
        family = with_empty_ends
    except CannotCut:
        _compare(small, _build_stages(copied, family), batches)
    return replace(family, can_pack=can_pack)


def _batches(model: nn.Module) -> Iterator[Batch]:
    """A padded, a plain and a packed batch."""
    size = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(min(5, size - 1), size, (2, sum(SAMPLE_LENGTHS)), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, SAMPLE_LENGTHS[1] :] = 0
    yield {"input_ids": ids, "attention_mask": mask}
    yield {"input_ids": ids}
    yield {"input_ids": ids[:1], "position_ids": torch.cat([torch.arange(length) for length in SAMPLE_LENGTHS])[None]}


def _build_stages(model: nn.Module, family: Family) -> list[HFStage]:
    """One stage for each layer, and one each for what is before and after them if these may have no layers."""
    cut = [range(index, index + 1) for index in range(family.num_layers)]
    if family.allows_empty_ends:
        cut = [range(0), *cut, range(family.num_layers, family.num_layers)]
    layers, tensors, stages = list(model.get_submodule(family.layers).children()), _tensor_memo(model), []
    for stage, own in enumerate(cut):
        others = {id(layer): layer for index, layer in enumerate(layers) if index not in own}
        stages.append(HFStage(copy.deepcopy(model, tensors | others), family, tuple(cut), stage))
        stages[-1].tie()
    return stages


def _compare(model: nn.Module, stages: Sequence[HFStage], batches: Sequence[Batch]) -> None:
    """CannotCut unless stages that share the model's weights have its logits and gradients."""
    family = stages[0].family
    for number, batch in enumerate(batches):
        if not batch.keys() <= family.inputs:
            continue
        with torch.set_grad_enabled(number == 0):  # the backward is the same for all batches
            expected = model(
                **batch, use_cache=False, **({"labels": batch["input_ids"]} if family.has_router_loss else {})
            )
            try:
                (logits, *losses), backward = _run_stages(stages, batch)
            except Exception as error:
                raise CannotCut(f"its layers do not run separately ({format_error(error)})") from error
        if not expected.logits.isfinite().all():
            raise CannotCut("a small copy of it gives infinite numbers")
        if not is_close(logits, expected.logits):
            raise CannotCut("cut into stages it gives other logits")
        expected_losses = [_router_loss(model, expected, batch)] if family.has_router_loss else []
        if not all(map(is_close, losses, expected_losses)):
            raise CannotCut("cut into stages it gives another load-balancing loss: set output_router_logits=False")
        if number == 0:
            _compare_gradients(model, [expected.logits, *expected_losses], backward)


Backward = Callable[[Sequence[Tensor]], None]


def _compare_gradients(model: nn.Module, outputs: Sequence[Tensor], backward: Backward) -> None:
    logits, *losses = outputs
    output_grads = [torch.randn_like(logits), *[torch.full_like(loss, 100.0) for loss in losses]]
    model.zero_grad()
    torch.autograd.backward(outputs, output_grads)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    backward(output_grads)
    zero = rounding_error(expected.values())
    for name, parameter in model.named_parameters():
        if not is_close(parameter.grad, expected[name], zero):
            raise CannotCut(f"cut into stages it gives another gradient of {name}")


def _router_loss(model: nn.Module, output: Any, batch: Batch) -> Tensor:
    """The term that a model adds to the mean loss of the tokens."""
    mean = model.loss_function(output.logits, batch["input_ids"], model.config.get_text_config().vocab_size)
    return output.aux_loss * ((output.loss - mean) / output.aux_loss).detach()


def _run_stages(stages: Sequence[HFStage], batch: Batch) -> tuple[tuple[Tensor, ...], Backward]:
    """The outputs of the last stage, and a function that runs the backward of all stages."""
    calls: list[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = []
    inputs: tuple[Tensor, ...] = ()
    for stage in stages:
        output = stage(*inputs, **stage.pick(batch))
        outputs = output if isinstance(output, tuple) else (output,)
        calls.append((inputs, outputs))
        inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)

    def backward(grads: Sequence[Tensor | None]) -> None:
        for inputs, outputs in reversed(calls):
            pairs = [(tensor, g) for tensor, g in zip(outputs, grads) if tensor.requires_grad and g is not None]
            torch.autograd.backward([tensor for tensor, _ in pairs], [g for _, g in pairs])
            grads = [tensor.grad for tensor in inputs]

    return calls[-1][1], backward


def rounding_error(gradients: Iterable[Tensor | None]) -> float:
    """The largest value that a gradient may have that should be 0."""
    return ZERO_TOLERANCE * max((float(one.abs().max()) for one in gradients if one is not None), default=0.0)


def is_close(one: Tensor | None, other: Tensor | None, zero: float = 0.0) -> bool:
    """Whether two tensors are equal up to rounding; None equals a tensor without values above `zero`."""
    if one is None or other is None:
        rest = other if one is None else one
        return rest is None or float(rest.abs().max()) <= zero
    return bool((one - other).abs().max() <= max(TOLERANCE * float(other.abs().max()), zero))


def _can_pack(model: nn.Module) -> bool:
    *_, packed = _batches(model)
    return keeps_apart(model, packed["input_ids"], SAMPLE_LENGTHS, is_close)


def _tensor_memo(model: nn.Module) -> dict[int, Any]:
    """The memo of a deep copy that shares the tensors of a model."""
    return {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}


def _untie(model: nn.Module) -> nn.Module:
    """Give each parameter name a parameter of its own."""
    seen = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in seen:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(parameter.detach().clone()))
        seen.add(id(parameter))
    return model


@contextmanager
def isolated_torch_state() -> Iterator[None]:
    """Run with fixed random state, device, modes and threads, without warnings; the caller's are restored."""
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)  # all tensors are small; oneDNN is 30 times slower with them on ARM
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
        stack.enter_context(seeded_rng(0))
        yield


def format_error(error: Exception) -> str:
    """Type and first line of an error, in at most 200 characters."""
    first, *rest = str(error).split("\n") or [""]
    text = " ".join([first, *rest] if first.endswith(":") else [first])
    return " ".join(f"{type(error).__name__}: {text}".split())[:200]
