"""The command line as a person and as a program meets it."""

import json
import os
import subprocess
import sys

import pytest

import zeropipe as zp
from zeropipe.cli import main

SIZE = ["--ranks", "4", "--microbatches", "8"]


@pytest.fixture
def run(capsys, monkeypatch):
    """run("list") -> (status, stdout, stderr)"""
    monkeypatch.setenv("COLUMNS", "120")

    def call(*args):
        status = 0
        try:
            main(list(args))
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_list_names_every_schedule(run):
    _, out, _ = run("list")
    assert all(name in out for name in zp.names())
    entries = json.loads(run("list", "--json")[1])
    assert [e["name"] for e in entries] == zp.names()
    assert all(e["summary"] and e["placement"] and e["stages_per_rank"] for e in entries)


def test_the_sixteen_names_and_torchs_names():
    assert set(zp.names()) >= {
        "gpipe", "1f1b", "interleaved", "looped-bfs", "1f1b-overlap", "interleaved-overlap", "zb-h1", "zb-h2",
        "interleaved-zb", "zbv", "v-half", "v-min", "dualpipe", "dualpipev", "chimera", "hanayo",
    }  # fmt: skip
    for alias, name in {
        "ZBVZeroBubble": "zbv", "DualPipeV": "dualpipev", "Interleaved1F1B": "interleaved", "GPipe": "gpipe",
        "InterleavedZeroBubble": "interleaved-zb", "1F1B": "1f1b", "LoopedBFS": "looped-bfs", "zb1p": "zb-h1",
    }.items():  # fmt: skip
        assert zp.build(alias, ranks=2, microbatches=4).name == name


def test_simulate(run):
    _, out, _ = run("simulate", "zbv", *SIZE, "--f", "1", "--i", "1", "--w", "1", "--p2p", "0.1")
    timeline = zp.simulate(zp.build("zbv", ranks=4, microbatches=8), zp.Costs(f=1, i=1, w=1, p2p=0.1))
    assert f"{timeline.makespan:.4g}" in out
    data = json.loads(run("simulate", "zbv", *SIZE, "--p2p", "0.1", "--json")[1])
    assert data["makespan"] == timeline.makespan
    assert data["bubble"] == timeline.bubble
    assert len(data["idle"]) == len(data["peak_memory"]) == 4
    assert data["critical_path"][-1]["end"] == pytest.approx(timeline.makespan)


def test_per_stage_costs_from_flags_and_file(run, tmp_path):
    file = tmp_path / "costs.toml"
    file.write_text("f = [1, 1, 1, 3]\nb = 2\n")
    by_file = json.loads(run("simulate", "1f1b", *SIZE, "--costs", str(file), "--json")[1])
    by_flag = json.loads(run("simulate", "1f1b", *SIZE, "--f", "1,1,1,3", "--b", "2", "--json")[1])
    assert by_file["makespan"] == by_flag["makespan"] > 33
    over = json.loads(run("simulate", "1f1b", *SIZE, "--costs", str(file), "--f", "1", "--json")[1])
    assert over["makespan"] == 33


def test_compare_marks_the_best_and_says_what_was_adjusted(run):
    _, out, _ = run("compare", "1f1b", "zbv", "dualpipev", "--ranks", "8", "--microbatches", "32")
    assert "★" in out
    assert "2 stages per rank, costs shared out" in out
    data = json.loads(run("compare", "1f1b", "zbv", "--ranks", "8", "--microbatches", "32", "--json")[1])
    assert [t["schedule"] for t in data["compared"]] == ["1f1b", "zbv"]
    assert [sum(t["busy"]) for t in data["compared"]] == [pytest.approx(8 * 32 * 3)] * 2


def test_compare_all_says_what_it_left_out(run):
    data = json.loads(run("compare", "all", "--ranks", "3", "--microbatches", "3", "--json")[1])
    assert {r["schedule"] for r in data["refused"]} >= {"dualpipe"}
    assert {t["schedule"] for t in data["compared"]} >= {"1f1b", "zbv"}


