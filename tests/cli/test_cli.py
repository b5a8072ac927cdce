"""The command line as a person and as a program meets it."""

import json
import os
import subprocess
import sys

import pytest

import zeropipe as zp
from zeropipe.cli.main import app

SIZE = ["--ranks", "4", "--microbatches", "8"]
MINE = """
import zeropipe as zp
@zp.register("mine-cli", placement=zp.linear)
def my_schedule(lane, rank, p):
    lane.f(rank, times=p.num_microbatches)
    lane.b(rank, times=p.num_microbatches)
"""


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
    timeline = zp.simulate(zp.build("zbv", ranks=4, microbatches=8), zp.Costs(f=0.5, i=0.5, w=0.5, p2p=0.1))
    assert f"{timeline.makespan:.4g}" in out
    data = json.loads(run("simulate", "zbv", *SIZE, "--p2p", "0.1", "--json")[1])
    assert data["makespan"] == timeline.makespan
    assert data["bubble"] == timeline.bubble
    assert data["bubble_to_ideal"] == timeline.bubble_to_ideal
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
    assert "8 ranks, 32 microbatches; costs per rank, divided among its stages" in out
    data = json.loads(run("compare", "1f1b", "zbv", "--ranks", "8", "--microbatches", "32", "--json")[1])
    assert [t["schedule"] for t in data["compared"]] == ["1f1b", "zbv"]
    assert [sum(t["busy"]) for t in data["compared"]] == [pytest.approx(8 * 32 * 3)] * 2


def test_costs_are_per_rank_everywhere_unless_per_stage(run, tmp_path):
    """One convention: what `compare` says of a schedule is what `simulate`, `show` and `draw` say of it."""
    file = tmp_path / "costs.toml"
    file.write_text("f = 1\ni = 1.2\nw = 0.8\nactivation = 2\n")
    costs = (*SIZE, "--costs", str(file))
    for more, stage in (((), zp.Costs(f=0.5, i=0.6, w=0.4, activation=1)), (("--per", "stage"), None)):
        stage = stage or zp.Costs(f=1, i=1.2, w=0.8, activation=2)
        want = zp.simulate(zp.build("zbv", ranks=4, microbatches=8), stage)
        simulated = json.loads(run("simulate", "zbv", *costs, *more, "--json")[1])
        compared = json.loads(run("compare", "zbv", *costs, *more, "--json")[1])["compared"][0]
        shown = zp.from_json(run("show", "zbv", *costs, *more, "--json")[1])
        run("draw", "zbv", *costs, *more, "-o", str(tmp_path / "x.json"))
        drawn = zp.from_json((tmp_path / "x.json").read_text())
        figures = {(t["makespan"], max(t["peak_memory"])) for t in (simulated, compared)}
        figures |= {(t.makespan, max(t.peak_memory)) for t in (shown, drawn)}
        assert figures == {(want.makespan, max(want.peak_memory))}
        assert simulated["costs_per"] == (more[1] if more else "rank")
        for command in (("simulate",), ("show",), ("compare",), ("draw", "-o", str(tmp_path / "x.svg"))):
            words = "costs per stage" if more else "costs per rank, divided among its stages"
            assert words in run(command[0], "zbv", *command[1:], *costs, *more)[1], command


def test_a_list_has_an_entry_per_rank_or_per_stage(run):
    """Parts of the model in order: the V's second way gets the model's second half."""
    by_rank = json.loads(run("simulate", "zbv", *SIZE, "--f", "1,1,1,3", "--json")[1])
    by_stage = json.loads(run("simulate", "zbv", *SIZE, "--f", ".5,.5,.5,.5,.5,.5,1.5,1.5", "--json")[1])
    assert by_rank["makespan"] == by_stage["makespan"]
    assert by_rank["busy"] == by_stage["busy"]
    some = json.loads(run("simulate", "zbv", *SIZE, "--f", "3=3", "--json")[1])
    assert some["makespan"] == by_rank["makespan"]
    others = json.loads(run("simulate", "zbv", *SIZE, "--f", "0=1,default=3", "--json")[1])
    assert others["makespan"] == json.loads(run("simulate", "zbv", *SIZE, "--f", "1,3,3,3", "--json")[1])["makespan"]


