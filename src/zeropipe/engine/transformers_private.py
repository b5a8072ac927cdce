"""All private names of transformers: how models are built and run, stored and loaded.

Checkpoints on disk do not always have the names and shapes of the model in memory: experts are stored one by one, heads
under older names. transformers has rules for how each family is stored; here they are applied to single tensors.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.errors import ConfigError, MissingExtra

Read = Callable[[str], Tensor]


def causal_class(config: Any) -> Any:
    """The causal language model class of a config; None if there is none."""
    try:
        from transformers.models.auto import modeling_auto as auto
    except ImportError:
        raise MissingExtra("transformers", "engine") from None
    own = auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if own is not None:
        return own
    # the text part of a multimodal model may have a class, but no model type of its own
    package = importlib.import_module(type(config).__module__.rpartition(".")[0])
    classes = (getattr(package, name, None) for name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return next((found for found in classes if found is not None and found.config_class is type(config)), None)


def build(config: Any, dtype: torch.dtype, *, kernels: bool = True) -> nn.Module:
    """Build a model on the default device; without `kernels` in plain torch, whatever the config says."""
    model_class = causal_class(config)
    assert model_class is not None, "find_decoder_config has checked it"
    attention, experts = (config._attn_implementation, config._experts_implementation) if kernels else (None, "eager")
    if dtype == torch.float64:
        experts = "eager"  # torch's grouped product has no float64
    return model_class._from_config(
        copy.deepcopy(config), dtype=dtype, attn_implementation=attention, experts_implementation=experts
    )


def build_multimodal(config: Any, dtype: torch.dtype) -> nn.Module:
    """Build the multimodal model of a config on the default device."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for kind in ("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"):
        model_class = getattr(auto, f"MODEL_FOR_{kind}_MAPPING", {}).get(type(config), None)
        if model_class is not None:
            break
    else:
        names = getattr(config, "architectures", None) or [""]
        model_class = getattr(transformers, names[0], None)
    if model_class is None:
        raise ConfigError(
            f"model_type={config.model_type!r}: transformers has no class that loads it; pass its text model"
        )
    try:
        return model_class._from_config(copy.deepcopy(config), dtype=dtype)
    except Exception as error:  # any error of the model's own code
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"transformers cannot build a {model_class.__name__} of this config: {type(error).__name__}: {reason}"
        ) from error


def is_model(module: nn.Module) -> bool:
    """Whether a module is a PreTrainedModel, which initializes the modules inside it."""
    return hasattr(module, "_init_weights")


def initialize(outer: Iterable[nn.Module], module: nn.Module) -> None:
    """Give a module's own parameters and computed buffers the first values of its family.

    `outer` are the modules around it, outermost first: the innermost model among them initializes it.
    """
    [*_, model] = [candidate for candidate in (*outer, module) if is_model(candidate)]
    model._init_weights(module)


def skip_initialization(tensor: Tensor) -> Tensor:
    """Mark a tensor that a model's initialization must not change."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    return tensor


def uses_flash(config: Any) -> bool:
    """Whether attention takes the borders of packed sequences instead of a mask."""
    return "flash" in (config._attn_implementation or "")


def has_flash() -> bool:
    """Whether the package flash-attn is installed."""
    from transformers.utils import is_flash_attn_2_available

    return is_flash_attn_2_available()


@dataclass(frozen=True)
class Reach:
    """How far a causal mask reaches back, within a sample: 0 for all the way."""

    window: int = 0  # tokens, the own one included
    chunk: int = 0  # a token attends within its chunk of so many tokens


def read_reach(mask_function: Any) -> Reach | None:
    """What a mask function of transformers is made of; None if it is not causal, or has a part that is not known.

    Parts that keep packed samples apart are left out.
    """
    name, parts = mask_function.__qualname__.partition(".")[0], inspect.getclosurevars(mask_function).nonlocals
    if name == "causal_mask_function":
        return Reach()
    if name == "remap_positions_for_packed_sequence":
        return read_reach(parts["mask_function"])
    if name != "and_masks":
        return None
    reach, is_causal = Reach(), False
    for part in parts["mask_functions"]:
        name, values = part.__qualname__.partition(".")[0], inspect.getclosurevars(part).nonlocals
        if name == "sliding_window_overlay":
            reach = replace(reach, window=values["sliding_window"])
        elif name == "chunked_overlay":
            reach = replace(reach, chunk=values["chunk_size"])
        elif name != "packed_sequence_mask_function":
            inner = read_reach(part)
            if inner is None:
                return None
            reach, is_causal = Reach(max(reach.window, inner.window), max(reach.chunk, inner.chunk)), True
    return reach if is_causal else None


FLASH = "flash_attention_2"
WRAPPED = "zeropipe_"  # first part of the names of such implementations


def wrap_attention(model: Any, attend: Callable[..., Any], make_mask: Callable[..., Any]) -> str | None:
    """The name of an attention implementation that calls `attend` and `make_mask` with a model's own one first.

    None if the model has another one than eager or torch's, or none that can be replaced.
    """
    from transformers import masking_utils, modeling_utils

    base, module = model.config._attn_implementation or "", importlib.import_module(type(model).__module__)
    if base.startswith(WRAPPED):
        return base
    functions: dict[str, Any] = {
        "sdpa": modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"],
        "eager": getattr(module, "eager_attention_forward", None),
    }
    function = functions.get(base)
    if function is None:
        return None
    name = f"{WRAPPED}{base}_{module.__name__.rpartition('.')[2]}"
    modeling_utils.ALL_ATTENTION_FUNCTIONS.register(name, partial(attend, function))
    mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[base]
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(name, partial(make_mask, mask))
    return name


def forward_parameters(model: nn.Module) -> frozenset[str]:
    """The parameter names of a model's forward."""
    return frozenset(inspect.signature(type(model).forward).parameters)


