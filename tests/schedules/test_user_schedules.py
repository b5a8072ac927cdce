"""Schedules from outside: an installed package's entry point, a function, a file."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest

import zeropipe as zp
from zeropipe.cli import main
from zeropipe.cli.request import create_request
from zeropipe.schedules import registry
from zeropipe.schedules.user import load

MINE = """
import zeropipe as zp
from zeropipe.schedules import registry

@zp.register("from-a-package", placement=zp.vee, stages_per_rank=2, aliases=("pkg",))
def mine(lanes, p, *, order="down"):
    '''All forwards, then all backwards, on a V.'''
    for lane in lanes:
        stages = sorted(s for s, r in enumerate(zp.vee(p).copies[0]) if r == lane.rank)
        for stage in stages:
            lane.f(stage, times=p.num_microbatches)
        for stage in stages[::-1]:
            lane.b(stage, times=p.num_microbatches)
"""


def test_an_installed_package_brings_schedules(tmp_path):
    (tmp_path / "my_package.py").write_text(MINE)
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[zeropipe.schedules]\nmine = my_package\n")
    code = (
        "import zeropipe as zp\n"
        "assert 'from-a-package' in zp.names()\n"
        "s = zp.build('pkg', ranks=2, microbatches=3)\n"
        "zp.check(s)\n"
        "print(s.rows[0][0], s.placement.name)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0F0 vee\n"


def test_a_broken_package_does_not_break_the_other_schedules(tmp_path):
    (tmp_path / "bad_package.py").write_text("raise RuntimeError('out of order')\n")
    info = tmp_path / "bad_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[zeropipe.schedules]\nbad = bad_package\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", "import zeropipe as zp; print(zp.build('1f1b', ranks=1, microbatches=1))"],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "0F0 0B0\n"
    assert "bad_package" in done.stderr
    assert "out of order" in done.stderr


def test_a_file_has_its_own_size(tmp_path):
    file = tmp_path / "x.csv"
    file.write_text(zp.to_csv(zp.build("zbv", ranks=2, microbatches=3)))
    assert load(str(file)) == zp.build("zbv", ranks=2, microbatches=3)
    assert load(str(file), ranks=2, microbatches=3).name == "x"
    for wrong in ({"ranks": 3}, {"microbatches": 4}, {"stages_per_rank": 1}, {"group_size": 2}):
        with pytest.raises(zp.ConfigError):
            load(str(file), **wrong)
    file.write_text("0F0,1F0,1B0,0B0\n2F0,2B0\n")
    with pytest.raises(zp.ConfigError, match=r"stages_per_rank=1: .* has 3 stages on 2 ranks; leave it out"):
        load(str(file), stages_per_rank=1)


OWN = """
import zeropipe as zp
from zeropipe.schedules import registry

@zp.register({name!r}, placement=zp.linear, aliases={aliases!r})
def mine(lane, rank, p):
    for _ in range(p.num_microbatches):
        lane.f(rank)
        lane.b(rank)
"""


@pytest.mark.parametrize(
    "name,aliases", [("1F1B", ()), ("one", ("ZBVZeroBubble",)), ("first", ()), ("two", ("First",))]
)
def test_a_name_that_is_taken_is_refused(tmp_path, name, aliases):
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text(OWN.format(name="first", aliases=()))
    second.write_text(OWN.format(name=name, aliases=aliases))
    load(f"{first}:first", ranks=1, microbatches=1)
    with pytest.raises(zp.ConfigError, match=r"second\.py: the schedule name '.*' is taken by .*: choose another"):
        load(f"{second}:mine", ranks=1, microbatches=1)
    assert zp.build("1f1b", ranks=2, microbatches=2).rows[0][1].kind is zp.Kind.F  # ours as before


def test_ours_are_there_to_clash_with_before_anything_was_built(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN.format(name="1f1b", aliases=()))
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, timeout=60)
    assert "the schedule name '1f1b' is taken by 1f1b of" in done.stderr


def test_two_files_may_use_the_same_function_name_and_a_file_may_be_run_twice(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(OWN.format(name=name, aliases=()))
    for _ in range(2):
        built = [load(f"{tmp_path}/{name}.py:mine", ranks=1, microbatches=2) for name in ("one", "two")]
        assert [schedule.name for schedule in built] == ["one", "two"]
        exec(OWN.format(name="here", aliases=()), {"__name__": __name__})
        exec(OWN.format(name="nowhere", aliases=()), {})  # in no module
    assert zp.build("here", ranks=1, microbatches=2) == zp.build("nowhere", ranks=1, microbatches=2) == built[0]


VARIANTS = """
from functools import partial
import zeropipe as zp

