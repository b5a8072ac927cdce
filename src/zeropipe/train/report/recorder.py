"""Collects the recorded steps of a run and keeps report.html up to date."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zeropipe.core.timeline import Timeline
from zeropipe.errors import ZeropipeError
from zeropipe.train.config.tables import RunConfig
from zeropipe.train.inputs import build_schedule, choose_layers, describe_origin
from zeropipe.train.report.page import describe_setup, write_report
from zeropipe.train.report.recorded_steps import RecordedStep, load_steps, save_step

MAX_KEPT = 200  # steps in memory


class Recorder:
    """The recorded steps of a run, with those before a resume. Only the first rank has any."""

    def __init__(self, config: RunConfig, is_first: bool, start: int, log: Callable[[str], None]) -> None:
        self._config, self._is_first, self._log = config, is_first, log
        self._output = Path(config.train.output)
        self._folder = self._output / "timelines"
        self._steps = load_steps(self._folder, start) if is_first else []

    def add(self, step: int, timeline: Timeline, seconds: float) -> None:
        """Add a recorded step, and write the report."""
        if self._is_first:
            timeline = replace(timeline, origin=describe_origin(self._config, timeline.schedule))
            recorded = RecordedStep(step, timeline, seconds, describe_setup(self._config))
            self._steps = thin_out([*self._steps, recorded])
            self._try(lambda: save_step(recorded, self._folder))
            self.write()

    def write(self) -> None:
        """Write the report of all recorded steps, if there are any."""
        if self._steps:
            self._try(self._write)

    def _write(self) -> None:
        layers = choose_layers(self._config, build_schedule(self._config))
        write_report(self._config, self._steps, self._output / "report.html", layers=layers)

    def _try(self, work: Callable[[], None]) -> None:
        """Log an error, for example of a full disk, and let the run continue."""
        try:
            work()
        except (ZeropipeError, OSError) as error:
            self._log(f"warning: report not written: {error}")


def thin_out(steps: list[RecordedStep]) -> list[RecordedStep]:
    """Drop every other step of the older half, but not the first, if there are more than MAX_KEPT."""
    half = MAX_KEPT // 2
    return steps if len(steps) <= MAX_KEPT else [*steps[:half:2], *steps[half:]]
