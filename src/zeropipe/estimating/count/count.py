"""Count the operators of each kind of layer, by running groups of layers on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.core.model.operators import ENDS, Counted, Op
from zeropipe.engine.head.fused import find_rule
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.verify import format_error
from zeropipe.errors import ConfigError
from zeropipe.estimating.count.meta_private import storage_id
from zeropipe.estimating.count.operators import LayerRun, list_operators
from zeropipe.estimating.count.record import OperatorLog, record
from zeropipe.estimating.count.shard import shard_alone
from zeropipe.profiling.groups import GroupCut, open_groups


class Counter:
    """Counts a model (a directory or a config), which is built once on the meta device."""

    def __init__(self, source: str | Mapping[str, Any], dtype: torch.dtype) -> None:
        try:
            self._model = open_groups(source, dtype, 0)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"transformers cannot use this config ({format_error(error)}); use that of a decoder model"
            ) from error

    def count(self, sequence: int, microbatch_size: int, tp: int = 1, sequence_parallel: bool = False) -> Counted:
        """Count one microbatch on one GPU of `tp`."""
        try:
            return self._count(sequence, microbatch_size, tp, sequence_parallel)
        except ConfigError:
            raise
        except Exception as error:
            config = self._model.model.config.get_text_config()
            limit = getattr(config, "max_position_embeddings", None)
            if limit is not None and 0 < limit < sequence:
                raise _too_long(sequence, limit) from error
            raise ConfigError(
                f"model_type={config.model_type!r}: its layers do not run on the meta device ({format_error(error)}); "
                "`zeropipe profile` measures them"
            ) from error

    def _count(self, sequence: int, microbatch_size: int, tp: int, sequence_parallel: bool) -> Counted:
        tokens = torch.zeros(microbatch_size, sequence, dtype=torch.long, device="meta")
        found: dict[str, tuple[Op, ...]] = {}
        hidden: tuple[Tensor, ...] = ()
        logits, tied = tokens, 0
        fused: tuple[Op, ...] | None = None
        for index, group in enumerate(self._model.cuts):
            kind = "head" if index == len(self._model.cuts) - 1 else group.kinds[0]
            if len(group.kinds) > 1 and kind not in ENDS:
                continue  # several layers: each of their kinds has a group
            stage, log = self._create_stage(group), OperatorLog()
            with shard_alone(stage, tp, sequence_parallel, log) as sharded:
                inputs, outputs = _run(stage, kind in ENDS, hidden, tokens, log)
            found[kind] = list_operators(LayerRun(stage, kind, log, inputs, outputs, sharded, tp, tokens.numel()))
            if kind == "embedding":
                tied = stage.embedding.numel() if stage.has_tied_ends and stage.embedding is not None else 0
                _require_positions(log, stage, sequence)
            if kind == "head":
                logits = outputs[0]
                fused = self._count_products(group, hidden, tokens, tp, sequence_parallel)
            else:
                hidden = outputs
        message = float(sum(tensor.nbytes for tensor in hidden))
        return Counted(self._model.layers, found, message, logits.shape[-1], tied, fused)

    def _count_products(
        self, group: GroupCut, hidden: tuple[Tensor, ...], tokens: Tensor, tp: int, sequence_parallel: bool
    ) -> tuple[Op, ...] | None:
        """The operators of a head up to its products, if the engine computes its losses in chunks."""
        stage, log = self._create_stage(group), OperatorLog()
        if isinstance(find_rule(stage), str):
            return None
        products: list[Tensor] = []

        def stop(head: nn.Module, args: Any, output: Tensor) -> None:
            products.extend((output, args[0]))  # which are kept or not, as `estimating/head.py` says
            log.is_on = False

        with shard_alone(stage, tp, sequence_parallel, log) as sharded:
            hook = stage.lm.get_output_embeddings().register_forward_hook(stop)
            inputs, _ = _run(stage, True, hidden, tokens, log)
            hook.remove()
        return list_operators(LayerRun(stage, "head", log, inputs, products, sharded, tp, tokens.numel()))

    def _create_stage(self, group: GroupCut) -> HFStage:
        """A group as a stage; layers of other groups are not copied."""
        model, skeleton = self._model.model, self._model.skeleton
        layers = skeleton.get_submodule(model.family.layers).children()
        others = {id(layer): layer for index, layer in enumerate(layers) if index not in group.cut[group.stage]}
        stage = HFStage(copy.deepcopy(skeleton, others), model.family, group.cut, group.stage, model.head)
        stage.tie()
        return stage.train()


def _run(
    stage: HFStage, is_end: bool, inputs: tuple[Tensor, ...], tokens: Tensor, log: OperatorLog
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run a stage and record its layer or, at an end, the rest; returns inputs with gradients, and outputs."""
    given = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs)
    with record(log), _toggle_at_layers(stage, log, not is_end) as layer_inputs:
        log.is_on = is_end
        result = stage(*given, **stage.pick({"input_ids": tokens, "labels": tokens}))
        log.is_on = False
    return given if is_end else tuple(layer_inputs), result if isinstance(result, tuple) else (result,)


@contextmanager
def _toggle_at_layers(stage: HFStage, log: OperatorLog, inside: bool) -> Iterator[list[Tensor]]:
    """Record inside the layers, or outside of them; yields the inputs of layers that have gradients."""
    inputs: list[Tensor] = []

    def before(layer: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.extend(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.requires_grad)
        log.is_on = inside

    def after(layer: nn.Module, args: Any, result: Any) -> None:
        log.is_on = not inside

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in stage.blocks]
    hooks += [layer.register_forward_hook(after) for layer in stage.blocks]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _require_positions(log: OperatorLog, stage: HFStage, sequence: int) -> None:
    """ConfigError if a table of positions is too short, which a run on meta does not detect."""
    limit = getattr(stage.lm.config.get_text_config(), "max_position_embeddings", None)
    tables = {storage_id(p): p.shape[0] for p in stage.parameters() if p is not stage.embedding}
    looked_up = {storage for call in log.calls if call.name == "embedding" for storage in call.reads}
    if limit is not None and any(limit <= tables[storage] < sequence for storage in looked_up & tables.keys()):
        raise _too_long(sequence, limit)


def _too_long(sequence: int, limit: int) -> ConfigError:
    return ConfigError(f"sequence={sequence}: must be at most {limit}, the number of positions of the model")
