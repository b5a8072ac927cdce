"""report.html of a run: recorded steps beside predicted ones, the loss, and what to change."""

from zeropipe.train.report.drift import Recorded
from zeropipe.train.report.write import write_report

__all__ = ["Recorded", "write_report"]
