"""CPU time of tests with all processes that they start: `pytest --cpu-times` prints it for each file.

Wall time depends on what else a machine does, CPU time hardly does: the budget of a file (CONTRIBUTING.md) is CPU time.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import fork_server
import pytest

PROPERTY = "cpu_seconds"
TICKS = os.sysconf("SC_CLK_TCK")


class CpuTimes:
    """A plugin: workers add the CPU time of each test to its last report, the first process adds them up."""

    def __init__(self) -> None:
        self._forks: dict[int, float] = {}  # CPU seconds by process id; forks are children of the fork server
        self._last = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if not self._last:
            self._last = self._seconds()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            now = self._seconds()
            report.user_properties.append((PROPERTY, now - self._last))
            self._last = now
        return report

    def pytest_terminal_summary(self, terminalreporter) -> None:
        files, tests = defaultdict(float), {}
        for report in (report for reports in terminalreporter.stats.values() for report in reports):
            seconds = dict(getattr(report, "user_properties", ())).get(PROPERTY)
            if seconds is not None and report.when == "teardown":
                files[report.nodeid.partition("::")[0]] += seconds
                tests[report.nodeid] = seconds
        for title, table in {"file": files, "test": tests}.items():
            terminalreporter.section(f"CPU seconds by {title}: {sum(table.values()):.1f}")
            for name, seconds in sorted(table.items(), key=lambda row: -row[1]):
                if seconds >= 0.5:
                    terminalreporter.write_line(f"{seconds:8.1f} {name}")

    def _seconds(self) -> float:
        """Of this process, its forks, and all that they have started."""
        self._forks.update(dict.fromkeys(fork_server.STARTED - self._forks.keys(), 0.0))
        processes = dict(_read_processes())
        children = defaultdict(list)
        for pid, (parent, _) in processes.items():
            children[parent].append(pid)

        def tree(pid: int) -> float:
            return processes[pid][1] + sum(map(tree, children[pid]))

        self._forks.update({pid: tree(pid) for pid in self._forks if pid in processes})
        return tree(os.getpid()) + sum(self._forks.values())


def _read_processes() -> Iterator[tuple[int, tuple[int, float]]]:
    """Process id, parent, and CPU seconds with those of children that have ended."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        yield int(folder.name), (int(fields[1]), sum(map(int, fields[11:15])) / TICKS)