def test_the_star_keeps_the_memory_limit(run):
    args = ("compare", "zbv", "v-half", "v-min", "-p", "8", "-m", "32")
    assert "zbv ★" in run(*args)[1]
    out = run(*args, "--memory-limit", "6")[1]
    assert "v-half ★" in out
    assert "8 over" in out
    data = json.loads(run(*args, "--memory-limit", "6", "--json")[1])["compared"]
    assert [t["best_time"] for t in data] == [False, True, False]
    assert [t["fits"] for t in data] == [False, True, True]
    out = run(*args, "--memory-limit", "2")[1]
    assert "★" not in out
    assert "none fits the memory limit 2; 4 is enough for: v-min" in out


def test_a_sweep_has_a_table_and_a_star_per_size(run, tmp_path):
    picture = tmp_path / "x.svg"
    _, out, _ = run("compare", "1f1b", "zbv", "-p", "2,4", "-m", "4,8", "-o", str(picture))
    headings = [line for line in out.splitlines() if "; costs per rank" in line]
    sizes = [(p, m) for p in (2, 4) for m in (4, 8)]
    assert [h.split(";")[0] for h in headings] == [f"{p} ranks, {m} microbatches" for p, m in sizes]
    assert out.count("zbv ★") == 4
    assert "zbv, 4 ranks, 8 microbatches" in picture.read_text()
    data = json.loads(run("compare", "1f1b", "zbv", "-p", "2,4", "-m", "4,8", "--json")[1])["compared"]
    assert [(t["num_ranks"], t["num_microbatches"]) for t in data[::2]] == sizes
    assert all(t["best_time"] == (t["schedule"] == "zbv") for t in data)


def test_a_grid_has_one_number_of_all_schedules_and_sizes(run):
    sizes = ("-p", "2,4", "-m", "4,8")
    _, out, _ = run("compare", "1f1b", "zbv", "dualpipe", *sizes, "--grid", "makespan", "--memory-limit", "3")
    compared = json.loads(run("compare", "1f1b", "zbv", "dualpipe", *sizes, "--memory-limit", "3", "--json")[1])[
        "compared"
    ]
    table = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.strip().startswith(("1f1b", "zbv"))}
    for name, cells in table.items():
        ours = [one for one in compared if one["schedule"] == name]
        words = [(f"{one['makespan']:g}", "★" * one["best_time"] + "over" * (not one["fits"])) for one in ours]
        assert cells == [word for pair in words for word in pair if word]
    assert out.count("schedule") == 1
    assert "left out: dualpipe at 4 ranks, 4 microbatches" in " ".join(out.split())


def test_stages_per_rank_are_swept_where_a_schedule_has_them(run):
    data = json.loads(run("compare", "1f1b", "interleaved", "zbv", *SIZE, "-v", "1,2,4", "--json")[1])["compared"]
    assert [(t["title"], t["num_stages"]) for t in data] == [
        ("1f1b", 4), ("interleaved:v=1", 4), ("interleaved:v=2", 8), ("interleaved:v=4", 16), ("zbv", 8),
    ]  # fmt: skip


def test_variants_have_settings_of_their_own(run):
    variants = ("interleaved", "interleaved:v=4", "interleaved:v=2:group_size=8", "Interleaved1F1B:v=3")
    data = json.loads(run("compare", *variants, *SIZE, "--json")[1])["compared"]
    assert [t["num_stages"] for t in data] == [8, 16, 8, 12]
    assert data[1]["title"] == "interleaved:v=4"
    assert data[2]["peak_memory"] != data[0]["peak_memory"]
    alone = json.loads(run("simulate", "interleaved:v=4", *SIZE, "--json")[1])
    assert alone["makespan"] == data[1]["makespan"]


def test_an_option_that_some_do_not_have(run):
    args = ("compare", "1f1b", "interleaved", "zbv", *SIZE, "-O", "group_size=8")
    _, out, _ = run(*args)
    assert "--option group_size is not an option of 1f1b, zbv: ignored there" in out
    data = json.loads(run(*args, "--json")[1])
    assert data["ignored_options"] == {"group_size": ["1f1b", "zbv"]}
    alone = json.loads(run("simulate", "interleaved:group_size=8", *SIZE, "--json")[1])
    assert data["compared"][1]["peak_memory"] == alone["peak_memory"]


def test_a_size_that_one_schedule_cannot_have_is_left_out_of_a_sweep(run):
    data = json.loads(run("compare", "1f1b", "dualpipe", "-p", "4", "-m", "2,16", "--json")[1])
    assert [t["title"] for t in data["compared"]] == ["1f1b", "1f1b", "dualpipe"]
    assert data["refused"][0]["schedule"] == "dualpipe at 4 ranks, 2 microbatches"


