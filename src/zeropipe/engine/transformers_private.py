"""Every private name of transformers, in one file: how models are built and run, stored and loaded.

Checkpoints on disk do not always have the names and shapes of the model in memory: experts are stored one by one, heads
under older names. transformers knows how each family is stored; here its rules are asked, for single tensors.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.errors import ConfigError, MissingExtra

Read = Callable[[str], Tensor]


def causal_class(config: Any) -> Any:
    """The class of a config's causal language model; None if there is none."""
    try:
        from transformers.models.auto import modeling_auto as auto
    except ImportError:
        raise MissingExtra("transformers", "engine") from None
    own = auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if own is not None:
        return own
    # the text part of a model of several kinds of input may have a class, but no type of its own
    package = importlib.import_module(type(config).__module__.rpartition(".")[0])
    classes = (getattr(package, name, None) for name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return next((found for found in classes if found is not None and found.config_class is type(config)), None)


def causal_types() -> list[str]:
    """All model types that have a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(config: Any, dtype: torch.dtype, *, kernels: bool = True) -> nn.Module:
    """A model of a config, on the default device; without `kernels` in plain torch, whatever the config says."""
    found = causal_class(config)
    assert found is not None, "a config that was looked at"
    ways = (config._attn_implementation, config._experts_implementation) if kernels else (None, "eager")
    return found._from_config(
        copy.deepcopy(config), dtype=dtype, attn_implementation=ways[0], experts_implementation=ways[1]
    )


def build_around(config: Any, dtype: torch.dtype) -> nn.Module:
    """The model of several kinds of input that a config describes, on the default device."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    for kind in ("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT", "CAUSAL_LM"):
        found = getattr(auto, f"MODEL_FOR_{kind}_MAPPING", {}).get(type(config), None)
        if found is not None:
            break
    else:
        names = getattr(config, "architectures", None) or [""]
        found = getattr(transformers, names[0], None)
    if found is None:
        raise ConfigError(f"transformers has no class that loads model_type={config.model_type!r}: give its text part")
    try:
        return found._from_config(copy.deepcopy(config), dtype=dtype)
    except Exception as error:  # whatever transformers finds wrong with it
        raise ConfigError(f"transformers cannot build a {found.__name__} of this config: {_line(error)}") from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def is_model(module: nn.Module) -> bool:
    """Whether a module is a model of transformers, with rules for its parts."""
    return hasattr(module, "_init_weights")


def initialise(models: Iterable[nn.Module], module: nn.Module) -> None:
    """Give a module's own parameters and computed buffers the values with which its family starts.

    `models` are the modules around it, from the outermost on: the last one that is a model knows how.
    """
    [*_, own] = [model for model in (*models, module) if is_model(model)]
    own._init_weights(module)


def leave_alone(tensor: Tensor) -> Tensor:
    """A tensor that a model's initialisation does not touch."""
    tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    return tensor


def uses_flash(config: Any) -> bool:
    """Whether attention is told the borders of packed sequences instead of being given a mask."""
    return "flash" in (config._attn_implementation or "")


def forward_keys(model: nn.Module) -> frozenset[str]:
    """The names of a model's inputs."""
    return frozenset(inspect.signature(type(model).forward).parameters)


def router_facts(lm: Any) -> tuple[int, int, float]:
    """Number of experts, how many a token chooses, and the factor of the load-balancing loss, of a model's own loss."""
    factor = getattr(lm, "router_aux_loss_coef", None)
    return lm.num_experts, lm.num_experts_per_tok, lm.aux_loss_coef if factor is None else factor


def router_outputs(base: nn.Module, blocks: Iterable[nn.Module]) -> list[tuple[nn.Module, int]]:
    """The modules in some layers of a model that make routers' logits, and where in their output these are."""
    recorders: Any = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits", [])
    found = []
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        for block in blocks:
            for name, module in block.named_modules():
                is_there = recorder.layer_name is None or f".{recorder.layer_name}." in f".{name}."
                if is_there and isinstance(module, recorder.target_class):
                    found.append((module, recorder.index))
    return found


@contextmanager
def packed_masks(position_ids: Tensor | None) -> Iterator[None]:
    """Attention masks keep apart the sequences that these position ids tell apart; None: nothing is packed.

    Some models (gpt_oss) do not hand their position ids to the functions that make masks. And where a batch has no
    position ids transformers would ask the device for packed sequences, and wait for its answer.
    """
    from transformers import masking_utils

    find = masking_utils.find_packed_sequence_indices
    makers = [] if position_ids is None else _mask_makers()
    defaults = [maker.__defaults__ for maker, _ in makers]
    if position_ids is None:
        masking_utils.find_packed_sequence_indices = lambda ids: None
    for maker, place in makers:
        given = list(maker.__defaults__ or ())
        given[place] = position_ids
        maker.__defaults__ = tuple(given)
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
        for (maker, _), old in zip(makers, defaults):
            maker.__defaults__ = old


@cache
def _mask_makers() -> list[tuple[Any, int]]:
    """The functions that make masks, and which of their defaults is that of the position ids.

    Models have imported them by name: another default reaches them all.
    """
    from transformers import masking_utils

    found = []
    for name in filter(re.compile("create_").match, dir(masking_utils)):
        maker = inspect.unwrap(getattr(masking_utils, name))
        optional = [p.name for p in inspect.signature(maker).parameters.values() if p.default is not p.empty]
        if "position_ids" in optional:
            found.append((maker, optional.index("position_ids")))
    return found


def length_dependent(model: nn.Module) -> list[nn.Module]:
    """The rotary embeddings of a model whose factors depend on the longest sequence of a batch."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) for kind in kinds):
            found.append(module)
    return found


@contextmanager
def factors_per_sample(rotary: Iterable[nn.Module], lengths: Tensor) -> Iterator[None]:
    """Let such embeddings rotate every packed sample as if it were alone; `lengths` has that of each token's sample."""
    hook = partial(_rotated_per_sample, lengths)
    hooks = [module.register_forward_hook(hook, with_kwargs=True) for module in rotary]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def _rotated_per_sample(
    lengths: Tensor, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """A hook of a rotary embedding: what it gives for each sample alone. `output` is of the longest of all samples."""
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    positions, layer_type = given.arguments["position_ids"], given.arguments.get("layer_type")
    kind = module.rope_type if layer_type is None else module.rope_type[layer_type]

    def run(mask: Tensor) -> Any:
        """Of samples that are not among these every token has the first position."""
        given.arguments["position_ids"] = torch.where(mask, positions, 0)
        return type(module).forward(*given.args, **given.kwargs)

    if kind == "longrope":
        rope = module.config.rope_parameters
        is_long = lengths > (rope if layer_type is None else rope[layer_type])["original_max_position_embeddings"]
        return _chosen(is_long, output, run(~is_long))
    if "dynamic" not in kind:
        return None
    nothing, short = torch.zeros_like(lengths, dtype=torch.bool), lengths <= module.original_max_seq_len
    run(nothing)  # it remembers the longest sequence until a short one comes
    output = run(short)
    for length in sorted(set(lengths[~short].tolist())):
        run(nothing)
        output = _chosen(lengths == length, run(lengths == length), output)
    run(nothing)
    return output


def _chosen(mask: Tensor, one: Any, other: Any) -> Any:
    """For the tokens of a mask what the first has, for the others what the second has."""
    if isinstance(one, tuple | list):
        return tuple(_chosen(mask, first, second) for first, second in zip(one, other, strict=True))
    if not isinstance(one, Tensor) or one.shape[-3:-1] != mask.shape:
        raise ConfigError(
            "cu_seqlens: the rotary embeddings of this model are of an unknown shape; pad sequences instead"
        )
    return torch.where(mask[..., None], one, other)


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' warnings."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@dataclass(frozen=True)
class Conversion:
    """Some tensors of a model, made of some stored ones: mostly one of one."""

    targets: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]  # (stored name, the rule's pattern that it fits)
    rule: Any

    @property
    def stored(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.sources)

    @property
    def is_plain(self) -> bool:
        """One tensor, as it is stored."""
        return self.rule is None

    def run(self, model: nn.Module, read: Read) -> dict[str, Tensor]:
        """The model's tensors, by name; `read` gives a stored one."""
        if self.rule is None:
            return {self.targets[0]: read(self.stored[0])}
        rule = copy.deepcopy(self.rule)
        for name, pattern in self.sources:
            rule.add_tensor(self.targets[0], name, pattern, read(name))
        made = rule.convert(self.targets[0], model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def text_names(outer: nn.Module, text: nn.Module) -> dict[str, str]:
    """What the tensors of a model's text part, with the head, are called in a model of that part alone."""
    inside = next((name for name, module in outer.named_modules() if type(module) is type(text.base_model)), None)
    if inside is None:
        raise ConfigError(f"a {type(outer).__name__} has no {type(text.base_model).__name__}: give its text part")
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
    """How the model's tensors are made of the stored ones, and the stored ones that it has no use for.

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


def published(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors under the names, and in the shapes, in which its family is published."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def kept_in_float32(model: nn.Module, dtype: torch.dtype, names: Iterable[str]) -> set[str]:
    """The tensors that transformers keeps in float32 when it loads a checkpoint of this model as `dtype`."""
    plan: Mapping[str, torch.dtype] = model._get_dtype_plan(dtype)
    patterns = [pattern.replace("*", ".*") for pattern, kept in plan.items() if kept == torch.float32]
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def unexpected(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Those of some stored tensors that a checkpoint of this model should not have."""
    known = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    return {name for name in names if not any(pattern.search(name) for pattern in known)}


def tied_names(model: nn.Module) -> dict[str, str]:
    """Name -> the name it is tied to, as the model's class and config say."""
    return dict(model.all_tied_weights_keys)


def classifier_name(config: Any) -> str | None:
    """The class that has a score head on the same model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    found: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    return None if found is None else found.__name__


def _targets(first: str, rule: Any, names: Mapping[str, Any]) -> tuple[str, ...]:
    """All tensors that a rule makes; rules speak of the first one only."""
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
    """Whether a tokenizer's chat template says itself where answers are."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template(None, tools)) is not None


def render_with_answers(tokenizer: Any, messages: list[Any], tools: Any) -> tuple[str, list[tuple[int, int]]]:
    """A chat as the template writes it, and the places of the answers that it marks."""
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, places = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=tokenizer.get_chat_template(None, tools),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return texts[0], [(start, end) for start, end in places[0]]


def experts_implementation(module: Any) -> str | None:
    """The implementation that a stack of experts runs: "eager", "grouped_mm", ..."""
    return module.config._experts_implementation


def apply_expert_gate(module: Any, x: Tensor) -> Tensor:
    """The activation between the two products of a stack of gated experts."""
    return module._apply_gate(x)