def lazy(lane, rank, p, *, keep):
    '''Puts W off.'''
    lane.f(rank)
    lane.i(rank)
    lane.w(rank, times=keep // keep)

class Later:
    def __call__(self, lane, rank, p):
        lazy(lane, rank, p, keep=0)

for keep in (1, 2):
    zp.register(f"lazy-{keep}", placement=zp.linear, splits_backward=True)(partial(lazy, keep=keep))
zp.register("later", placement=zp.linear)(Later())
"""


def test_variants_of_a_function_and_objects_are_schedules_too(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    file = tmp_path / "variants.py"
    file.write_text(VARIANTS)
    sizes = {"ranks": 1, "microbatches": 1}
    assert str(load(f"{file}:lazy-2", **sizes)) == "0F0 0I0 0W0"
    assert registry.find("lazy-2").summary == "Puts W off"
    with pytest.raises(zp.ConfigError, match=r"variants.py:lazy registers several schedules: use one of lazy-1"):
        load(f"{file}:lazy", **sizes)
    with pytest.raises(zp.ConfigError, match=r"later does not run: ZeroDivisionError: .* \(variants.py:9\)"):
        load(f"{file}:later", **sizes)
    with pytest.raises(zp.ConfigError, match=r"registers no schedule 'x': it has later, lazy-1, lazy-2"):
        load(f"{file}:x", **sizes)


def test_a_function_that_fails_is_named_with_its_line(tmp_path):
    file = tmp_path / "failing.py"
    file.write_text(
        "import zeropipe as zp\n"
        "@zp.register('failing', placement=zp.linear)\n"
        "def failing(lane, rank, p, *, keep=1):\n"
        "    lane.f(rank, times=keep // 0)\n"
    )
    with pytest.raises(zp.ConfigError, match=r"failing does not run: ZeroDivisionError: .* \(failing.py:4\)"):
        load(f"{file}:failing", ranks=2, microbatches=2)


@pytest.mark.parametrize(
    "line,words",
    [
        ("lane.f(rank, times=-1)", "rank 0 writes stage 0 times=-1: must be non-negative"),
        ("lane.i(rank, times=-1)", "rank 0 writes stage 0 times=-1: must be non-negative"),
        ("lane.at(rank, zp.Kind.F, -1)", "rank 0 writes microbatch -1: must be non-negative"),
        ("lane.at(-1, zp.Kind.F, 0)", "rank 0 writes stage -1: stages are 0 to 0"),
        ("lane.f(rank, times=1.5)", r"does not run: TypeError: .* \(negative.py:4\)"),
    ],
)
def test_what_a_lane_cannot_count_is_refused_with_its_place(line, words, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    file = tmp_path / "negative.py"
    head = "import zeropipe as zp\n@zp.register('negative', placement=zp.linear)\n"
    file.write_text(f"{head}def negative(lane, rank, p):\n    {line}\n    lane.f(rank, 3)\n    lane.b(rank, 3)\n")
    with pytest.raises(zp.ZeropipeError, match=words):
        zp.check(load(f"{file}:negative", ranks=1, microbatches=3))


@pytest.mark.parametrize("placement", [zp.vee, zp.loop])
def test_a_schedule_with_one_stage_per_rank_too_few_is_told_so(placement, monkeypatch):
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    @zp.register("short", placement=placement)
    def short(lane, rank, p):
        for stage in (rank, p.num_stages - 1 - rank):
            lane.f(stage)
            lane.b(stage)

    @zp.register("long", placement=placement)
    def long(lane, rank, p):
        lane.f(2 * p.num_ranks - 1 - rank)

    with pytest.raises(zp.ScheduleError, match=r"on the wrong rank: .* is stages_per_rank=2 missing in @zp.register\?"):
        zp.check(zp.build("short", ranks=2, microbatches=1))
    with pytest.raises(zp.ScheduleError, match=r"writes stage 3: stages are 0 to 1, 1 per rank \(as stages_per_rank="):
        zp.build("long", ranks=2, microbatches=1)


@pytest.mark.parametrize(
    "facts,words",
    [
        ({"name": ""}, "the schedule name '': must be a text"),
        ({"name": None}, "the schedule name None: must be a text"),
        ({"name": "zbv:v=2"}, "the schedule name 'zbv:v=2'"),
        ({"name": "all"}, "the schedule name 'all'"),
        ({"name": "mine.csv"}, "the schedule name 'mine.csv'"),
        ({"aliases": "mine"}, "aliases='mine': must be a sequence of names, like ('mine',)"),
        ({"placement": "vee"}, "placement='vee': must be zp.linear, zp.loop"),
        ({"stages_per_rank": ()}, "stages_per_rank=(): must be a positive integer or several"),
        ({"stages_per_rank": (2, 0)}, "stages_per_rank=(2, 0): must be a positive integer"),
        ({"stages_per_rank": 1.5}, "stages_per_rank=1.5: must be a positive integer"),
        ({"stages_per_rank": True}, "stages_per_rank=(True,): must be a positive integer"),
    ],
)
def test_facts_that_cannot_be_are_refused_at_once(facts, words):
    facts = {"name": "never", "placement": zp.linear, **facts}
    with pytest.raises(zp.ConfigError) as error:
        zp.register(facts.pop("name"), **facts)
    assert words in str(error.value)
    assert "never" not in zp.names()


@pytest.fixture
def odd(monkeypatch):
    """Schedules with facts that ours do not have."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    def only_two(p):
        return zp.Placement(((0, 1),)) if p.num_ranks == 2 else 1 / 0

    def rows(lane, rank, p, *, lazy=False, span=(0, 1), limit=float("inf")):
        order = (lane.b, lane.f) if lazy else (lane.f, lane.b)
        for write in order:
            write(rank, times=p.num_microbatches)

    def needy(lane, rank, p, *, keep):
        rows(lane, rank, p, lazy=keep)

    def refuse(p, **options):
        raise ValueError("never")

    zp.register("odd-placed", placement=only_two)(rows)
    zp.register("odd-partial", placement=partial(zp.linear))(rows)
    zp.register("odd-needy", placement=zp.linear)(needy)
    zp.register("odd-stuck", placement=zp.linear)(partial_of(rows, lazy=True))
    zp.register("odd-refused", placement=zp.linear, require=refuse)(rows)


def partial_of(write, **options):
    def written(lane, rank, p):
        write(lane, rank, p, **options)

    return written


def test_odd_schedules_do_not_take_the_list_and_the_page_down(odd, capsys):
    from app_client import ask, client

    main(["list", "--json"])
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    cards = {one["name"]: one for one in client.get("/api/schedules").json()["schedules"]}
    for name in ("odd-placed", "odd-partial", "odd-needy", "odd-stuck", "odd-refused"):
        assert listed[name]["options"] == cards[name]["options"]
        assert listed[name]["placement"] == cards[name]["placement"]
    assert cards["odd-partial"]["options"] == {"lazy": False, "span": "(0, 1)", "limit": "inf"}
    assert cards["odd-partial"]["placement"] == "linear"
    assert cards["odd-placed"]["placement"] == "custom"
    assert cards["odd-needy"]["options"] == {"keep": None}
    assert [name for name, card in cards.items() if not card["picture"]] == ["odd-needy", "odd-refused", "odd-stuck"]
    chart = ask("chart", {})[1]
    assert {error["field"] for error in chart["errors"]} == {"odd-placed", "odd-needy", "odd-refused", "odd-stuck"}


def test_compare_names_the_schedule_that_is_stuck_and_leaves_it_out_of_all(odd, capsys):
    main(["compare", "all", "-p", "2", "-m", "4", "--json"])
    refused = {one["schedule"]: one["reason"] for one in json.loads(capsys.readouterr().out)["refused"]}
    assert refused["odd-stuck"].startswith("no rank can go on")
    assert refused["odd-refused"].startswith("odd-refused does not run: ValueError: never")
    assert refused["odd-needy"] == "odd-needy needs its option 'keep', which has no default; pass keep=VALUE"
    with pytest.raises(SystemExit):
        main(["compare", "1f1b", "odd-stuck", "-p", "2", "-m", "4"])
    assert "odd-stuck: no rank can go on" in capsys.readouterr().err


def test_starts_of_a_search_and_hints_of_a_report_leave_wrong_schedules_out(odd):
    from zeropipe.searching.candidates.registered import registered_schedules
    from zeropipe.searching.task import SearchTask
    from zeropipe.train.report.hints import _other_schedules

    problem = zp.Problem(2, 2, 2)
    task = SearchTask(problem, zp.linear(problem), zp.Costs(), False)
    zp.register("odd-right", placement=zp.linear)(lambda lane, rank, p: (lane.f(rank, 2), lane.b(rank, 2)))
    starts = {schedule.name for schedule in registered_schedules(task)}
    others = {schedule.name for schedule in _other_schedules(zp.build("zb-h1", ranks=2, microbatches=2), 8)}
    for found in (starts, others):
        assert {"gpipe", "odd-right"} <= found
        assert "odd-stuck" not in found
    small = {"gpus": 2, "batch": 2, "sequence": 512, "search_seconds": 0, "workers": 1, "pp": 2, "max_candidates": 1}
    with pytest.raises(zp.ScheduleError, match=r"^odd-stuck: no rank can go on"):
        zp.plan("qwen3-0.6b", schedules=["odd-stuck"], **small)


@pytest.mark.parametrize("text,lazy", [("False", False), ("false", False), ("true", True), ("0", False)])
def test_an_option_of_yes_and_no_is_read_from_text(text, lazy, odd):
    request = create_request(
        [f"odd-needy:keep={text}"], {"ranks": (2,), "microbatches": (2,), "stages_per_rank": (), "pairs": ()}
    )
    assert str(request.load(request.specs[0]).rows[0][0]) == ("0B0" if lazy else "0F0")
