"""The operators of a model, kind by kind, from a run of its pieces without memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zeropipe.core.model.operators import ENDS, Counted, Op
from zeropipe.engine.stages.hf import HFStage
from zeropipe.engine.stages.verify import format_error
from zeropipe.errors import ConfigError
from zeropipe.estimating.count.operators import Seen, operators
from zeropipe.estimating.count.share import share
from zeropipe.estimating.count.watch import Watched, memory_of, watching
from zeropipe.profiling.pieces import Cut, open_pieces


class Counter:
    """Counts a model (a directory, or a config as plain data), which is built once, without memory."""

    def __init__(self, source: str | Mapping[str, Any], dtype: torch.dtype) -> None:
        try:
            self._pieces = open_pieces(source, dtype, 0)
        except ConfigError:
            raise
        except Exception as error:  # of a config that is no model's
            raise ConfigError(
                f"transformers cannot use this config ({format_error(error)}): give a decoder model's"
            ) from error

    def count(self, sequence: int, microbatch_size: int, tp: int = 1) -> Counted:
        """What one GPU of `tp` does for one microbatch."""
        try:
            return self._count(sequence, microbatch_size, tp)
        except ConfigError:
            raise
        except Exception as error:
            config = self._pieces.model.config.get_text_config()
            most = getattr(config, "max_position_embeddings", None)
            if most is not None and 0 < most < sequence:
                raise _too_long(sequence, most) from error
            raise ConfigError(
                f"model_type={config.model_type!r}: its layers do not run without memory ({format_error(error)}): "
                "`zeropipe profile` measures them"
            ) from error

    def _count(self, sequence: int, microbatch_size: int, tp: int) -> Counted:
        tokens = torch.zeros(microbatch_size, sequence, dtype=torch.long, device="meta")
        found: dict[str, tuple[Op, ...]] = {}
        hidden: tuple[Tensor, ...] = ()
        logits, tied = tokens, 0
        for place, piece in enumerate(self._pieces.cuts):
            kind = "head" if place == len(self._pieces.cuts) - 1 else piece.kinds[0]
            if len(piece.kinds) > 1 and kind not in ENDS:
                continue  # several layers together tell nothing new
            stage, watched = self._stage(piece), Watched()
            with share(stage, tp, watched) as divided:
                given, outputs = _run(stage, kind in ENDS, hidden, tokens, watched)
            found[kind] = operators(Seen(stage, kind, watched, given, outputs, divided, tp, tokens.numel()))
            if kind == "embedding":
                tied = stage.embedding.numel() if stage.has_tied_ends and stage.embedding is not None else 0
                _require_positions(watched, stage, sequence)
            if kind == "head":
                logits = outputs[0]
            else:
                hidden = outputs
        message = float(sum(tensor.nbytes for tensor in hidden))
        return Counted(self._pieces.layers, found, message, logits.shape[-1], tied)

    def _stage(self, piece: Cut) -> HFStage:
        """A piece as a stage of its own: layers that it does not have are not copied."""
        model, whole = self._pieces.model, self._pieces.whole
        layers = whole.get_submodule(model.family.layers).children()
        others = {id(layer): layer for index, layer in enumerate(layers) if index not in piece.cut[piece.stage]}
        stage = HFStage(copy.deepcopy(whole, others), model.family, piece.cut, piece.stage, model.head)
        stage.tie()
        return stage.train()


def _run(
    stage: HFStage, is_end: bool, inputs: tuple[Tensor, ...], tokens: Tensor, watched: Watched
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Run a stage, watched inside its layer or outside of all: what came in with a gradient, and what came out."""
    given = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs)
    with watching(watched), _around_layers(stage, watched, not is_end) as met:
        watched.is_on = is_end
        result = stage(*given, **stage.pick({"input_ids": tokens, "labels": tokens}))
        watched.is_on = False
    return given if is_end else tuple(met), result if isinstance(result, tuple) else (result,)


@contextmanager
def _around_layers(stage: HFStage, watched: Watched, inside: bool) -> Iterator[list[Tensor]]:
    """Watch inside the layers, or outside of them; gives what comes into them with a gradient."""
    met: list[Tensor] = []

    def before(layer: nn.Module, args: Any, kwargs: Any) -> None:
        met.extend(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.requires_grad)
        watched.is_on = inside

    def after(layer: nn.Module, args: Any, result: Any) -> None:
        watched.is_on = not inside

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in stage.blocks]
    hooks += [layer.register_forward_hook(after) for layer in stage.blocks]
    try:
        yield met
    finally:
        for hook in hooks:
            hook.remove()


def _require_positions(watched: Watched, stage: HFStage, sequence: int) -> None:
    """A table of positions has no row for later ones, which a run without memory does not notice."""
    most = getattr(stage.lm.config.get_text_config(), "max_position_embeddings", None)
    tables = {memory_of(p): p.shape[0] for p in stage.parameters() if p is not stage.embedding}
    looked_up = {place for call in watched.calls if call.name == "embedding" for place in call.reads}
    if most is not None and any(most <= tables[place] < sequence for place in looked_up & tables.keys()):
        raise _too_long(sequence, most)


def _too_long(sequence: int, most: int) -> ConfigError:
    return ConfigError(f"sequence={sequence}: the model has {most} positions: give a sequence of at most {most}")
