"""A .toml file that holds schedule, sizes and costs together, wherever a schedule is asked for."""

import json

import pytest

import zeropipe as zp

JOB = """
schedule = "zbv"
ranks = 4
microbatches = 8

[costs]
f = 1.0
i = 1.2
edges.0-1.p2p = 0.5
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_every_command_takes_it(run, tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    schedule = zp.build("zbv", ranks=4, microbatches=8)
    link = zp.Costs(f=0.5, i=0.6, w=0.5, edges={(0, 1): type(zp.Costs().inter_node)(0.5)})
    want = zp.simulate(schedule, link).makespan
    assert json.loads(run("simulate", "job.toml", "--json")[1])["makespan"] == want
    assert zp.from_json(run("show", "job.toml", "--json")[1]).makespan == want
    compared = json.loads(run("compare", "1f1b", "job.toml", "v-min", "--json")[1])["compared"]
    assert [t["schedule"] for t in compared] == ["1f1b", "zbv", "v-min"]
    assert compared[1]["makespan"] == want
    assert "job.toml: ok. 4 ranks, 8 stages" in run("check", "job.toml")[1]
    assert run("draw", "job.toml", "-o", "x.csv")[0] == 0
    assert zp.from_csv((tmp_path / "x.csv").read_text()) == schedule
    (plan,) = json.loads(run("run", "job.toml", "--dry-run", "--json")[1])
    assert plan["num_microbatches"] == 8


def test_flags_come_first(run, tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    by_file = json.loads(run("simulate", "job.toml", "-m", "16", "--f", "2", "--per", "stage", "--json")[1])
    link = zp.Costs(f=2, i=1.2, edges={(0, 1): type(zp.Costs().inter_node)(0.5)})
    assert by_file["makespan"] == zp.simulate(zp.build("zbv", ranks=4, microbatches=16), link).makespan


def test_all_fields(run, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "costs.toml").write_text("f = 3\ni = 3.6\nw = 2.1\n")
    (tmp_path / "sub" / "job.toml").write_text(
        'schedule = ["interleaved", "mine.csv"]\nranks = 2\nmicrobatches = [4, 8]\nstages_per_rank = 4\n'
        'per = "stage"\ncosts = "costs.toml"\n[options]\ngroup_size = 4\n'
    )
    (tmp_path / "sub" / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    data = json.loads(run("compare", "sub/job.toml", "--json")[1])
    assert data["costs_per"] == "stage"
    assert [(t["schedule"], t["num_stages"], t["num_microbatches"]) for t in data["compared"]] == [
        ("interleaved", 8, 4), ("mine", 2, 2), ("interleaved", 8, 8),
    ]  # fmt: skip
    assert data["compared"][1]["makespan"] == pytest.approx(3 * 3 + 3 * 5.7)
    (tmp_path / "parts.toml").write_text('schedule = "v-half"\nranks = 4\nmicrobatches = 8\nweight_parts = 4\n')
    assert json.loads(run("simulate", "parts.toml", "--json")[1])["num_weight_parts"] == 4


@pytest.mark.parametrize(
    "text, words",
    [
        ('schedul = "zbv"', "bad.toml: unknown field 'schedul': did you mean 'schedule'?"),
        ("colour = 1", "unknown field 'colour': use one of schedule, ranks"),
        ("f = 1", "unknown field 'f': costs belong in a table [costs]"),
        ("schedule = 3", "schedule=3: must be the name of a schedule"),
        ("schedule = []", "schedule=[]: must be the name of a schedule"),
        ('schedule = "other.toml"', "schedule='other.toml': must not be another .toml file"),
        ('schedule = "zbv"\nranks = "4"', "ranks='4': must be a positive integer, or a list"),
        ('schedule = "zbv"\nranks = true', "ranks=True: must be a positive integer, or a list"),
        ('schedule = "zbv"\nranks = 3\noptions = 3', "options=3: must be a table of the schedule's options"),
        ('schedule = "zbv"\nmicrobatches = [4, 8]', "microbatches=[4, 8]: must be a single one here; compare takes"),
        ('schedule = ["zbv", "1f1b"]', "schedule=['zbv', '1f1b']: must be a single one here"),
        ('schedule = "zbv"\nper = "layer"', 'per=\'layer\': must be "rank" or "stage"'),
        ('schedule = "zbv"\nweight_parts = 65', "weight_parts=65: must be an integer from 1 to 64"),
        ('schedule = "zbv"\ncosts = 3', "costs=3: must be a table of costs"),
        ('schedule = "zbv"\ncosts = "no.toml"', "cannot read the costs file no.toml"),
        ('schedule = "zbv"\n[costs]\nff = 1', "costs: unknown field 'ff': did you mean 'f'?"),
        ('schedule = "zbv"\n[costs]\nf = 1e300', "costs.f=1e+300: must be 0, or from"),
        ('schedule = "zbv"\n[costs]\nf = "1"', "f='1': must be a non-negative number"),
        ("ranks = 4", "schedule is missing: write a line like"),
        ("schedule =", "bad.toml is not TOML"),
        ('schedule = "zbv"\nranks = 4', "microbatches is missing"),
    ],
)
def test_a_mistake_names_field_value_rule_and_way_out(run, tmp_path, text, words):
    (tmp_path / "bad.toml").write_text(text)
    status, out, err = run("simulate", "bad.toml")
    assert (status, out) == (2, "")
    assert words in err
    assert err.startswith("zeropipe: ")
    assert err.count("\n") == 1


def test_the_page_starts_with_it(tmp_path, monkeypatch, run):
    from zeropipe.cli.app import page_query
    from zeropipe.cli.request import create_request

    (tmp_path / "job.toml").write_text(
        'schedule = ["zbv", "interleaved:v=4"]\nranks = 8\nmicrobatches = 16\nper = "stage"\nweight_parts = 2\n'
        '[options]\ngroup_size = 8\n[costs]\nf = [1, 2]\nbandwidth = 3.5\nunit = "s"\nblocking = true\n'
        "node_size = 4\ninter_node.p2p = 0.5\n"
        "[costs.edges.0-1]\np2p = 0.1\nbandwidth = 2.0\n"
    )
    nothing = {"ranks": (), "microbatches": (32,), "stages_per_rank": (), "pairs": ()}
    made = page_query(create_request(["job.toml"], nothing, several=("schedule",)))
    assert made == (
        "?ranks=8&microbatches=32&weight_parts=2&schedules=zbv,interleaved:v=4:group_size=8&per=stage"
        "&f=1.0,2.0&bandwidth=3.5&edges=0-1:0.1:2.0&node_size=4&inter_p2p=0.5&blocking=1&unit=s"
    )
    flags = {"ranks": (4,), "microbatches": (), "stages_per_rank": (), "pairs": (), "f": "1=2"}
    assert page_query(create_request([], flags)) == "?ranks=4&f=1=2.0"
    assert page_query(create_request([], {**flags, "f": "1e17"})) == "?ranks=4&f=1e%2B17"  # a bare + would be a blank
    (tmp_path / "links.toml").write_text(
        "[costs]\nnode_size = 2\nf = {0 = 0.8, default = 2}\n[costs.inter_node]\nbandwidth = 4.0\n"
        "[costs.edges.1-0]\nbandwidth = 2.0\n"
    )
    made = page_query(create_request(["zbv", "links.toml"], {**flags, "f": None}))
    assert made == "?ranks=4&schedules=zbv&f=0=0.8,default=2.0&edges=1-0::2.0&node_size=2&inter_bandwidth=4.0"
    assert "start the page without it, and drop the file there" in run("app", "mine.csv")[2]


def test_one_such_file_is_enough(run, tmp_path):
    (tmp_path / "a.toml").write_text(JOB)
    (tmp_path / "b.toml").write_text(JOB)
    assert "use one such file" in run("compare", "a.toml", "b.toml")[2]
