"""Prepares the data of a run on the first rank, while the others wait."""

from __future__ import annotations

from collections.abc import Callable

from zeropipe.engine.comm.collective import nothing, on_all_ranks, on_first_rank
from zeropipe.engine.comm.ranks import Ranks
from zeropipe.errors import EngineError
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.data import prepare
from zeropipe.train.data.cache import require_visible
from zeropipe.train.loop.metrics import log
from zeropipe.train.loop.output_lock import OutputLock
from zeropipe.train.loop.signals import StopSignals

PREPARING = "preparing the data"


def prepare_data(config: RunConfig, ranks: Ranks, signals: StopSignals, lock: OutputLock) -> None:
    """Return on all ranks when the output folder is locked and the data is there, or raise the first rank's error."""

    def work() -> None:
        lock.acquire(config.train.output)
        prepare(config, log, make_check(signals, ranks))

    ranks.enter(PREPARING, busy=True)
    on_first_rank(ranks, work, error=EngineError)
    on_all_ranks(ranks, lambda: require_visible(config), share=nothing, error=EngineError)


def make_check(signals: StopSignals, ranks: Ranks) -> Callable[[], None]:
    """For the first rank, every second: a signal stops the preparation, and the other ranks see progress."""

    def check() -> None:
        if signals.received:
            raise EngineError(f"{signals.received}: stopped while the data was prepared; there is nothing to save yet")
        ranks.status.enter(PREPARING, busy=True)

    return check
