"""How many layers each stage gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import index
from typing import Any

from zeropipe.core.units import count_text
from zeropipe.errors import ConfigError, short

_LISTED = 32  # stages whose layers are listed one by one
# what the configs of models call their number of layers
NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers")


def above_layers(config: Mapping[str, Any], most: int) -> str:
    """`n_layer=1000000`, where a model's config, or the part of it about text, has more than `most`; else nothing."""
    for part in (config, config.get("text_config")):
        numbers = {name: part.get(name) for name in NUM_LAYERS} if isinstance(part, Mapping) else {}
        for name, number in numbers.items():
            if type(number) is int and number > most:
                return f"{name}={short(number)}"
    return ""


def layer_counts(num_layers: int, num_stages: int, first_less: int = 0, last_less: int = 0) -> tuple[int, ...]:
    """Layers per stage: as even as can be, the first stage `first_less` fewer (it embeds), the last `last_less` (head).

    >>> layer_counts(8, 4, first_less=1, last_less=1)
    (2, 3, 2, 1)
    """
    if num_stages < 1:
        raise ConfigError(f"num_stages={num_stages}: a model has at least 1 stage")
    if not (isinstance(first_less, int) and isinstance(last_less, int)) or first_less < 0 or last_less < 0:
        raise ConfigError(f"first_less={short(first_less)}, last_less={short(last_less)}: give 0 or more layers")
    if num_stages == 1:
        return (num_layers,)
    effective = num_layers + first_less + last_less
    if num_stages > effective:
        fewer = f" and first_less={first_less}, last_less={last_less}" if first_less or last_less else ""
        raise ConfigError(
            f"{count_text(num_stages, 'stage')} for {count_text(num_layers, 'layer')}{fewer} cannot be spread "
            f"evenly: give at most {count_text(effective, 'stage')}, or say which have no layer: layers=[1, ..., 0]"
        )
    each, more = divmod(effective, num_stages)
    counts = [each + (stage < more) for stage in range(num_stages)]
    for name, less, stage in (("first_less", first_less, 0), ("last_less", last_less, -1)):
        if less > counts[stage]:
            raise ConfigError(
                f"{name}={less} is more than the {count_text(counts[stage], 'layer')} of that stage: give less"
            )
        counts[stage] -= less
    return tuple(counts)


def num_stages_for(
    num_layers: int, layers_per_stage: int, num_ranks: int, first_less: int = 0, last_less: int = 0
) -> int:
    """How many stages `layers_per_stage` gives; must be a multiple of the number of ranks."""
    if layers_per_stage < 1:
        raise ConfigError(f"layers_per_stage={layers_per_stage}: give at least 1")
    num_stages = -(-(num_layers + first_less + last_less) // layers_per_stage)
    if num_stages % num_ranks:
        raise ConfigError(
            f"layers_per_stage={layers_per_stage} gives {count_text(num_stages, 'stage')}, which "
            f"{count_text(num_ranks, 'rank')} cannot share evenly: choose another layers_per_stage"
        )
    return num_stages


def check_counts(counts: Sequence[int], num_layers: int, num_stages: int | None = None) -> tuple[int, ...]:
    """Layer counts a user gave, checked: one per stage (of as many as there are counts), none dropped."""
    try:
        known = tuple(map(index, counts))
    except TypeError:
        known = ()
    if not known:
        raise ConfigError(f"layers={short(counts)}: give the number of layers of each stage, such as [4, 4]")
    if num_stages is not None and len(known) != num_stages:
        raise ConfigError(
            f"layers={list(known)} has {count_text(len(known), 'entry')}: the schedule has "
            f"{count_text(num_stages, 'stage')}"
        )
    if min(known) < 0:
        raise ConfigError(f"layers={list(known)}: a stage has 0 layers or more")
    if sum(known) != num_layers:
        raise ConfigError(
            f"layers={list(known)} adds up to {sum(known)}: the model has {count_text(num_layers, 'layer')}"
        )
    return known


def ranges(counts: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage, as ranges."""
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return tuple(range(start, start + count) for start, count in zip(starts, counts))


def counts_text(counts: Sequence[int]) -> str:
    """Layers per stage as they are given to a command; where stages are many, equal neighbours together."""
    if len(counts) <= _LISTED:
        return ",".join(map(str, counts))
    runs = ((count, len(list(same))) for count, same in groupby(counts))
    return ", ".join(str(count) if number == 1 else f"{number} times {count}" for count, number in runs)