def test_fewer_microbatches_than_stages_are_warned_of(run):
    for command in ("simulate", "show", "check"):
        assert "warning: 3 microbatches for 4 stages" in run(command, "1f1b", "-p", "4", "-m", "3")[1]
        assert "warning" not in run(command, "1f1b", *SIZE)[1]
    assert "so ranks may be idle: 1f1b, zbv" in run("compare", "1f1b", "zbv", "-p", "4", "-m", "3")[1]
    assert json.loads(run("simulate", "1f1b", "-p", "4", "-m", "3", "--json")[1])["warnings"]


def test_many_ranks_are_not_all_printed(run):
    _, out, _ = run("simulate", "1f1b", "-p", "100", "-m", "2")
    assert "ranks 32 to 67 are not shown: --json has all" in out
    assert len(out.splitlines()) < 80
    assert len(json.loads(run("simulate", "1f1b", "-p", "100", "-m", "2", "--json")[1])["idle"]) == 100


def test_every_line_fits_a_narrow_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("--help", *(f"{name} --help" for name in app.commands)):
        assert max(map(len, run(*command.split())[1].splitlines())) <= 80, command
    units = ("--f", "1e-3", "--activation", "3e9", "--memory-limit", "1e10")
    for args in (("list",), ("compare", "all", *SIZE, *units), ("simulate", "zbv", *SIZE, *units)):
        lines = run(*args)[1].splitlines()
        assert max(map(len, lines)) <= 80, args
    assert "interleaved-overlap  " in run("compare", "all", *SIZE, *units)[1]


def test_cells_are_not_folded_in_a_file(run, monkeypatch):
    """A file or a pipe has no width: a row is a line there, for grep and for people."""
    args = ("plan", "qwen3-8b", "--gpus", 8, "--batch", 64, "--tp", 1, "--microbatch", 1, "--ac", "selective:op")
    monkeypatch.delenv("COLUMNS")
    out = run(*args, "--ranks", 2, "--schedules", "interleaved-zb", "--workers", 1)[1]
    row = next(line for line in out.splitlines() if line.startswith(" 1*"))
    cells = ("2x4x1", "interleaved-zb:v=", "16x1", "selective:op")
    assert all(cell in row for cell in cells), out
    assert len(row.split()) == 13, row


def test_compare_all_says_what_it_left_out(run):
    data = json.loads(run("compare", "all", "--ranks", "3", "--microbatches", "3", "--json")[1])
    assert {r["schedule"] for r in data["refused"]} >= {"dualpipe"}
    assert {t["schedule"] for t in data["compared"]} >= {"1f1b", "zbv"}


def test_compare_says_that_a_file_has_its_own_size(run, tmp_path):
    file = tmp_path / "mine.csv"
    file.write_text(zp.to_csv(zp.build("1f1b", ranks=4, microbatches=8)))
    note = "mine.csv has its own size, 4 ranks, 8 microbatches, and no other"
    for microbatches, is_said in (("4,16", True), ("8,16", False)):
        out = run("compare", str(file), "zbv", "--ranks", "4", "--microbatches", microbatches)[1]
        assert (note in " ".join(out.split())) == is_said


def test_compare_all_beside_a_file(run, tmp_path):
    file, picture = tmp_path / "mine.csv", tmp_path / "x.svg"
    file.write_text(zp.to_csv(zp.build("1f1b", ranks=4, microbatches=8)))
    data = json.loads(run("compare", str(file), "all", "zbv", *SIZE, "--json")[1])
    names = [t["schedule"] for t in data["compared"]]
    assert sorted(names) == sorted(["mine", *zp.names()])
    assert (names[0], names[-1]) == ("mine", "zbv")
    assert f"wrote {picture} (" in run("compare", "1f1b", "zbv", *SIZE, "-o", str(picture))[1]
    timed = tmp_path / "found.json"
    timed.write_text(zp.to_json(zp.simulate(zp.build("1f1b", ranks=4, microbatches=8), zp.Costs(f=3))))
    assert "are not used: --costs" in " ".join(run("compare", str(timed), "zbv", *SIZE)[1].split())
    assert "are not used" not in run("compare", str(timed), "zbv", *SIZE, "--costs", str(timed))[1]
    data = json.loads(run("compare", str(timed), "1f1b", "zbv", *SIZE, "--json")[1])
    assert [t["title"] for t in data["compared"]] == [str(timed), "1f1b", "zbv"]  # both are 1f1b


