"""The largest errors of a product of cases, printed at the end of the test run, also with several workers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

PROPERTY = "error"
Report = Callable[[str, float, str], None]  # the name of a number, its relative error, and what it is of


@pytest.fixture
def report_error(request: pytest.FixtureRequest) -> Report:
    """Note an error; the largest of each name is printed."""

    def report(name: str, error: float, case: str) -> None:
        request.node.user_properties.append((PROPERTY, (name, error, case)))

    return report


def print_worst(terminalreporter) -> None:
    found: dict[str, list[tuple[float, str]]] = {}
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        if getattr(report, "when", "") == "call":
            for key, value in report.user_properties:
                if key == PROPERTY:
                    name, error, case = value
                    found.setdefault(name, []).append((error, case))
    if found:
        terminalreporter.section("largest errors")
    for name, errors in sorted(found.items()):
        error, case = max(errors, key=lambda one: abs(one[0]))
        terminalreporter.write_line(f"{name}: {error:+.1%} of {len(errors)} ({case})")
