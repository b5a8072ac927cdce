"""Steps that were measured action by action, for the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zeropipe.core.timeline import Timeline
from zeropipe.errors import ZeropipeError
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.inputs import build_schedule, choose_layers, describe_origin
from zeropipe.train.loop.metrics import tell
from zeropipe.train.report import Recorded, write_report
from zeropipe.train.report.files import load, save
from zeropipe.train.report.words import setup_text

MOST = 200  # in memory: a longer run lets go of every other one of the older half


class Records:
    """The recorded steps of a run, those before a resume included; on the first rank."""

    def __init__(self, config: RunConfig, is_first: bool, start: int) -> None:
        self._config, self._is_first = config, is_first
        self._output = Path(config.train.output)
        self._recorded = load(self._output / "timelines", start) if is_first else []

    def add(self, step: int, timeline: Timeline, seconds: float) -> None:
        """A step that was recorded."""
        if self._is_first:
            known = replace(timeline, origin=describe_origin(self._config, timeline.schedule))
            self._recorded.append(Recorded(step, known, seconds, setup_text(self._config)))
            self._try(lambda: save(self._recorded[-1], self._output / "timelines"))
            self._recorded = thinned(self._recorded)
            self.write()

    def write(self) -> None:
        """The page of all of them."""
        if self._is_first and self._recorded:
            self._try(self._write)

    def _write(self) -> None:
        layers = choose_layers(self._config, build_schedule(self._config))
        write_report(self._config, self._recorded, self._output / "report.html", layers=layers)

    @staticmethod
    def _try(work: Callable[[], None]) -> None:
        """A full disk is no reason to end a run whose checkpoints are safe."""
        try:
            work()
        except (ZeropipeError, OSError) as error:
            tell(f"warning: no report: {error}")


def thinned(recorded: list[Recorded]) -> list[Recorded]:
    """The first one stays, and so does the newer half."""
    half = MOST // 2
    return recorded if len(recorded) <= MOST else [*recorded[:half:2], *recorded[half:]]
