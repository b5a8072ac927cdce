"""NeMo Automodel's pipelines with zeropipe's schedules: call `install()` in each process before creating a model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeropipe.engine.backward.gradients import to_local
from zeropipe.engine.backward.linear import Deferred
from zeropipe.engine.transformers_private import tied_names
from zeropipe.errors import ConfigError
from zeropipe.integrations.schedule_choice import ScheduleChoice, choose_schedule
from zeropipe.pipelining.schedules import PipelineSchedule, get_schedule_class

try:
    from nemo_automodel._transformers import infrastructure
    from nemo_automodel.components.distributed.pipelining import autopipeline, functional
    from nemo_automodel.components.loss.chunked_ce import ChunkedCrossEntropy
    from nemo_automodel.components.training import utils as training
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction as Recipe
except ImportError as error:
    raise ConfigError(f"zeropipe.integrations.automodel needs NeMo Automodel (nemo_automodel 0.7): {error}") from error

_originals: list[tuple[Any, str, Any]] = []  # object, name, original value


def install() -> None:
    """Let Automodel's pipelines run zeropipe's schedules, by replacing functions of Automodel."""
    if _originals:
        return
    _replace(autopipeline, "pipeline_model", _pipeline_with_choice(autopipeline.pipeline_model))
    validate = _allow_ties(autopipeline.validate_hf_model_for_pipeline_support)
    _replace(autopipeline, "validate_hf_model_for_pipeline_support", validate)
    _replace(Recipe, "_broadcast_from_last_pp_stage", _broadcast_from_last_stage)
    accept = staticmethod(_accept_deferred(ChunkedCrossEntropy.validate_lm_head))
    _replace(ChunkedCrossEntropy, "validate_lm_head", accept)
    equalize = _then_equalize_ties(infrastructure._apply_runtime_compatibility_fixes)
    _replace(infrastructure, "_apply_runtime_compatibility_fixes", equalize)
    _replace(training, "clip_grad_norm", _clip_ties_once(training.clip_grad_norm))


def uninstall() -> None:
    """Restore Automodel's own functions; pipelines created in between must not be used any more."""
    while _originals:
        owner, name, value = _originals.pop()
        setattr(owner, name, value)


def _replace(owner: Any, name: str, value: Any) -> None:
    _originals.append((owner, name, inspect.getattr_static(owner, name)))
    setattr(owner, name, value)


@contextmanager
def _replaced(owner: Any, **values: Any) -> Iterator[None]:
    originals = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in originals.items():
            setattr(owner, name, value)


# schedules


def _pipeline_with_choice(original: Callable[..., Any]) -> Callable[..., Any]:
    def pipeline_model(
        model: nn.Module,
        *,
        world_mesh: Any,
        pp_axis_name: str,
        pipeline_parallel_schedule: str | None,
        pipeline_parallel_schedule_csv: str | None,
        **options: Any,
    ) -> Any:
        """As Automodel's function of the same name.

        `pp_schedule` may be any schedule with one copy of each stage, by torch's name or ours; `pp_schedule_csv` a CSV
        or a JSON file, such as `zeropipe search` writes.
        """
        name = pipeline_parallel_schedule_csv or pipeline_parallel_schedule
        assert name is not None
        choice, ties = choose_schedule(name), _find_ties(model)
        with _replaced(functional, **_functions_of(choice)):
            result = original(
                model,
                world_mesh=world_mesh,
                pp_axis_name=pp_axis_name,
                pipeline_parallel_schedule=name,
                pipeline_parallel_schedule_csv=None,
                **options,
            )
        _name_ties(result[-1], ties, world_mesh[pp_axis_name].get_group())
        return result

    return pipeline_model


