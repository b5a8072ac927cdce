"""What is shown while a command works, and odd things it may be given."""

import io
import json
import sys
import time

import pytest

from zeropipe.cli import main
from zeropipe.cli import progress as shown


class Terminal(io.StringIO):
    def isatty(self):
        return True


def open_terminal(monkeypatch):
    """Not a fixture: pytest exchanges stderr between a fixture and its test."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def test_long_work_shows_its_pieces_and_leaves_nothing_behind(monkeypatch):
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(shown, "BAR_DELAY_S", 0.01)
    with shown.show_steps(2) as begin:
        for name in ("first", "[second]"):
            begin(name)
            until = time.monotonic() + 20
            while name not in terminal.getvalue():
                assert time.monotonic() < until
                time.sleep(0.01)
    text = terminal.getvalue()
    assert text.index("0%") < text.index("50%")
    assert text.endswith("\x1b[2K")  # the line is cleared


def test_short_work_shows_nothing(monkeypatch, capsys):
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(shown, "BAR_DELAY_S", 60.0)
    main(["compare", "all", "--ranks", "2", "--microbatches", "4", "--json"])
    assert len(json.loads(capsys.readouterr().out)["compared"]) == 18
    assert terminal.getvalue() == ""


def test_no_bar_outside_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(shown, "BAR_DELAY_S", 0.0)
    main(["simulate", "1f1b", "--ranks", "2", "--microbatches", "4"])
    assert capsys.readouterr().err == ""


def test_a_mistake_while_the_bar_is_there_is_still_one_line(monkeypatch):
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(shown, "BAR_DELAY_S", 60.0)
    with pytest.raises(SystemExit):
        main(["compare", "zbv", "zbw", "--ranks", "2", "--microbatches", "4"])
    assert terminal.getvalue().startswith("zeropipe: unknown schedule 'zbw'")


def test_work_that_takes_no_time_can_be_compared(capsys):
    main(["compare", "1f1b", "zbv", "--ranks", "2", "--microbatches", "4", "--f", "0", "--i", "0", "--w", "0"])
    assert "1f1b ★" in capsys.readouterr().out


def test_files_of_other_sizes_and_with_odd_names_can_be_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    small, large = tmp_path / "a[_b].csv", tmp_path / "[red].csv"
    small.write_text("0F0,0B0\n")
    large.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    main(["compare", str(small), str(large)])
    out = capsys.readouterr().out
    assert "a[_b] ★" in out
    assert "[red]" in out
    assert "2 ranks, 2 microbatches" in out
    main(["simulate", str(large)])
    assert capsys.readouterr().out.startswith("[red]: 2 ranks")


def test_every_command_speaks_json(monkeypatch, capsys):
    from zeropipe.cli.main import app

    for name, command in app.commands.items():
        for part in getattr(command, "commands", {name: command}).values():  # of a group each of its commands
            assert any("--json" in option.opts for option in part.params), f"{name} {part.name}"
    server = pytest.importorskip("uvicorn").Server
    monkeypatch.setattr(server, "run", lambda self, sockets: sockets[0].close())
    main(["app", "--no-browser", "--port", "0", "--json", "zbv"])
    assert json.loads(capsys.readouterr().out)["url"].endswith("/?schedules=zbv")
