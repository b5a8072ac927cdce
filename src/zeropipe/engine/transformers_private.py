"""Every private name of transformers that loading and saving use.

Checkpoints on disk do not always have the names and shapes of the model in memory: experts are stored one by one, heads
under older names. transformers knows how each family is stored; here its rules are asked, for single tensors.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Read = Callable[[str], Tensor]


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
