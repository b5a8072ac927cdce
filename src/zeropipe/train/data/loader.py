"""The batches of a run, one after the other, from a position that checkpoints save."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from zeropipe.errors import ConfigError
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.data.batch import Batch, BatchLayout, build_batch
from zeropipe.train.data.cache import open_samples
from zeropipe.train.data.request import build_requests, vocabulary_size
from zeropipe.train.data.rows import rows_at
from zeropipe.train.data.store import Samples, StoredSamples, SyntheticSamples


class TrainingData:
    """The batches of a run for one pipeline.

    Rows come epoch after epoch without a gap, so that only the last step of a run over `epochs` may be smaller. The
    position counts rows: whatever the number of pipelines or the size of a batch, the next row is the same.
    """

    def __init__(
        self,
        samples: Samples,
        layout: BatchLayout,
        pipeline: int,
        batch: int,
        *,
        seed: int,
        shuffle: bool,
        epochs: float | None,
        identity: Mapping[str, Any],
    ) -> None:
        self._samples, self._layout, self._pipeline, self._batch = samples, layout, pipeline, batch
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs
        self._identity = dict(identity)
        rows = samples.num_rows
        self._end = None if epochs is None or rows is None else math.ceil(round(epochs * rows, 6))
        self._position = 0  # rows of all epochs that have been returned
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._prefetched: Future[Batch] | None = None

    @property
    def is_packed(self) -> bool:
        """Whether some rows have several samples."""
        return self._layout.is_packed

    @property
    def steps_left(self) -> int | None:
        """The number of batches until `train.epochs` passes are done; None: there is no end."""
        return None if self._end is None else max(0, -(-(self._end - self._position) // self._batch))

    def next(self) -> Batch:
        """The next batch. A thread builds the one after it in the meantime."""
        if self.steps_left == 0:
            raise ConfigError(f"train.epochs={self._epochs:g}: all passes over the data are done")
        prefetched = self._prefetched or self._thread.submit(self._build, self._position)
        self._prefetched = None
        batch = prefetched.result()
        self._position = self._end_of_batch(self._position)
        if self.steps_left != 0:
            self._prefetched = self._thread.submit(self._build, self._position)
        return batch

    def state(self) -> dict[str, Any]:
        """The position after the last returned batch, and the identity of the data."""
        rows = self._samples.num_rows
        epoch, row = (0, self._position) if rows is None else divmod(self._position, rows)
        return {**self._identity, "epoch": epoch, "row": row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. ConfigError if the data has changed."""
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise ConfigError(_explain_change(name, state.get(name), value))
        if self._prefetched is not None:
            self._prefetched.cancel()
        self._position = state["epoch"] * (self._samples.num_rows or 0) + state["row"]
        self._prefetched = None

    def _end_of_batch(self, start: int) -> int:
        return start + self._batch if self._end is None else min(start + self._batch, self._end)

    def _build(self, start: int) -> Batch:
        end, num_rows = self._end_of_batch(start), self._samples.num_rows
        rows = rows_at(np.arange(start, end, dtype=np.int64), num_rows, self._seed, self._shuffle)
        epoch = 0.0 if num_rows is None else end / num_rows
        return build_batch(rows, self._samples, self._layout, self._pipeline, epoch)


def _explain_change(name: str, saved: Any, now: Any) -> str:
    """Why a saved position cannot be used."""
    changes = {
        "files": "the contents of data.path have changed since the checkpoint",
        "tokens": "the tokenizer or its chat template has changed since the checkpoint",
    }
    change = changes.get(name, f"{name}={now!r} was {saved!r} when the checkpoint was saved")
    return (
        f"{change}: rows would differ, and samples be lost or seen twice; undo the change, or start a new run in "
        "another train.output"
    )


class EvaluationData:
    """The batches of held-out data for one pipeline: in order, every sample once."""

    def __init__(
        self, samples: StoredSamples, layout: BatchLayout, pipeline: int, batch: int, max_batches: int | None
    ) -> None:
        self._samples, self._layout, self._pipeline, self._batch = samples, layout, pipeline, batch
        self._starts = range(0, samples.num_rows, batch)[:max_batches]

    @property
    def is_packed(self) -> bool:
        """Whether some rows have several samples."""
        return self._layout.is_packed

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Batch]:
        num_rows = self._samples.num_rows
        for start in self._starts:
            end = min(start + self._batch, num_rows)
            yield build_batch(range(start, end), self._samples, self._layout, self._pipeline, end / num_rows)


def open_data(config: RunConfig, *, pipeline: int) -> TrainingData:
    """The training data of one pipeline, which `prepare` has written."""
    data, train = config.data, config.train
    identity: dict[str, Any] = {
        "data.kind": data.kind, "train.seed": train.seed, "data.sequence": data.sequence, "data.packing": data.packing,
        "data.shuffle": data.shuffle,
    }  # fmt: skip
    request = build_requests(config).get("data")
    samples: Samples
    if request is None:
        samples = SyntheticSamples(data.sequence, vocabulary_size(config), train.seed)
        identity["model.vocabulary"] = samples.vocabulary
    else:
        samples = open_samples(request)
        identity |= {"files": samples.info.source_digest, "tokens": samples.info.sample_digest}
    return TrainingData(
        samples, _make_layout(config, samples), pipeline, data.batch, seed=train.seed, shuffle=data.shuffle,
        epochs=train.epochs, identity=identity,
    )  # fmt: skip


def open_evaluation(config: RunConfig, *, pipeline: int) -> EvaluationData | None:
    """The held-out data of one pipeline; None if the run has none."""
    request = build_requests(config).get("evaluation")
    if request is None or config.evaluation is None:
        return None
    samples = open_samples(request)
    layout = _make_layout(config, samples)
    return EvaluationData(samples, layout, pipeline, config.data.batch, config.evaluation.batches)


def _make_layout(config: RunConfig, samples: Samples) -> BatchLayout:
    mesh, sequence = config.mesh, config.data.sequence
    multiple = mesh.tp if mesh.sequence_parallel else 1
    if sequence % multiple:
        raise ConfigError(f"data.sequence={sequence}: must be a multiple of mesh.tp={mesh.tp} (mesh.sequence_parallel)")
    is_packed = isinstance(samples, StoredSamples) and samples.info.is_packed
    engine = config.engine  # these gather weights, or reduce gradients, once per microbatch: all pipelines together
    is_even = engine.shards == "regather" or engine.gradients != "whole"
    return BatchLayout(mesh.num_pipelines, config.data.microbatch, sequence, is_packed, multiple, is_even)
