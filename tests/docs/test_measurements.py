"""docs/measurements.md: each measured figure has a date, and a script that exists and takes the options."""

import re

from paths import DOCS, ROOT

PAGE = (DOCS / "measurements.md").read_text()
COMMAND = re.compile(r"`python (bench/\w+\.py)([^`]*)`")
SECTIONS = PAGE.split("\n## ")[1:]


def test_commands_are_scripts_with_these_options():
    unknown = []
    for script, arguments in COMMAND.findall(PAGE):
        source = (ROOT / script).read_text()
        unknown += [f"{script} {flag}" for flag in re.findall(r"--[\w-]+", arguments) if f'"{flag}"' not in source]
    assert unknown == []


def test_each_section_has_a_date_and_a_command():
    without = [
        s.splitlines()[0] for s in SECTIONS if not re.search(r"^20\d\d-\d\d-\d\d\.", s, re.M) or not COMMAND.search(s)
    ]
    assert without == []
