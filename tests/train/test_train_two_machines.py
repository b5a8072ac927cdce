"""Several machines: torchrun on two network namespaces with a cable between them, against one machine."""

import json
import re
import time
from itertools import pairwise

import pytest
from machines import ADDRESSES, ended, run_on, two_machines, waited_for

pytest.importorskip("torch", reason="needs torch")
from zeropipe.cli import main
from zeropipe.sim.attribution import attribute_idle_time
from zeropipe.train.report.recorded_steps import load_steps

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]

RUN = """
[model]
path = "tiny-qwen3"
weights = "random"
dtype = "float64"
vocabulary = 256
[mesh]
pp = {ranks}
[schedule]
name = "{schedule}"
[engine]
device = "cpu"
[data]
sequence = {sequence}
batch = {batch}
[train]
output = "{output}"
steps = {steps}
record_every = {steps}
[checkpoint]
every = 1
export = false
"""


@pytest.fixture(scope="module")
def machines():
    with two_machines() as both:
        yield both


def written(folder, *, ranks=2, schedule="1f1b", steps=3, output="out", sequence=16, batch=8):
    path = folder / f"{output}.toml"
    values = {"ranks": ranks, "schedule": schedule, "steps": steps, "output": output}
    path.write_text(RUN.format(**values, sequence=sequence, batch=batch))
    return path


def require_good(results):
    for machine, (status, out, err) in enumerate(results):
        assert status == 0, f"machine {machine} ended with {status}:\n{out}\n{err}"


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def test_run_gives_the_loss_of_one_machine(machines, tmp_path, capfd):
    words = ["run", "1f1b", "--microbatches", "4", "--steps", "1", "--sequence", "16", "--dtype", "float64", "--json"]
    (status, out, err), (other, nothing, _) = run_on(machines, words, tmp_path)
    require_good([(status, out, err), (other, nothing, "")])
    assert nothing.strip() == ""  # the first rank speaks
    main([*words, "--ranks", "2"])
    [here], [both] = json.loads(capfd.readouterr().out), json.loads(out)
    assert both["losses"] == pytest.approx(here["losses"], rel=1e-12)


def test_training_on_two_machines_with_two_processes_each_is_that_of_one(machines, tmp_path):
    file = written(tmp_path, ranks=4, schedule="zbv")
    results = run_on(machines, ["train", str(file)], tmp_path, per_node=2)
    require_good(results)
    assert "step 3/3" in results[0][2]
    assert "step 3/3" not in results[1][2]
    main(["train", str(file), "--mesh.pp", "1", "--schedule.name", "1f1b", "--train.output", str(tmp_path / "one")])
    assert losses(tmp_path / "out") == pytest.approx(losses(tmp_path / "one"), rel=1e-10)


def test_a_machine_that_is_switched_off_ends_the_other_by_name_and_the_run_goes_on_later(machines, tmp_path):
    file = written(tmp_path, steps=2000)
    first, second = (machine.start(["train", str(file)], 1, tmp_path) for machine in machines)
    waited_for(tmp_path / "out" / "metrics.jsonl", '"step": 2,', first)
    machines[1].switch_off()
    began = time.monotonic()
    ended(second)
    status, out, err = ended(first, 120)
    assert status != 0
    assert re.search(r"rank 1\b", out + err), err
    assert time.monotonic() - began < 100  # not the time-out of the engine, which is longer
    before = losses(tmp_path / "out")
    file.write_text(file.read_text().replace("steps = 2000", f"steps = {len(before) + 2}"))
    results = run_on(machines, ["train", str(file)], tmp_path)
    require_good(results)
    assert "resumed after step" in results[0][2]
    assert losses(tmp_path / "out")[: len(before)] == pytest.approx(before, rel=1e-10)


def words_of(meeting, number):
    """How torchrun's agents find each other: by fixed numbers, or at a meeting that they hold again after a restart."""
    if meeting == "static":
        return ()
    host = ("--rdzv-endpoint", f"{ADDRESSES[0]}:29572", "--rdzv-conf", f"is_host={number == 0}")
    return ("--rdzv-backend", "c10d", "--rdzv-id", "job", "--local-addr", ADDRESSES[number], *host)


@pytest.mark.parametrize("meeting", ["static", "c10d"])
def test_a_killed_process_on_one_machine_starts_both_again_and_the_run_goes_on(machines, tmp_path, meeting):
    file = written(tmp_path, steps=12)
    both = [
        machine.start(["train", str(file)], 1, tmp_path, "--max-restarts", "2", *words_of(meeting, machine.number))
        for machine in machines
    ]
    waited_for(tmp_path / "out" / "metrics.jsonl", '"step": 3,', both[0])
    attribute_idle_time = json.loads((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    machines[1].kill_a_rank()
    results = [ended(one, 300) for one in both]
    require_good(results)
    said = "".join(out + err for _, out, err in results)
    assert re.search(r"rank \d was lost", said)
    assert "resumed after step" in said
    assert len(losses(tmp_path / "out")) == 12
    assert losses(tmp_path / "out")[0] == attribute_idle_time  # the run did not begin anew


def test_a_slow_cable_is_communication_in_the_recorded_step(machines, tmp_path):
    shares = []
    for rate in ("1gbit", "4mbit"):
        file = written(tmp_path, steps=3, output=f"out-{rate}", sequence=128)
        for machine in machines:
            machine.speed(rate)
        try:
            results = run_on(machines, ["train", str(file)], tmp_path)
        finally:
            for machine in machines:
                machine.speed("1gbit")
        require_good(results)
        timeline = load_steps(tmp_path / f"out-{rate}" / "timelines", 3)[-1].timeline
        shares.append(max(causes.communication for causes in attribute_idle_time(timeline)) / timeline.makespan)
        assert (tmp_path / f"out-{rate}" / "report.html").is_file()
    assert all(slow > fast + 0.3 for fast, slow in pairwise(shares)), shares
    page = (tmp_path / "out-4mbit" / "report.html").read_text()
    assert "Messages between stages" in page
