"""How many layers each stage gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from operator import index
from typing import Any

from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError, short

_MAX_LISTED = 32  # stages whose layers are listed one by one
# The field of a model's config that has the number of layers. A model with an encoder may have another number there,
# which is its num_hidden_layers.
NUM_LAYERS_NAMES = ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "n_layer", "n_layers", "num_layers")
# fields with one entry for each layer, which transformers counts instead of a num_hidden_layers (nemotron_h)
_LAYER_LISTS = ("layers_block_type", "hybrid_override_pattern")


def read_num_layers(config: Mapping[str, Any]) -> Any:
    """The number of layers in a model's config, as transformers counts them; None if it has none."""
    for name in _LAYER_LISTS:
        if isinstance(config.get(name), list | str):
            return len(config[name])
    # the attention layers of longcat_flash are in pairs, and its num_hidden_layers counts each of them
    names = ("num_layers", *NUM_LAYERS_NAMES) if config.get("model_type") == "longcat_flash" else NUM_LAYERS_NAMES
    return next((config[name] for name in names if name in config), None)


def find_excess_layers(config: Mapping[str, Any], limit: int) -> str:
    """`n_layer=1000000`, if a model's config, or its text_config, has more layers than `limit`; else empty."""
    for table in (config, config.get("text_config")):
        numbers = {name: table.get(name) for name in NUM_LAYERS_NAMES} if isinstance(table, Mapping) else {}
        for name, number in numbers.items():
            if type(number) is int and number > limit:
                return f"{name}={short(number)}"
    return ""


def layer_counts(num_layers: int, num_stages: int, first_less: int = 0, last_less: int = 0) -> tuple[int, ...]:
    """Layers per stage, as even as possible; `first_less` fewer on the first (it embeds), `last_less` on the last.

    >>> layer_counts(8, 4, first_less=1, last_less=1)
    (2, 3, 2, 1)
    """
    if num_stages < 1:
        raise ConfigError(f"num_stages={num_stages}: must be a positive integer")
    if not (isinstance(first_less, int) and isinstance(last_less, int)) or first_less < 0 or last_less < 0:
        raise ConfigError(
            f"first_less={short(first_less)}, last_less={short(last_less)}: must be non-negative integers"
        )
    if num_stages == 1:
        return (num_layers,)
    effective = num_layers + first_less + last_less
    if num_stages > effective:
        fewer = f" and first_less={first_less}, last_less={last_less}" if first_less or last_less else ""
        raise ConfigError(
            f"{count_text(num_stages, 'stage')} for {count_text(num_layers, 'layer')}{fewer} cannot be divided "
            f"evenly; use at most {count_text(effective, 'stage')}, or name those without layers: layers=[1, ..., 0]"
        )
    each, rest = divmod(effective, num_stages)
    counts = [each + (stage < rest) for stage in range(num_stages)]
    for name, less, stage in (("first_less", first_less, 0), ("last_less", last_less, -1)):
        if less > counts[stage]:
            raise ConfigError(f"{name}={less}: must be at most the {count_text(counts[stage], 'layer')} of that stage")
        counts[stage] -= less
    return tuple(counts)


def num_stages_for(
    num_layers: int, layers_per_stage: int, num_ranks: int, first_less: int = 0, last_less: int = 0
) -> int:
    """The number of stages with `layers_per_stage`; ConfigError if it is not a multiple of the number of ranks."""
    if layers_per_stage < 1:
        raise ConfigError(f"layers_per_stage={layers_per_stage}: must be a positive integer")
    num_stages = -(-(num_layers + first_less + last_less) // layers_per_stage)
    if num_stages % num_ranks:
        raise ConfigError(
            f"layers_per_stage={layers_per_stage} gives {count_text(num_stages, 'stage')}, which "
            f"{count_text(num_ranks, 'rank')} cannot share evenly; choose another layers_per_stage"
        )
    return num_stages


def require_layer_counts(counts: Sequence[int], num_layers: int, num_stages: int | None = None) -> tuple[int, ...]:
    """A user's layers per stage; ConfigError unless there is one count per stage and all layers are in a stage."""
    try:
        known = tuple(map(index, counts))
    except TypeError:
        known = ()
    if not known:
        raise ConfigError(f"layers={short(counts)}: must be the number of layers of each stage, such as [4, 4]")
    if num_stages is not None and len(known) != num_stages:
        raise ConfigError(
            f"layers={list(known)} has {count_text(len(known), 'entry')}: the schedule has "
            f"{count_text(num_stages, 'stage')}"
        )
    if min(known) < 0:
        raise ConfigError(f"layers={list(known)}: must be non-negative")
    if sum(known) != num_layers:
        raise ConfigError(
            f"layers={list(known)} adds up to {sum(known)}: the model has {count_text(num_layers, 'layer')}"
        )
    return known


def layer_ranges(counts: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, as ranges."""
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(counts, initial=0)))


def format_counts(counts: Sequence[int]) -> str:
    """Layers per stage as a command takes them; of many stages, equal neighbours in one entry."""
    if len(counts) <= _MAX_LISTED:
        return ",".join(map(str, counts))
    runs = ((count, len(list(same))) for count, same in groupby(counts))
    return ", ".join(str(count) if number == 1 else f"{number} times {count}" for count, number in runs)
