"""One batch after the other, from a position that can be saved."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, overload

import numpy as np

from zeropipe.errors import ConfigError
from zeropipe.train.config.models import RunConfig
from zeropipe.train.data.batch import Batch, Form, make_batch
from zeropipe.train.data.order import shuffled
from zeropipe.train.data.preparing import wait_for
from zeropipe.train.data.store import Samples, Stored, Synthetic
from zeropipe.train.data.wanted import vocabulary_of, wanted_of


class Data:
    """The batches of a run for one pipeline.

    Rows come epoch after epoch without a gap, so that only the last step of a run over `epochs` may be smaller. The
    position is a row of an epoch: whatever the number of pipelines or the size of a batch, the next row is the same.
    """

    def __init__(
        self,
        samples: Samples,
        form: Form,
        pipeline: int,
        batch: int,
        *,
        seed: int,
        shuffle: bool,
        epochs: float | None,
        identity: Mapping[str, Any],
    ) -> None:
        self._samples, self._form, self._pipeline, self._batch = samples, form, pipeline, batch
        self._seed, self._shuffle, self._epochs = seed, shuffle, epochs
        self._identity = dict(identity)
        rows = samples.num_rows
        self._end = None if epochs is None or rows is None else math.ceil(round(epochs * rows, 6))
        self._place = 0  # rows of all epochs that have been returned
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._ahead: Future[Batch] | None = None

    @property
    def is_packed(self) -> bool:
        """Whether rows have several samples."""
        return self._form.is_packed

    @property
    def steps_per_epoch(self) -> float:
        """How many batches a pass over the data has; infinite for synthetic data."""
        rows = self._samples.num_rows
        return math.inf if rows is None else rows / self._batch

    @property
    def steps_left(self) -> int | None:
        """How many batches there are until `train.epochs` passes are over; None: there is no end."""
        return None if self._end is None else max(0, -(-(self._end - self._place) // self._batch))

    def next(self) -> Batch:
        """The next batch. While it is used, a thread makes the one after it."""
        if self.steps_left == 0:
            raise ConfigError(f"train.epochs={self._epochs:g}: all passes over the data are done")
        ahead = self._ahead or self._thread.submit(self._make, self._place)
        self._ahead = None
        batch = ahead.result()
        self._place = self._after(self._place)
        if self.steps_left != 0:
            self._ahead = self._thread.submit(self._make, self._place)
        return batch

    def state(self) -> dict[str, Any]:
        """The position behind the batch that was returned last, and what it is a position of."""
        rows = self._samples.num_rows
        epoch, row = (0, self._place) if rows is None else divmod(self._place, rows)
        return {**self._identity, "epoch": epoch, "row": row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position. ConfigError if it is one of other data."""
        for name, value in self._identity.items():
            if state.get(name) != value:
                raise ConfigError(_changed(name, state.get(name), value))
        place = state["epoch"] * (self._samples.num_rows or 0) + state["row"]
        if self._ahead is not None:
            self._ahead.cancel()
        self._place, self._ahead = place, None

    def _after(self, place: int) -> int:
        return place + self._batch if self._end is None else min(place + self._batch, self._end)

    def _make(self, place: int) -> Batch:
        end, size = self._after(place), self._samples.num_rows
        rows = rows_at(np.arange(place, end, dtype=np.int64), size, self._seed, self._shuffle)
        return make_batch(rows, self._samples, self._form, self._pipeline, 0.0 if size is None else end / size)


def rows_at(places: np.ndarray, size: int | None, seed: int, shuffle: bool) -> list[int]:
    """The rows at some places of all epochs, each of `size` rows, behind each other."""
    if size is None:
        return places.tolist()
    rows = places % size
    if shuffle:
        for epoch in np.unique(places // size):
            own = places // size == epoch
            rows[own] = shuffled(rows[own], size, seed, int(epoch))
    return rows.tolist()


def _changed(name: str, before: Any, now: Any) -> str:
    """Why a position cannot be used."""
    ways = {
        "files": "the contents of data.path have changed since the checkpoint",
        "tokens": "the tokenizer or its chat template has changed since the checkpoint",
    }
    what = ways.get(name, f"{name}={now!r} was {before!r} when the checkpoint was saved")
    return (
        f"{what}: rows would be other ones, and samples lost or seen twice; undo that, or begin anew "
        "in another train.output"
    )


class Evaluation(Sequence[Batch]):
    """The batches of held-out data for one pipeline: in order, every sample once."""

    def __init__(self, samples: Stored, form: Form, pipeline: int, batch: int, most: int | None) -> None:
        self._samples, self._form, self._pipeline, self._batch = samples, form, pipeline, batch
        number = -(-samples.num_rows // batch)
        self._number = number if most is None else min(number, most)

    @property
    def is_packed(self) -> bool:
        """Whether rows have several samples."""
        return self._form.is_packed

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...

    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(self._number))]
        if not -self._number <= index < self._number:
            raise IndexError(index)
        start = index % self._number * self._batch
        end = min(start + self._batch, self._samples.num_rows)
        return make_batch(range(start, end), self._samples, self._form, self._pipeline, end / self._samples.num_rows)


def open_data(config: RunConfig, *, pipeline: int) -> Data:
    """The data of one pipeline, as soon as `prepare` has made it in some process."""
    data, train = config.data, config.train
    asked: dict[str, Any] = {
        "data.kind": data.kind, "train.seed": train.seed, "data.sequence": data.sequence, "data.packing": data.packing,
        "data.shuffle": data.shuffle,
    }  # fmt: skip
    wanted = wanted_of(config).get("data")
    samples: Samples
    if wanted is None:
        samples = Synthetic(data.sequence, vocabulary_of(config), train.seed)
        asked["model.vocabulary"] = samples.vocabulary
    else:
        samples = wait_for(wanted, config.engine.timeout)
        asked |= {"files": samples.facts.files, "tokens": samples.facts.tokens}
    form = _form(config, samples)
    return Data(
        samples, form, pipeline, data.batch, seed=train.seed, shuffle=data.shuffle, epochs=train.epochs, identity=asked
    )


def open_evaluation(config: RunConfig, *, pipeline: int) -> Evaluation | None:
    """The held-out data of one pipeline; None if there is none."""
    wanted = wanted_of(config).get("evaluation")
    if wanted is None or config.evaluation is None:
        return None
    samples = wait_for(wanted, config.engine.timeout)
    return Evaluation(samples, _form(config, samples), pipeline, config.data.batch, config.evaluation.batches)


def _form(config: RunConfig, samples: Samples) -> Form:
    """Rows of several samples are all as long as `sequence`; others are padded, with tokens shared over `tp` evenly."""
    mesh, sequence = config.mesh, config.data.sequence
    multiple = mesh.tp if mesh.sequence_parallel else 1
    if sequence % multiple:
        raise ConfigError(f"data.sequence={sequence}: with mesh.sequence_parallel mesh.tp={mesh.tp} must divide it")
    is_packed = isinstance(samples, Stored) and samples.facts.is_packed
    is_even = config.engine.shards == "regather"  # weights are gathered once per microbatch, by all pipelines at once
    return Form(mesh.num_pipelines, config.data.microbatch, sequence, is_packed, multiple, is_even)