def test_compare_all_beside_a_file(run, tmp_path):
    file, picture = tmp_path / "mine.csv", tmp_path / "x.svg"
    file.write_text(zp.to_csv(zp.build("1f1b", ranks=4, microbatches=8)))
    data = json.loads(run("compare", str(file), "all", "zbv", *SIZE, "--json")[1])
    names = [t["schedule"] for t in data["compared"]]
    assert sorted(names) == sorted(["mine", *zp.names()])
    assert (names[0], names[-1]) == ("mine", "zbv")
    assert f"wrote {picture} (" in run("compare", "1f1b", "zbv", *SIZE, "-o", str(picture))[1]


def test_names_stay_whole_in_a_narrow_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run("compare", "all", *SIZE)
    assert "interleaved-overlap " in out
    assert "zbv ★" in out


@pytest.mark.parametrize("comms", [(), ("--comms",)])
def test_draw_then_check_a_csv(run, tmp_path, comms):
    file = str(tmp_path / "x.csv")
    assert run("draw", "zbv", *SIZE, "-o", file, *comms)[0] == 0
    status, out, _ = run("check", file)
    assert status == 0
    assert "8 stages (vee), 8 microbatches: 192 actions" in out
    assert json.loads(run("check", file, "--json")[1])["ok"] is True


def test_draw_then_check_a_json(run, tmp_path):
    file = str(tmp_path / "x.json")
    run("draw", "dualpipe", *SIZE, "-o", file)
    assert json.loads(run("check", file, "--json")[1])["placement"] == "mirror"
    assert json.loads(run("simulate", file, "--json")[1])["num_microbatches"] == 8
    for costs in ([], ["--f", "2"]):  # a timeline is shown as it is, unless costs are given
        shown = zp.from_json(run("show", file, "--json", *costs)[1])
        assert shown.makespan == zp.simulate(shown.schedule, zp.Costs(f=2 if costs else 1)).makespan
    assert "ranks=7" in run("show", file, "-p", "7")[2]