def router_settings(lm: Any) -> tuple[int, int, float]:
    """Of a model's load-balancing loss: number of experts, experts per token, coefficient."""
    coefficient = getattr(lm, "router_aux_loss_coef", None)
    return lm.num_experts, lm.num_experts_per_tok, lm.aux_loss_coef if coefficient is None else coefficient


def router_modules(base: nn.Module, blocks: Iterable[nn.Module]) -> list[tuple[nn.Module, int]]:
    """The modules in some layers that compute router logits, and the index of these in their output."""
    recorders: Any = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits", [])
    found = []
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        for block in blocks:
            for name, module in block.named_modules():
                is_inside = recorder.layer_name is None or f".{recorder.layer_name}." in f".{name}."
                if is_inside and isinstance(module, recorder.target_class):
                    found.append((module, recorder.index))
    return found


@contextmanager
def packed_masks(is_packed: bool) -> Iterator[None]:
    """For rows that are known to be packed or not: transformers would look, and wait for the device."""
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = _number_samples if is_packed else lambda ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


def _number_samples(position_ids: Tensor) -> Tensor:
    """The number of each token's sample in its row: a sample begins where positions do not go on by one."""
    begins = torch.zeros_like(position_ids)
    begins[..., 1:] = position_ids.diff(dim=-1) != 1
    return begins.cumsum(-1)


@contextmanager
def masks_from_positions(position_ids: Tensor, extra: tuple[str, ...] = ()) -> Iterator[None]:
    """Let all mask functions, and those named in `extra`, keep apart the sequences of these position ids.

    Some models (gpt_oss) do not pass their position ids to the functions that make masks. These models have imported
    the functions by name, so the default of the parameter is changed.
    """
    functions = _mask_functions(extra)
    defaults = [function.__defaults__ for function, _ in functions]
    for function, index in functions:
        values = list(function.__defaults__ or ())
        values[index] = position_ids
        function.__defaults__ = tuple(values)
    try:
        yield
    finally:
        for (function, _), old in zip(functions, defaults):
            function.__defaults__ = old