def _functions_of(choice: ScheduleChoice) -> dict[str, Callable[..., Any]]:
    """What Automodel's functions of these names do, for any schedule."""

    def schedule_class(pp_schedule: str) -> type[Any]:
        return PipelineSchedule if choice.schedule else get_schedule_class(pp_schedule)

    def calculate_virtual_stages(
        num_layers: int,
        layers_per_stage: int | None,
        pp_size: int,
        is_single_stage_schedule: bool,
        round_to_pp_multiple: str | None = None,
    ) -> tuple[int, int]:
        num_stages = choice.num_stages(pp_size, num_layers, None, 0, 0)
        if layers_per_stage is not None:
            num_stages = math.ceil(num_layers / layers_per_stage)
            rest = num_stages % pp_size
            num_stages += {"up": -num_stages % pp_size, "down": -rest}.get(round_to_pp_multiple or "", 0)
            choice.placement(pp_size, num_stages)
        return num_stages, num_stages // pp_size

    def stage_ids_this_rank(pp_rank: int, pp_size: int, num_stages: int, style: str = "loop") -> tuple[int, ...]:
        return choice.placement(pp_size, num_stages).stages_of(pp_rank)

    def build_pipeline_schedule(
        pipeline_parallel_schedule_csv: str | None,
        pipeline_parallel_schedule: str | None,
        microbatch_size: int,
        local_batch_size: int,
        stages: Sequence[Any],
        loss_fn: Callable[..., Tensor],
        scale_grads: bool = False,
    ) -> Any:
        return choice.create_runtime(stages, local_batch_size // microbatch_size, loss_fn, scale_grads=scale_grads)

    return {
        "get_schedule_class": schedule_class,
        "calculate_virtual_stages": calculate_virtual_stages,
        "stage_ids_this_rank": stage_ids_this_rank,
        "build_pipeline_schedule": build_pipeline_schedule,
        "_warmup_pipeline_stage_neighbors": lambda stage: None,  # the engine has connections of its own
    }


def _broadcast_from_last_stage(recipe: Any, tensor: Tensor) -> Tensor:
    """As Automodel's `_broadcast_from_last_pp_stage`, which takes the last rank; on a V it is the first."""
    stage = recipe.pp.info.stages[0]
    dist.broadcast(tensor, group=stage.group, group_src=stage.stage_index_to_group_rank[stage.num_stages - 1])
    return tensor


def _accept_deferred(original: Callable[..., nn.Linear]) -> Callable[..., nn.Linear]:
    def validate_lm_head(lm_head: nn.Module | None, **options: Any) -> nn.Linear:
        """As Automodel's function of the same name, also for a head that leaves its weight gradient to W."""
        if not isinstance(lm_head, Deferred) or not isinstance(lm_head, nn.Linear) or lm_head.bias is not None:
            return original(lm_head, **options)
        original(nn.Linear(1, 1, bias=False, device="meta"), **options)
        return lm_head

    return validate_lm_head


# tied weights


def _allow_ties(original: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    def validate_hf_model_for_pipeline_support(model: nn.Module) -> None:
        """As Automodel's function of the same name, without its refusal of tied embeddings."""
        config = getattr(model, "config", None)
        config = getattr(config, "text_config", None) or config
        if not getattr(config, "tie_word_embeddings", False):
            return original(model)
        with _replaced(config, tie_word_embeddings=False):
            return original(model)

    return validate_hf_model_for_pipeline_support


def _find_ties(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of names of one parameter: by the model's config, as a model on meta is not tied yet, and by identity."""
    found = list(tied_names(model).items()) if hasattr(model, "all_tied_weights_keys") else []
    named: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = named.setdefault(id(parameter), name)
        if first != name:
            found.append((first, name))
    return sorted({(min(pair), max(pair)) for pair in found})


def _name_ties(stages: Sequence[Any], ties: Sequence[tuple[str, str]], group: Any) -> None:
    """Give stages their `tied_pairs`, and `tied_later`: the names of those that are tied to earlier stages."""
    if not ties:
        return
    own = {stage.stage_index: {name for name, _ in stage.submod.named_parameters()} for stage in stages}
    everyone: list[dict[int, set[str]]] = [{} for _ in range(group.size())]
    dist.all_gather_object(everyone, own, group)
    homes = {name: stage for names in everyone for stage, held in names.items() for name in held}
    for stage in stages:
        index, both = stage.stage_index, [*ties, *((b, a) for a, b in ties)]
        pairs = [(a, homes[b], b) for a, b in both if homes.get(a) == index and homes.get(b, index) != index]
        stage.submod.tied_pairs = tuple(pairs)
        stage.submod.tied_later = tuple(name for name, partner, _ in pairs if partner < index)


def _then_equalize_ties(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def _apply_runtime_compatibility_fixes(model: Any) -> Any:
        """As Automodel's function of the same name, which follows the loading or initialization of weights."""
        model = original(model)
        if isinstance(model, autopipeline.AutoPipeline):
            _equalize_ties(model.info.stages)
        return model

    return _apply_runtime_compatibility_fixes


@torch.no_grad()
def _equalize_ties(stages: Sequence[Any]) -> None:
    """Copy tied weights from the earlier to the later stage: Automodel initializes each stage by itself."""
    modules = {stage.stage_index: stage.submod for stage in stages}
    for stage in sorted(stages, key=lambda stage: stage.stage_index):
        for name, partner, partner_name in getattr(stage.submod, "tied_pairs", ()):
            weight = to_local(stage.submod.get_parameter(name))
            other = stage.stage_index_to_group_rank[partner]
            if partner in modules and partner < stage.stage_index:
                weight.copy_(to_local(modules[partner].get_parameter(partner_name)))
            elif partner not in modules and partner < stage.stage_index:
                dist.recv(weight, group=stage.group, group_src=other)
            elif partner not in modules:
                dist.send(weight, group=stage.group, group_dst=other)


def _clip_ties_once(original: Callable[..., Any]) -> Callable[..., Any]:
    def clip_grad_norm(max_grad_norm: float | None, model_parts: Sequence[nn.Module], **options: Any) -> Any:
        """As Automodel's function of the same name; a tied weight counts once in the norm."""
        copies = [part.get_parameter(name) for part in model_parts for name in getattr(part, "tied_later", ())]
        copies = [parameter for parameter in copies if parameter.grad is not None]
        gradients = [parameter.grad for parameter in copies]
        for parameter in copies:
            parameter.grad = None
        try:
            norm = original(max_grad_norm, model_parts, **options)
        finally:
            for parameter, gradient in zip(copies, gradients):
                parameter.grad = gradient
        if max_grad_norm is not None and copies:
            torch.nn.utils.clip_grads_with_norm_(copies, max_grad_norm, norm, options.get("foreach"))
        return norm

    return clip_grad_norm