def test_names_stay_whole_in_a_narrow_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run("compare", "all", *SIZE)
    assert "interleaved-overlap " in out
    assert "zbv ★" in out


def test_a_picture_has_all_of_pythons_options(run, tmp_path):
    looks = (
        "--width",
        "300",
        "--theme",
        "dark",
        "--labels",
        "action",
        "--memory-curves",
        "--no-legend",
        "--no-facts",
        "--title",
        "Mine",
    )
    ours, pythons = tmp_path / "a.svg", tmp_path / "b.svg"
    run("draw", "1f1b", *SIZE, "-o", str(ours), *looks)
    timeline = zp.simulate(zp.build("1f1b", ranks=4, microbatches=8))
    options = {"width": 300.0, "theme": "dark", "labels": "action", "memory": True, "title": "Mine"}
    options |= {"legend": False, "facts": False}
    zp.draw(timeline, pythons, **options)
    assert ours.read_text() == pythons.read_text()
    assert run("compare", "1f1b", *SIZE, "-o", str(ours), *looks, "--dpi", "100")[2].startswith("zeropipe: .svg has no")
    run("compare", "1f1b", *SIZE, "-o", str(ours), *looks)
    assert ours.read_text() == pythons.read_text()


def test_check_takes_all_that_names_a_schedule(run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    for spec in ("zbv", "interleaved:v=4", f"{file}:my_schedule"):
        status, out, _ = run("check", spec, *SIZE)
        assert status == 0
        assert f"{spec}: ok. 4 ranks" in out
    assert "ranks is missing" in run("check", f"{file}:my_schedule")[2]


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
    # a timeline is shown as it is, or with its own costs but for those given
    recorded = zp.simulate(zp.build("dualpipe", ranks=4, microbatches=8))
    assert zp.from_json(run("show", file, "--json")[1]).makespan == recorded.makespan
    with open(file, "w") as out:
        out.write(zp.to_json(zp.simulate(recorded.schedule, zp.Costs(f=3, i=4, w=5))))
    shown = zp.from_json(run("show", file, "--json", "--p2p", "0.5")[1])
    assert shown.makespan == pytest.approx(zp.simulate(shown.schedule, zp.Costs(f=3, i=4, w=5, p2p=0.5)).makespan)
    limited = json.loads(run("simulate", file, "--memory-limit", "2", "--json")[1])
    assert (limited["memory_limit"], limited["costs_per"]) == (2, "recording")
    assert limited["makespan"] == pytest.approx(zp.simulate(shown.schedule, zp.Costs(f=3, i=4, w=5)).makespan)
    assert "ranks=7" in run("show", file, "-p", "7")[2]


def test_show_fits_the_width_and_has_no_colour_when_asked(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setenv("NO_COLOR", "1")
    _, out, _ = run("show", "zbv", "--ranks", "4", "--microbatches", "64")
    assert max(len(line) for line in out.splitlines()) <= 72
    assert "\x1b" not in out


def test_a_users_own_file(run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
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
        (["simulate", "zbv", "--ranks", "0", "--microbatches", "1"], "ranks=0: must be a positive integer"),
        (["simulate", "zbv", "--ranks", "four"], "ranks='four': must be a positive integer"),
        (["simulate", "zbv", *SIZE, "--f", "fast"], "--f 'fast': write a number"),
        (
            ["simulate", "zbv", *SIZE, "--f", "1,2"],
            "f has 2 entries, which 8 stages on 4 ranks cannot share: must be 1, 4",
        ),
        (["simulate", "zbv", *SIZE, "--f", "0="], "--f '0=': write a number, several like 1,1,2, or some like 0=0.8"),
        (["simulate", "zbv", *SIZE, "--f", "9=1"], "f has stage 9: stages are 0 to 3"),
        (["simulate", "zbv", *SIZE, "--f", "a=1"], "'a' must be the number of a stage"),
        (["simulate", "zbv", *SIZE, "--f", "-1"], "f=-1.0: must be a non-negative number"),
        (["simulate", "zbv", *SIZE, "-v", "3"], "zbv needs 2 stages per rank"),
        (["simulate", "1f1b", *SIZE, "-O", "group_size=2"], "1f1b has no option 'group_size'"),
        (["simulate", "1f1b", *SIZE, "-O", "group_size"], "must be name=value"),
        (["simulate", "1f1b", *SIZE, "--costs", "no.toml"], "cannot read the costs file no.toml"),
        (["simulate", "no.csv"], "cannot read no.csv"),
        (["simulate", "no.py:x", *SIZE], "cannot read no.py"),
        (["simulate", "no.py", *SIZE], "names a file but no schedule"),
        (["check", "README.md"], "'README.md' is a file of no known kind: one with a schedule is named .csv or .json"),
        (["draw", "1f1b", *SIZE, "-o", "/no/such/dir/x.csv"], "cannot write /no/such/dir/x.csv"),
        (["draw", "1f1b", *SIZE, "-o", "x.bmp"], "x.bmp"),
        (["draw", "1f1b", *SIZE, "-o", "."], "cannot draw '.'"),
        (["draw", "1f1b", *SIZE, "-o", "x.svg", "--comms"], "--comms is for .csv files"),
        (["draw", "1f1b", *SIZE, "-o", "x.csv", "--theme", "dark"], "--theme is for pictures"),
        (["compare", "1f1b", "zbv", *SIZE, "-o", "x.csv"], "cannot draw 'x.csv'"),
        (["compare", "all", "dualpipe", "-p", "3", "-m", "8"], "dualpipe needs an even number of ranks"),
        (["paint"], "No such command 'paint'"),
        (["compare", *SIZE], "Missing argument 'SCHEDULES"),
        (["compare", "1f1b", "zbv", *SIZE, "-O", "extra=3"], "--option extra: none of the compared schedules has"),
        (["compare", "1f1b:extra=3", "zbv", *SIZE], "1f1b has no option 'extra'"),
        (["compare", "interleaved:v=two", *SIZE], "interleaved:v=two: v=two: must be a positive integer"),
        (["compare", "interleaved:v=", *SIZE], "'interleaved': 'v=': must be name=value"),
        (["simulate", "zbv", *SIZE, "-O", "ranks=2"], "ranks is a size, not an option: use --ranks N"),
        (["simulate", "zbv", *SIZE, "-O", "spec=2"], "zbv has no option 'spec'"),
        (
            ["simulate", "zbv", *SIZE, "-m", "8,16"],
            "microbatches='8,16': must be a single one here; compare takes several",
        ),
        (["compare", "zbv", "-p", "4", "-m", "8,x"], "microbatches='8,x': must be positive integers, like 16,32"),
        (["compare", "zbv", *SIZE, "--title", "x"], "--title is for a picture: pass -o FILE"),
        (["draw", "1f1b", *SIZE, "-o", "x.html", "--width", "100"], ".html has no option 'width'"),
        (["draw", "1f1b", *SIZE, "-o", "x.svg", "--width", "nan"], "width=nan: must be from 100 to 10000 points"),
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
    notes = "W in 4 parts: zbv\nno W to divide into parts: 1f1b"
    assert notes in run("compare", "zbv", "1f1b", *SIZE, "--weight-parts", "4")[1]
    refused = "weight_parts=4: 1f1b has full backwards and no W; leave it out, or use a schedule with W"
    assert refused in run("simulate", "1f1b", *SIZE, "--weight-parts", "4")[2]
    assert run("simulate", "zbv", *SIZE, "--weight-parts", "65")[0] == 2


def filled():
    return ("simulate", "v-half", *SIZE, "--per", "stage", "--i", "1.2", "--w", "0.7", "--weight-parts", "4")


def test_several_runs_are_ranked_as_a_comparison_is(capsys):
    from types import SimpleNamespace

    from zeropipe.cli.run_output import print_ranking

    schedule = zp.from_csv("0F0,0B0\n", "[odd]")
    runs = [zp.simulate(schedule, zp.Costs(f=f, unit="s")) for f in (2, 1, 1)]
    print_ranking([SimpleNamespace(measured=SimpleNamespace(timeline=t)) for t in runs])
    out = capsys.readouterr().out
    assert out.count("[odd] ★") == 2
    assert out.index("1.000") < out.index("1.333")


def test_several_slices_are_for_plan_and_search(run):
    status, _, err = run("simulate", "seq1f1b", "-p", 2, "-m", 4, "--slices", "2,4")
    assert status == 2
    assert "slices=2,4: must be a single number here; plan and search take several" in err