@cache
def _mask_functions(extra: tuple[str, ...]) -> list[tuple[Any, int]]:
    """The functions that make masks, and the index of `position_ids` among their defaults."""
    from transformers import masking_utils

    functions = [getattr(masking_utils, name) for name in dir(masking_utils) if name.startswith("create_")]
    for path in extra:
        module, _, name = path.rpartition(".")
        functions.append(getattr(importlib.import_module(module), name))
    found = []
    for function in map(inspect.unwrap, functions):
        parameters = inspect.signature(function).parameters.values()
        optional = [p.name for p in parameters if p.default is not p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if "position_ids" in optional:
            found.append((function, optional.index("position_ids")))
    return found


@dataclass
class SplitRows:
    """The full rows that a forward has some tokens of: masks are made for them, not for its own tokens."""

    length: int
    chunks: tuple[range, ...] | None  # the tokens whose masks are needed; None: all
    positions: Tensor | None  # position ids of the full rows; None: from 0
    is_packed: bool
    finds_packed: bool = False  # the model looks for packed sequences in position ids itself


_split = threading.local()  # its `rows` are those of the forward that runs in this thread


@contextmanager
def masks_of_rows(rows: SplitRows) -> Iterator[None]:
    """Let a forward whose attention was split by `split_attention` make masks of these rows."""
    _split.rows = rows
    try:
        yield
    finally:
        _split.rows = None


def split_attention(lm: nn.Module, attend: Callable[..., Any], kind: str = "cp") -> None:
    """Let a model's attention call `attend`, and make its masks by `masks_of_rows`, in its own implementation.

    `kind` is one of `_SPLITS`: each has one function `attend`.
    """
    from transformers import masking_utils
    from transformers.modeling_utils import AttentionInterface

    _find_packed_in_full_rows()
    configs = {id(config): config for module in lm.modules() if (config := getattr(module, "config", None)) is not None}
    for config in configs.values():
        own = getattr(config, "_attn_implementation", None) or "eager"
        if _without_split(own) == own:
            name = _SPLITS[kind] + own
            AttentionInterface.register(name, attend)
            masking_utils.AttentionMaskInterface.register(name, partial(_mask_of_rows, own))
            config._attn_implementation = name


def attention_function(module: nn.Module) -> Callable[..., Any] | None:
    """The function that an attention module of a split model called before; None if it has none."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None) or "eager"
    for kind in type(module).__mro__:
        scope = sys.modules.get(kind.__module__)
        functions = getattr(scope, "ALL_ATTENTION_FUNCTIONS", None)
        if functions is not None:
            default: Callable[..., Any] | None = getattr(scope, "eager_attention_forward", None)
            found: Callable[..., Any] | None = functions.get(_without_split(name), default)
            return found
    return None


_SPLITS = {"cp": "zeropipe_cp_", "slices": "zeropipe_slices_"}  # before the name of an attention implementation


def _without_split(name: str) -> str:
    for prefix in _SPLITS.values():
        name = name.removeprefix(prefix)
    return name


@cache
def _find_packed_in_full_rows() -> Callable[[Tensor], Tensor | None]:
    """While masks of full rows are made, do not let transformers look for packed sequences in a part of them.

    Returns the function that does.
    """
    from transformers import masking_utils

    find: Callable[[Tensor], Tensor | None] = masking_utils.find_packed_sequence_indices

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        rows = getattr(_split, "rows", None)
        if rows is None:
            return find(position_ids)
        rows.finds_packed = True
        return None

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices
    return find


def _mask_of_rows(own: str, *, mask_function: Callable[..., Any], **arguments: Any) -> Any:
    """A mask function of transformers for the attention implementation `own`, for the rows of this forward."""
    from transformers import masking_utils

    rows: SplitRows = _split.rows
    make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[own]
    arguments |= {"q_length": rows.length, "kv_length": rows.length, "q_offset": 0, "kv_offset": 0}
    padding = arguments.get("attention_mask")
    if padding is not None and padding.shape[-1] != rows.length:  # made by the model, which got none
        arguments["attention_mask"] = None
    if rows.positions is not None and (rows.is_packed or rows.finds_packed):
        positions = rows.positions.expand(arguments["batch_size"], -1)
        packed = _find_packed_in_full_rows()(positions)
        if packed is not None:
            mask_function = _keep_packed_apart(mask_function, positions, packed)
            arguments["allow_is_causal_skip"] = False
    if rows.chunks is None or (base_implementation(own) == "sdpa" and _is_causal_alone(arguments)):
        return make(mask_function=mask_function, **arguments)
    arguments["allow_is_causal_skip"] = False
    masks = []
    for chunk in rows.chunks:
        arguments |= {"q_length": len(chunk), "q_offset": chunk.start}
        masks.append(make(mask_function=mask_function, **arguments))
    return None if masks[0] is None else torch.cat(masks, -2)


def base_implementation(name: str | None) -> str:
    """The attention implementation of transformers under one that `wrap_attention` or `split_attention` made."""
    name = _without_split(name or "sdpa")
    return name.removeprefix(WRAPPED).partition("_")[0] if name.startswith(WRAPPED) else name


def _is_causal_alone(arguments: Mapping[str, Any]) -> bool:
    """Whether each token attends to all before it, for which sdpa needs no mask of whole rows."""
    padding, window = arguments.get("attention_mask"), arguments.get("local_size")
    if not arguments.get("allow_is_causal_skip", True) or (window is not None and window <= arguments["kv_length"]):
        return False
    return padding is None or bool(padding.all())


def _keep_packed_apart(mask_function: Callable[..., Any], positions: Tensor, packed: Tensor) -> Callable[..., Any]:
    """A mask function within each of the sequences that `packed` numbers."""
    from transformers import masking_utils

    remap = getattr(masking_utils, "packed_sequence_compatibility_function", None)
    if remap is not None:
        made: Callable[..., Any] = remap(mask_function, positions, packed)
        return made
    inside = masking_utils.packed_sequence_mask_function(packed)
    both: Callable[..., Any] = masking_utils.and_masks(mask_function, inside)
    return both


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of transformers."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@dataclass(frozen=True)
class Conversion:
    """Tensors of a model and the stored tensors that they are made of: mostly one of one."""

    targets: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]  # (stored name, the pattern of the rule that it matches)
    rule: Any

    @property
    def stored(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.sources)

    @property
    def is_plain(self) -> bool:
        """Whether it is one tensor, as it is stored."""
        return self.rule is None

    def run(self, model: nn.Module, read: Read) -> dict[str, Tensor]:
        """Make the model's tensors, by name; `read` returns a stored tensor."""
        if self.rule is None:
            return {self.targets[0]: read(self.stored[0])}
        rule = copy.deepcopy(self.rule)
        for name, pattern in self.sources:
            rule.add_tensor(self.targets[0], name, pattern, read(name))
        converted = rule.convert(self.targets[0], model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def text_model_names(outer: nn.Module, text: nn.Module) -> dict[str, str]:
    """Name in a multimodal model -> name in its text model, for the tensors of the text part and the head."""
    inside = next((name for name, module in outer.named_modules() if type(module) is type(text.base_model)), None)
    if inside is None:
        raise ConfigError(f"a {type(outer).__name__} has no {type(text.base_model).__name__}; pass its text model")
    ends = [(inside, text.base_model_prefix)]
    heads = [(model, model.get_output_embeddings()) for model in (outer, text)]
    if all(head is not None for _, head in heads):
        ends.append(tuple(next(n for n, m in model.named_modules() if m is head) for model, head in heads))
    return {
        name.replace(here, there, 1): name
        for name in {*text.state_dict(), *(name for name, _ in text.named_buffers())}
        for there, here in ends
        if name.startswith(f"{here}.")
    }


def conversions(model: nn.Module, stored: Iterable[str]) -> tuple[list[Conversion], set[str]]:
    """How the model's tensors are made of the stored ones, and the stored names that it does not use.

    The same decisions as in transformers' own loading (core_model_loading.convert_and_load_state_dict_in_model).
    """
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    rules = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    names, prefix = model.state_dict(), model.base_model_prefix
    sources: dict[str, list[tuple[str, str]]] = {}
    rule_of: dict[str, Any] = {}
    unused = set()
    for name in sorted(stored, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, names)
        if target not in names and name in names:
            target, pattern = loading.rename_source_key(name, [], [], prefix, names)
        if target in names:
            sources.setdefault(target, []).append((name, pattern or ""))
            rule_of.setdefault(target, None if pattern is None else by_pattern[pattern])
        else:
            unused.add(name)
    return [
        Conversion(_targets(first, rule_of[first], names), tuple(parts), rule_of[first])
        for first, parts in sources.items()
    ], unused


def to_published(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert a model's tensors to the names and shapes in which its family is published."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def kept_in_float32(model: nn.Module, dtype: torch.dtype, names: Iterable[str]) -> set[str]:
    """The tensors that transformers keeps in float32 when it loads a checkpoint of this model as `dtype`."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    patterns = [pattern.replace("*", ".*") for pattern, kept in plan.items() if kept == torch.float32]
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def unexpected_names(model: nn.Module, names: Iterable[str]) -> set[str]:
    """The stored names that are not expected in a checkpoint of this model."""
    known = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    return {name for name in names if not any(pattern.search(name) for pattern in known)}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Parameter name -> the name it is tied to, by the model's class and config."""
    return dict(model.all_tied_weights_keys)


def classifier_name(config: Any) -> str | None:
    """The name of the class with a score head on the same model; None if there is none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    found: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    return None if found is None else found.__name__


def _targets(first: str, rule: Any, names: Mapping[str, Any]) -> tuple[str, ...]:
    """All tensors that a rule makes, given the first of them."""
    if rule is None:
        return (first,)
    found = []
    head = rule.target_patterns[0]
    for pattern in rule.target_patterns:
        name = first.replace(head, pattern)
        shape = re.escape(name).replace(r"\*", r"\d+")
        found += [name] if "*" not in name else [other for other in names if re.fullmatch(shape, other)]
    return tuple(found)


def marks_answers(tokenizer: Any, tools: Any) -> bool:
    """Whether a tokenizer's chat template marks the answers ({% generation %})."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template(None, tools)) is not None


def render_with_answers(tokenizer: Any, messages: list[Any], tools: Any) -> tuple[str, list[tuple[int, int]]]:
    """The text of a chat, and the (start, end) of each answer that the template marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=tokenizer.get_chat_template(None, tools),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return texts[0], [(start, end) for start, end in spans[0]]


def experts_implementation(module: Any) -> str | None:
    """The implementation that a stack of experts runs: "eager", "grouped_mm", ..."""
    return module.config._experts_implementation


def apply_expert_gate(module: Any, x: Tensor) -> Tensor:
    """The activation between the two products of a stack of gated experts."""
    return module._apply_gate(x)
