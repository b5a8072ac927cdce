"""What a plan is for: the checked arguments of `zp.plan`, and the costs and settings that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from zeropipe.core.model.positions import require_positions
from zeropipe.errors import ConfigError, require_positive_integers, short
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.estimate import estimate, require_sample
from zeropipe.estimating.gpus import find_gpu
from zeropipe.estimating.model import Model, ShapedModel, open_model
from zeropipe.estimating.shapes import read_config
from zeropipe.planning.context import RESERVE, PlanContext
from zeropipe.planning.slicing import default_slices
from zeropipe.sim.layer_costs import LayerCosts

DEFAULT_MODES = ("none", "selective:op", "full")
DEFAULT_MICROBATCH_SIZES = (1, 2, 4)
LONG_SEQUENCE = 32_768  # tokens, from which levers for long sequences are tried: cp, regather
MIN_PART = 8_192  # tokens of a sequence that a GPU has at least with the default sizes of cp


BATCH_TOKENS, MIN_BATCH = 2**22, 16  # of a step by default: tokens, but not fewer sequences


class SearchSpace(NamedTuple):
    """The settings of layers to try."""

    tp: list[int]
    microbatch_sizes: list[int]
    ac: list[str]
    ep: list[int]
    cp: list[int]
    slices: list[int]


@dataclass(frozen=True)
class PlanTask:
    """The arguments of `zp.plan` that say what to plan; None: all, or the default."""

    model: ShapedModel | CountedModel | LayerCosts
    gpus: int
    batch: int
    gpus_per_node: int = 8
    memory: float | None = None
    reserve: float = RESERVE
    gpu: str = "h100"
    sequence: int = 4096
    dtype: str = "bf16"
    compile: bool = True
    efficiency: dict[str, Any] | None = None
    lora: int | None = None
    sample: int | None = None
    pp: list[int] | None = None
    tp: list[int] | None = None
    ep: list[int] | None = None
    cp: list[int] | None = None
    slices: list[int] | None = None
    imbalance: float = 1.0
    dispatch: str = "expert"
    sequence_parallel: bool | None = None
    microbatch_sizes: list[int] | None = None
    ac: list[str] | None = None
    schedules: list[str] | None = None

    @staticmethod
    def create(
        model: str | Mapping[str, Any] | ShapedModel | CountedModel | LayerCosts, sequence: int, **values: Any
    ) -> PlanTask:
        """Check the arguments; those of several values may be single ones."""
        require_positive_integers(**{name: values[name] for name in ("gpus", "batch", "gpus_per_node")})
        for name in ("pp", "tp", "ep", "cp", "slices", "microbatch_sizes"):
            values[name] = _parse_integers(name, values.get(name))
        for name in ("ac", "schedules"):
            values[name] = _parse_names(name, values[name])
        values.setdefault("sample", None)
        if isinstance(model, LayerCosts):
            if values["lora"] not in (None, model.lora_rank):
                has = "train all weights" if model.lora_rank is None else f"have rank {model.lora_rank}"
                raise ConfigError(f"lora={short(values['lora'])}: the costs {has}; create costs with `estimate --lora`")
            if values["sample"] not in (None, model.sample):
                has = "one sample per sequence" if model.sample is None else f"samples of {model.sample} tokens"
                raise ConfigError(f"sample={short(values['sample'])}: the costs have {has}; create costs with --sample")
            return PlanTask(
                model, sequence=model.sequence, **{**values, "lora": model.lora_rank, "sample": model.sample}
            )
        require_sample(values["sample"], sequence)
        if isinstance(model, str | Mapping):
            require_positions(read_config(model)[1], sequence, "sequence")
        if values["lora"] is not None and values["tp"] is None:
            values["tp"] = [1]  # costs of adapters are not known with tp
        return PlanTask(open_model(model), sequence=sequence, **values)

    def open(self) -> tuple[PlanContext, SearchSpace]:
        """The costs of layers and the GPUs, and the settings to try; ConfigError for values that exclude each other."""
        if isinstance(self.model, LayerCosts):
            costs, memory, space = self.model, self.memory, self._find_settings(self.model)
            if self.sequence_parallel is not None:
                costs = _only_settings(costs, self.sequence_parallel)
        else:
            space = SearchSpace(
                self.tp or _default_tp_sizes(self.model, self.gpus, self.gpus_per_node),
                self.microbatch_sizes or list(DEFAULT_MICROBATCH_SIZES),
                self.ac or list(DEFAULT_MODES),
                self.ep or _default_ep_sizes(self.model, self.gpus, self.lora),
                self.cp or _default_cp_sizes(self.model, self.gpus, self.sequence),
                self.slices or default_slices(self.sequence, LONG_SEQUENCE),
            )
            costs = self._estimate(self.model, space)
            memory = find_gpu(self.gpu).memory if self.memory is None else self.memory
        self._require_slices(costs)
        modes = ("keep", "regather") if costs.sequence >= LONG_SEQUENCE else ("keep",)
        limit = _usable_memory(costs, memory, self.reserve)
        return PlanContext.create(costs, self.gpus_per_node, limit, modes), space

    def _require_slices(self, costs: LayerCosts) -> None:
        """ConfigError for a number of slices that the costs are not known for."""
        wanted = [number for number in self.slices or () if number > 1]
        if wanted and not costs.can_slice:
            raise ConfigError(
                f"slices={wanted[0]}: {costs.model} has no costs of slices: they are estimated for dense text models "
                "without windows, with ac full, and without compile, sample, cp and sequence parallelism; leave it out"
            )
        if wanted and max(wanted) > costs.sequence:
            raise ConfigError(f"slices={max(wanted)}: a sequence of {costs.sequence} tokens is too short; use fewer")

    def _estimate(self, model: ShapedModel | CountedModel, space: SearchSpace) -> LayerCosts:
        return estimate(
            model, gpu=self.gpu, sequence=self.sequence, dtype=self.dtype, compile=self.compile,
            efficiency=self.efficiency, tp=space.tp, microbatch_size=space.microbatch_sizes,
            sequence_parallel=self._parallel_values(space),
            ac=[*space.ac, *({"none"} - set(space.ac))],  # "none": the others recompute the rest
            lora=self.lora, ep=space.ep if 1 in space.tp else 1, imbalance=self.imbalance,
            dispatch=self.dispatch, sample=None if self.sample is None else min(self.sample, self.sequence),
            cp=space.cp, gpus_per_node=self.gpus_per_node,
        )  # fmt: skip

    def _parallel_values(self, space: SearchSpace) -> bool | tuple[bool, ...]:
        """The argument of `estimate`: by default both, where they are possible."""
        if self.sequence_parallel is not None:
            return self.sequence_parallel
        return (False, True) if max(space.tp) > 1 else False

    def _find_settings(self, costs: LayerCosts) -> SearchSpace:
        """The requested settings, by default all of `costs`; ConfigError for one that they do not have."""
        for tp in self.tp or ():
            costs.setting(tp=tp)
        for ep in self.ep or ():
            costs.setting(ep=ep)
        for cp in self.cp or ():
            costs.setting(cp=cp)
        for size in self.microbatch_sizes or ():
            costs.setting(microbatch_size=size)
        for mode in self.ac or ():
            costs.setting(ac=mode)
        return SearchSpace(
            sorted(set(self.tp or (setting.tp for setting in costs.settings))),
            self.microbatch_sizes or sorted({setting.microbatch_size for setting in costs.settings}),
            self.ac or list(dict.fromkeys(setting.ac for setting in costs.settings)),
            self.ep or sorted({setting.ep for setting in costs.settings}),
            self.cp or sorted({setting.cp for setting in costs.settings}),
            self.slices or default_slices(costs.sequence, LONG_SEQUENCE),
        )


def _only_settings(costs: LayerCosts, sequence_parallel: bool) -> LayerCosts:
    """Of settings with a `tp` above 1 those with, or those without, sequence parallelism; ConfigError if none is."""
    costs.setting(sequence_parallel=sequence_parallel)
    kept = [one for one in costs.settings if one.tp == 1 or one.sequence_parallel == sequence_parallel]
    return replace(costs, settings=tuple(kept))


def _default_tp_sizes(model: Model, gpus: int, gpus_per_node: int) -> list[int]:
    """The powers of two that divide the GPUs and the model."""
    powers = [2**n for n in range(5)]
    return [n for n in powers if n <= min(gpus_per_node, gpus) and gpus % n == 0 and model.allows_tp(n)]


def _default_ep_sizes(model: Model, gpus: int, lora: int | None) -> list[int]:
    """1, and the powers of two that divide the experts and the GPUs."""
    powers = [2**n for n in range(1, gpus.bit_length())] if lora is None else []
    return [1, *(n for n in powers if gpus % n == 0 and model.allows_ep(n))]


def default_batch(gpus: int, sequence: int) -> int:
    """Sequences of a step if none are given: BATCH_TOKENS tokens, and a multiple of as many GPUs as there may be."""
    wanted = max(MIN_BATCH, BATCH_TOKENS // sequence)
    unit = max(number for number in range(1, wanted + 1) if gpus % number == 0)
    return -(-wanted // unit) * unit


def _default_cp_sizes(model: Model, gpus: int, sequence: int) -> list[int]:
    """1, and for long sequences the powers of two that divide the GPUs and leave each of them MIN_PART tokens."""
    longest = sequence // MIN_PART if sequence >= LONG_SEQUENCE else 1
    powers = [2**n for n in range(1, longest.bit_length())]
    return [1, *(n for n in powers if gpus % n == 0 and model.allows_cp(n))]


def _usable_memory(costs: LayerCosts, memory: float | None, reserve: float) -> float:
    """Bytes of a GPU that a candidate may use."""
    memory = costs.machine.get("memory") if memory is None else memory
    if isinstance(reserve, bool) or not isinstance(reserve, (int, float)) or not reserve >= 0:
        raise ConfigError(f"reserve={short(reserve)}: must be a non-negative number of bytes")
    if memory is None:
        raise ConfigError("memory is missing: the costs do not have the memory of a GPU; pass it, like 80GB")
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not memory > reserve:
        raise ConfigError(
            f"memory={short(memory)}: must be a number of bytes above the reserve of {reserve / 1e9:g} GB, like 80GB; "
            "or pass a smaller reserve"
        )
    return memory - reserve


def _parse_integers(name: str, value: int | Sequence[int] | None) -> list[int] | None:
    """One positive integer or several, as a list."""
    if value is None:
        return None
    values = list(value) if isinstance(value, Iterable) else [value]
    if not values or any(type(item) is not int or item < 1 for item in values):
        raise ConfigError(f"{name}={short(value)}: must be a positive integer or a list of them, like 4 or [2, 4]")
    return values


def _parse_names(name: str, value: str | Sequence[str] | None) -> list[str] | None:
    """One name or several, as a list."""
    if value is None:
        return None
    values = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else []
    if not values or not all(isinstance(item, str) for item in values):
        raise ConfigError(f"{name}={short(value)}: must be a name or a list of names")
    return values