def test_show_fits_the_width_and_has_no_colour_when_asked(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setenv("NO_COLOR", "1")
    _, out, _ = run("show", "zbv", "--ranks", "4", "--microbatches", "64")
    assert max(len(line) for line in out.splitlines()) <= 72
    assert "\x1b" not in out


def test_a_users_own_file(run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import zeropipe as zp\n"
        "@zp.register('mine-cli', placement=zp.linear)\n"
        "def my_schedule(lane, rank, p):\n"
        "    '''Mine.'''\n"
        "    lane.f(rank, times=p.num_microbatches)\n"
        "    lane.b(rank, times=p.num_microbatches)\n"
    )
    data = json.loads(run("simulate", f"{file}:my_schedule", *SIZE, "--json")[1])
    gpipe = json.loads(run("simulate", "gpipe", *SIZE, "--json")[1])
    assert data["makespan"] == gpipe["makespan"]
    assert "registers no schedule 'other'" in run("simulate", f"{file}:other", *SIZE)[2]
    file2 = tmp_path / "broken.py"
    file2.write_text("1/0\n")
    assert "broken.py does not run: ZeroDivisionError" in run("simulate", f"{file2}:x", *SIZE)[2]


@pytest.mark.parametrize(
    "args,words",
    [
        (["simulate", "zbw", *SIZE], "unknown schedule 'zbw': did you mean zbv"),
        (["simulate", "zbv"], "ranks is missing"),
        (["simulate", "zbv", "--ranks", "0", "--microbatches", "1"], "ranks=0: a whole number from 1 on"),
        (["simulate", "zbv", "--ranks", "four"], "'four' is not a valid integer"),
        (["simulate", "zbv", *SIZE, "--f", "fast"], "--f 'fast': write a number"),
        (["simulate", "zbv", *SIZE, "--f", "1,2"], "f has 2 entries, the schedule has 8 stages"),
        (["simulate", "zbv", *SIZE, "--f", "-1"], "f=-1.0: a number from 0 on"),
        (["simulate", "zbv", *SIZE, "-v", "3"], "zbv needs 2 stages per rank"),
        (["simulate", "1f1b", *SIZE, "-O", "group_size=2"], "1f1b has no option 'group_size'"),
        (["simulate", "1f1b", *SIZE, "-O", "group_size"], "write it as name=value"),
        (["simulate", "1f1b", *SIZE, "--costs", "no.toml"], "cannot read the costs file no.toml"),
        (["simulate", "no.csv"], "cannot read no.csv"),
        (["simulate", "no.py:x", *SIZE], "cannot read no.py"),
        (["simulate", "no.py", *SIZE], "names a file but no schedule"),
        (["check", "README.md"], "give a .csv or .json file"),
        (["draw", "1f1b", *SIZE, "-o", "/no/such/dir/x.csv"], "cannot write /no/such/dir/x.csv"),
        (["draw", "1f1b", *SIZE, "-o", "x.bmp"], "x.bmp"),
        (["draw", "1f1b", *SIZE, "-o", "."], "cannot draw '.'"),
        (["draw", "1f1b", *SIZE, "-o", "x.svg", "--comms"], "--comms is for .csv files"),
        (["draw", "1f1b", *SIZE, "-o", "x.csv", "--theme", "dark"], "--theme is for pictures"),
        (["compare", "1f1b", "zbv", *SIZE, "-o", "x.csv"], "cannot draw 'x.csv'"),
        (["compare", "all", "dualpipe", "-p", "3", "-m", "8"], "dualpipe needs an even number of ranks"),
        (["paint"], "No such command 'paint'"),
        (["compare", *SIZE], "Missing argument 'SCHEDULES"),
    ],
)
def test_a_mistake_gets_one_line_and_status_2(run, args, words):
    status, out, err = run(*args)
    assert status == 2
    assert words in err
    assert err.startswith("zeropipe: ")
    assert err.count("\n") == 1
    assert out == ""


def test_a_mistake_is_json_where_asked(run):
    status, out, _ = run("simulate", "zbw", *SIZE, "--json")
    assert status == 2
    assert "unknown schedule" in json.loads(out)["error"]


def test_a_stuck_file_shows_where(run, tmp_path):
    file = tmp_path / "stuck.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    status, _, err = run("check", str(file))
    assert status == 2
    assert "rank 1 waits at step 0: 1F1 needs 0F1" in err


def test_the_base_needs_no_extra_and_no_torch(tmp_path):
    """Every extra is blocked: the commands of the base package still work."""
    for extra in ("torch", "transformers", "fastapi", "pydantic", "matplotlib", "uvicorn", "ortools", "numba"):
        (tmp_path / f"{extra}.py").write_text("raise ImportError('blocked')\n")
    code = (
        "from zeropipe.cli import main\n"
        "main(['list'])\n"
        "main(['simulate', 'zbv', '--ranks', '4', '--microbatches', '8'])\n"
        "main(['show', 'zbv', '--ranks', '4', '--microbatches', '8'])\n"
        "import sys; assert not {'torch', 'numba', 'matplotlib'} & set(sys.modules)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_weights_in_parts(run, tmp_path):
    """A recorded timeline brings its own costs, as the schedule and as the costs file."""
    costs = ("--i", "1.2", "--w", "0.7", "--stash", "0.5", "--memory-limit", "6")
    whole = json.loads(run("simulate", "v-half", *SIZE, *costs, "--json")[1])
    parts = json.loads(run("simulate", "v-half", *SIZE, *costs, "--json", "--weight-parts", "4")[1])
    assert parts["makespan"] < whole["makespan"]
    assert parts["num_weight_parts"] == 4
    file = tmp_path / "recorded.json"
    file.write_text(zp.to_json(zp.simulate(zp.build("v-half", ranks=4, microbatches=8), zp.Costs(f=3, i=3.6, w=2.1))))
    for command in (("simulate", str(file)), ("simulate", "v-half", *SIZE, "--costs", str(file))):
        data = json.loads(run(*command, "--json", "--weight-parts", "4")[1])
        assert data["makespan"] == pytest.approx(3 * json.loads(run(*filled(), "--json")[1])["makespan"])
    assert "W in 4 parts" in run("show", str(file), "--weight-parts", "4")[1]
    assert "W in 4 parts" in run("compare", "zbv", *SIZE, "--weight-parts", "4")[1]
    assert run("simulate", "zbv", *SIZE, "--weight-parts", "65")[0] == 2


def filled():
    return ("simulate", "v-half", *SIZE, "--i", "1.2", "--w", "0.7", "--weight-parts", "4")
