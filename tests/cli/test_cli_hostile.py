"""The command line given what nobody should give it: one line, status 2, at once; nothing half-written."""

import json
import os
import subprocess
import sys

import pytest

import zeropipe as zp
from zeropipe.cli import main

SIZE = ["--ranks", "4", "--microbatches", "8"]
COSTS = ["simulate", "1f1b", *SIZE, "--costs"]
SHIFTED = zp.to_json(zp.simulate(zp.build("1f1b", ranks=1, microbatches=1))).replace("[1.0, 3.0]", "[1.0, 1e300]")


@pytest.mark.parametrize(
    "name, content, command, words",
    [
        ("dots.toml", ".".join(["a"] * 20_000) + " = 1", COSTS, "a key has more than 8 parts"),
        ("deep.toml", "f = " + "[" * 20_000, COSTS, "nested too deeply"),
        ("digits.toml", "f = " + "9" * 6_000, COSTS, "is too long: at most 400 digits"),
        ("hex.toml", "f = 0x" + "f" * 390, COSTS, ": must be 0, or from 1e-18"),
        ("deep.json", "[" * 100_000, COSTS, "nested too deeply"),
        ("deep.json", "[" * 100_000, ["check"], "nested too deeply"),
        (
            "deep.json",
            '{"f":' + "[" * 900 + "]" * 900 + "}",
            COSTS,
            "f=[[[[[[[...]]]]]]]: must be a non-negative number",
        ),
        ("digits.json", '{"f": ' + "9" * 6_000 + "}", COSTS, "is too long: at most 400 digits"),
        ("latin.csv", b"0F0,\xff\xfe", ["check"], "not text (byte 5 is not UTF-8)"),
        ("latin.toml", b"f = 1 # \xff", COSTS, "cannot read the costs file"),
        ("bytes.json", bytes(range(256)), ["check"], "not text"),
        ("cell.csv", "0F0," + "x" * 200_000, ["check"], "not a CSV"),
        ("late.json", SHIFTED, ["show"], "times must be at most 1e+15"),
        ("late.json", SHIFTED, COSTS, "times must be at most 1e+15"),
        ("edge.toml", '[edges."²-1"]\np2p = 1', COSTS, "edge '²-1': must be two different ranks"),
        ("folder.csv", None, ["check"], "Is a directory"),
        ("folder.toml", None, COSTS, "Is a directory"),
    ],
)
def test_a_file_of_a_stranger(name, content, command, words, tmp_path, capsys):
    file = tmp_path / name
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refused(capsys, [*command, str(file)], words)


@pytest.mark.parametrize(
    "args, words",
    [
        (["simulate", "1f1b", "-p", "4", "-m", "1000000000"], "8,000,000,000 actions, the command line takes up to"),
        (["show", "zbv", "-p", "100000", "-m", "4"], "ranks=100000: the command line takes up to 65,536"),
        (["simulate", "1f1b", "-p", "4", "-m", "9" * 6_000], "must be a positive integer"),
        (["simulate", "9" * 6_000, *SIZE], "unknown schedule '999"),
        (["simulate", "1f1b", *SIZE, "--f", "1e308", "--i", "1e308"], "f=1e+308: must be 0, or from"),
        (["simulate", "1f1b", *SIZE, "--f", "9" * 6_000], "f=inf: must be a non-negative number"),
        (["simulate", "1f1b", *SIZE, "--p2p", "nan"], "p2p=nan: must be a non-negative number"),
        (["simulate", "1f1b", *SIZE, "--inter-p2p", "1e200"], "inter_p2p=1e+200"),
        (["check", "a\0b.csv"], "embedded null byte"),
    ],
)
def test_a_flag_of_a_stranger(args, words, capsys):
    refused(capsys, args, words)


def refused(capsys, args, words):
    with pytest.raises(SystemExit) as stop:
        main(args)
    out, err = capsys.readouterr()
    assert stop.value.code == 2
    assert err.startswith("zeropipe: ")
    assert words in err
    assert err.count("\n") == 1
    assert len(err) < 1000
    assert out == ""


def test_a_csv_of_a_hundred_megabytes_is_counted_not_read(tmp_path, capsys):
    file = tmp_path / "huge.csv"
    file.write_bytes(b"," * (11 * 10**6))
    refused(capsys, ["check", str(file)], "it would have 11,000,001 actions, the command line takes up to 10,000,000")
    with file.open("wb") as out:
        out.truncate(2**30)  # a hole: it takes no room
    refused(capsys, ["check", str(file)], "has 1,024 MiB: the command line takes files up to 256 MiB")


def test_a_users_file_that_ends_python(tmp_path, capsys):
    file = tmp_path / "exit.py"
    file.write_text("import sys\nsys.exit(0)\n")
    refused(capsys, ["simulate", f"{file}:x", *SIZE], "exit.py does not run: SystemExit: 0")


def shell(command):
    """The command line in a process of its own, in a shell, with a terminal's width."""
    zeropipe = f'{sys.executable} -c "from zeropipe.cli import main; main()"'
    environment = {**os.environ, "COLUMNS": "80"}
    return subprocess.run(
        ["bash", "-c", command.replace("zeropipe", zeropipe)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_output_that_goes_nowhere():
    done = shell("zeropipe show zbv -p 4 -m 8 > /dev/full; echo $?; zeropipe list --json > /dev/full; echo $?")
    assert done.stdout.split() == ["2", "2"]
    assert done.stderr == "zeropipe: cannot write the output: No space left on device\n" * 2
    done = shell("zeropipe simulate 1f1b -p 4 -m 2000 --json | head -c 1; zeropipe list --json | head -c 1")
    assert (done.stdout, done.stderr) == ("{[", "")
    done = shell("zeropipe list >&-; echo $?; zeropipe show zbw -p 4 -m 8 2>&-; echo $?")
    assert (done.stdout.split(), done.stderr) == (["0", "2"], "")


def test_a_terminal_without_stars():
    done = shell("PYTHONIOENCODING=ascii zeropipe compare 1f1b zbv -p 4 -m 8")
    assert (done.returncode, done.stderr) == (0, "")
    assert "zbv ?" in done.stdout


def test_a_mistake_is_short_in_json_too(capsys):
    with pytest.raises(SystemExit):
        main(["simulate", "9" * 6_000, *SIZE, "--json"])
    assert len(json.loads(capsys.readouterr().out)["error"]) < 1000


@pytest.mark.parametrize(
    "args,words",
    [
        (("zbv", "--inter-p2p", "1"), "--inter-p2p is for links between machines: pass their ranks"),
        (("zbv", "--inter-bandwidth", "1"), "--inter-bandwidth is for links between machines"),
        (("zbv", "--bandwidth", "4"), "--bandwidth 4 has no effect on messages of size 0: pass --message N"),
        (
            ("zbv", "--memory-limit", "40GB"),
            "--memory-limit is in bytes, but memory of these costs is in activations: use",
        ),
        (("zbv", "--units", "4"), "units is set for unsharded stages: set shards='keep'"),
        (("zbv", "--shard-bandwidth", "4"), "shard_bandwidth is set for unsharded stages"),
        (("interleaved:v=2:v=4",), "v is given twice"),
        (("interleaved:v=2:stages_per_rank=4",), "v and stages_per_rank are the same; use one of them"),
        (("interleaved", "-O", "group_size=4", "-O", "group-size=8"), "group_size is given twice"),
    ],
)
def test_what_would_be_left_out_is_refused(capsys, args, words):
    refused(capsys, ["simulate", *args, "-p", "4", "-m", "8"], words)
