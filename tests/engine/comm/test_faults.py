"""One rank fails: every other rank stops with its error and action, soon, and no process is left."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import fault_cases as cases
from engine_helpers import TOLERANCE, ranks
from full_marker import mark_rest_full
from struck_jobs import free_port

import zeropipe as zp
from zeropipe.engine.run import launch
from zeropipe.engine.run.forkserver import fork_server, preparation_data
from zeropipe.engine.run.launch import LocalRanks, describe_failures
from zeropipe.engine.run.rank import Failed, _run_call
from zeropipe.engine.torch_private.comm import abort_nccl
from zeropipe.errors import ConfigError, EngineError

LIMIT = 60  # seconds; each of these takes a few


def gone(pids: list[int]) -> bool:
    """Whether none of the processes runs any more."""
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def outcomes(function, *args, number=4):
    """What every rank returned or raised; checks that nothing hung and nothing is left."""
    with LocalRanks(number) as ranks:
        found = ranks.outcomes(function, *args, timeout=LIMIT)
        pids = ranks.pids
    assert gone(pids)
    assert not any(isinstance(item, Failed) and item.kind == "TimedOut" for item in found), found
    return found


@pytest.mark.parametrize(
    "name, stage, kind, when, where",
    [
        ("1f1b", 2, "raise", 3, "rank 2 failed at 2F3: ValueError: the cat sat on the keyboard"),
        ("zbv", 5, "raise-back", 1, "rank 2 failed at 5I1: ValueError: no way back"),
        ("dualpipe", 1, "raise", 5, r"rank [12] failed at .*1F\d+.*: ValueError: the cat sat on the keyboard"),
        ("interleaved", 7, "raise", 0, "rank 3 failed at 7F0: ValueError: the cat sat on the keyboard"),
    ],
)
def test_an_error_in_a_stage_stops_all_ranks(name, stage, kind, when, where):
    found = ranks().run(cases.fail, zp.build(name, ranks=4, microbatches=8), stage, kind, when)
    assert {item[0] for item in found} == {"EngineError"}
    assert len({item[1] for item in found}) == 1, "all ranks raise the same line"
    assert re.fullmatch(where, found[0][1])
    culprit = int(re.match(r"rank (\d)", found[0][1])[1])
    assert found[culprit][2].startswith("ValueError")
    assert all("this engine has stopped" in item[3] for item in found)


def test_a_new_engine_works_after_one_that_failed():
    for differences in ranks().run(cases.fail_and_go_on, zp.build("zbv", ranks=4, microbatches=8), 5):
        assert max(differences.values()) < TOLERANCE, differences


@pytest.mark.parametrize("kind", ["kill", "exit"])
@pytest.mark.parametrize("name, stage, rank", [("zbv", 2, 2), ("1f1b", 0, 0)])
def test_a_dead_rank_stops_the_others(name, stage, rank, kind):
    found = outcomes(cases.fail, zp.build(name, ranks=4, microbatches=8), stage, kind, 2)
    assert isinstance(found[rank], Failed)
    assert found[rank].kind == "Died"
    others = [item for item in found if not isinstance(item, Failed)]
    assert len(others) == 3
    for item in others:
        assert item[0] == "EngineError"
        assert re.fullmatch(rf"rank {rank} was lost: its connection closed \(last seen at .*\)", item[1])


@pytest.mark.parametrize(
    "kind, where",
    [
        ("nan", "rank 2 failed at 5F2: FloatingPointError: 5F2 computed an output that is not finite"),
        ("nan-back", "rank 2 failed at 5I2: FloatingPointError: 5I2 computed .* that is not finite"),
    ],
)
def test_a_nan_is_found_where_it_was_made(kind, where):
    found = ranks().run(cases.fail, zp.build("zbv", ranks=4, microbatches=8), 5, kind, 2, True)
    assert all(re.fullmatch(where, item[1]) for item in found), found


def test_different_numbers_of_microbatches():
    """Refused on all ranks alike, and the engine goes on."""
    line = (
        "rank 0 passes 4 microbatches, rank 1 of the same pipeline 3: all ranks of a pipeline must pass the same number"
    )
    assert ranks(2).run(cases.unlike_numbers, zp.build("1f1b", ranks=2, microbatches=4)) == [line, line]


def test_the_wrong_number_of_ranks():
    found = outcomes(cases.bad_setup, "", zp.build("1f1b", ranks=3, microbatches=4), None)
    line = "the schedule 1f1b is for 3 ranks, 4 are running: start 3 processes, or build the schedule for another"
    assert all(item.kind == "ConfigError" and item.text.startswith(line) for item in found), found


SETUPS = {
    "schedule": "rank 2 has another schedule than rank 0: build the same one on every rank",
    "stages": "rank 1: stages [] were passed, the placement puts [1] on this rank",
    "option": "rank 0: split='halves': must be 'store' or 'whole'",
    "blocks": "rank 1: stage 1 names no blocks to compile or checkpoint: use module_stages()",
    "meta": (
        "rank 1: scale of stage 1 is on the meta device, without values: call to_empty(device=...) and fill it, or "
        "load weights with assign=True"
    ),
    "tie": "rank 3: AttributeError: Block has no attribute `weihgt`",
    "wrapped": (
        "rank 0: stage 0 holds DistributedDataParallel, which reduces gradients at the wrong time for a "
        "pipeline: pass plain modules and a mesh, or shard them with parallelize()"
    ),
}


@pytest.fixture(scope="module")
def setups():
    """What every rank says to each of them."""
    schedules = [zp.build(name, ranks=4, microbatches=8) for name in ("1f1b", "zb-h1")]
    return ranks().run(cases.told, cases.bad_setup, [*SETUPS], *schedules, timeout=LIMIT)


@pytest.mark.parametrize("what", SETUPS)
def test_a_bad_setup_is_refused_on_all_ranks(setups, what):
    assert [said[what] for said in setups] == [("ConfigError", SETUPS[what])] * 4


MISTAKES = {
    "name": ("ConfigError", "'1f1b': must be a Schedule; use zp.build, zp.from_csv or zp.from_json"),
    "list": ("ConfigError", "stages are a list: must be a dict of stage number to module; module_stages and"),
    "function": ("ConfigError", "stage "),
    "module": ("ConfigError", "modules=Block("),
    "numbers": ("ConfigError", "modules=[1, 2, 3, 4]: must be a list of modules, or of functions that build them"),
    "group": ("ConfigError", "group='pp': must be a process group, like mesh['pp'].get_group()"),
    "mesh": ("ConfigError", "mesh='pp': must be a DeviceMesh, like init_device_mesh('cpu', (2, 2), mesh_dim_names=("),
    "device": ("ConfigError", "device='pp': must be a torch device, such as 'cpu' or 'cuda:0'"),
    "outputs": ("ConfigError", "rank 0: microbatches are a generator: must be a list of dicts"),
    "table": ("ConfigError", "rank 0: microbatches are a dict: must be a list of dicts, like [{'inputs': x"),
    "generator": ("ConfigError", "rank 0: microbatches are a generator: must be a list of dicts"),
    "nothing": ("ConfigError", "rank 0: microbatches are a NoneType: must be a list of dicts"),
    "pairs": ("ConfigError", "rank 0: microbatch 7 is a tuple: must be a dict, like {'inputs': x}"),
    "class": ("ConfigError", "rank 0: loss_fn is the class CausalLMLoss: pass an instance, CausalLMLoss()"),
    "no loss": ("EngineError", "rank 3 failed at 3F0: TypeError: loss_fn is a NoneType: must be a function"),
    "norm": ("ConfigError", "clip_grad_norm(-1.0): must be a non-negative number"),
    "broadcast": (
        "EngineError",
        "rank 0 is at forward, rank 2 at forward with broadcast: every rank must make the",
    ),
    "evaluation": (
        "EngineError",
        "rank 0 is at train_step, rank 2 at eval_step: every rank must make the same calls, in",
    ),
    "only one": ("EngineError", "rank 0 is at train_step, rank 2 at the gradient norm: every rank must make the same"),
    "labels": ("ConfigError", "rank 3: a microbatch has ['inputs', 'target']: CausalLMLoss needs 'labels'"),
    "detached": ("EngineError", "rank 3 failed at 3F0: TypeError: the loss has no gradient, so that nothing would"),
    "exhausted": ("EngineError", "rank 3 failed at 3F0: StopIteration"),
    "cut off": ("EngineError", "rank 3 failed at 3F0: TypeError: 3F0 returned no gradient, so that nothing would"),
}


@pytest.fixture(scope="module")
def mistakes():
    """What every rank says to each of them, and to a loss that is a plain 0."""
    schedule = zp.build("1f1b", ranks=4, microbatches=8)
    return ranks().run(cases.told, cases.mistaken, [*MISTAKES, "zero"], schedule, timeout=LIMIT)


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistaken_call_is_told_on_all_ranks(mistakes, what):
    kind, line = MISTAKES[what]
    for said in mistakes:
        assert said[what][0] == kind
        assert said[what][1].startswith(line)


def test_a_microbatch_may_have_no_loss(mistakes):
    """A plain 0 has no gradient and needs none; the others have theirs."""
    for said in mistakes:
        loss, has_gradients = said["zero"]
        assert loss > 0
        assert has_gradients


def test_an_error_between_steps_stops_all_ranks():
    found = outcomes(cases.leave_early, zp.build("zbv", ranks=4, microbatches=8))
    assert found[1].kind == "OSError"
    others = {item.text for item in found if item.rank != 1}
    assert others == {"rank 1 failed at a point between steps: OSError: no space left on device"}


def test_a_failed_step_keeps_nothing_alive():
    found = ranks().run(cases.what_a_failure_keeps, zp.build("zbv", ranks=4, microbatches=8))
    for kept, refused in found:
        assert not kept
        assert refused.startswith("train_step under torch.no_grad() would give no gradients")


@pytest.mark.parametrize("culprit", [0, 2])
def test_watchdogs_notice_a_process_that_is_gone(culprit):
    found = outcomes(cases.watched_by_the_next, culprit)
    line = f"rank {culprit} was lost: its connection closed (last seen at set-up)"
    assert {item for item in found if isinstance(item, str)} == {line}
    assert sum(isinstance(item, Failed) for item in found) == 1


def test_watchdogs_do_not_take_a_close_for_a_loss():
    assert ranks().run(cases.closed_one_after_the_other) == [None] * 4


def test_threads_have_ended_when_an_engine_is_closed():
    """One that came back from torch while Python shuts down would end the process by SIGABRT."""
    schedule = zp.build("zb-h1", ranks=2, microbatches=2)
    assert ranks(2).run(cases.threads_left, schedule) == [[], []]


def test_an_error_that_others_quote_is_one_line():
    own = Failed(0, "ConfigError", "cannot write x", "a traceback", foreseen=True)
    told = Failed(1, "EngineError", "rank 0 failed at a step: ConfigError: cannot write x", "another", foreseen=True)
    other = Failed(1, "EngineError", "something else", "another", foreseen=True)
    assert describe_failures([own, told]) == describe_failures([told, own]) == "cannot write x"
    dead = Failed(1, "Died", "killed by SIGKILL")
    lost = Failed(0, "EngineError", "rank 1 was lost: its connection closed", "a traceback", foreseen=True)
    assert describe_failures([lost, dead]) == "rank 1 was lost: its connection closed; rank 1: killed by SIGKILL"
    assert describe_failures([own, other]) == "rank 0: ConfigError: cannot write x\nrank 1: EngineError: something else"


def test_what_ranks_cannot_be_handed_is_told_in_one_line(monkeypatch):
    with pytest.raises(ConfigError, match=r"local object .*: use a function of an importable file"):
        ranks(2).run(lambda: 1)
    assert ranks(2).run(abs, -1) == [1, 1]  # these ranks go on
    jobs = (b"cfault_cases\nno\n.", pickle.dumps((memoryview, (b"",))))
    missing, unsent = (pickle.loads(_run_call(job, 0)) for job in jobs)
    assert missing.text.startswith("local ranks cannot import the function (Can't get attribute 'no' on")
    assert unsent.text.startswith("the result of memoryview cannot be pickled (cannot pickle")
    assert missing.foreseen
    assert unsent.foreseen
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", None, raising=False)
    for file, found in ((__file__, True), ("/nowhere/<stdin>", False)):
        monkeypatch.setattr(main, "__file__", file, raising=False)
        assert ("init_main_from_path" in preparation_data()) == found


def test_a_silent_rank_is_given_up():
    with LocalRanks(2, grace=1) as ranks:
        found = ranks.outcomes(cases.silent, zp.build("1f1b", ranks=2, microbatches=2), timeout=20)
    assert found[0].text == (
        "rank 1 is stuck at 1F0: no progress for 2 s, and rank 0 waits at 0B0; "
        "if this work takes that long, pass Engine a longer timeout"
    )


def test_after_an_interrupt_no_answer_is_taken_for_that_of_another_run(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    with LocalRanks(1) as alone:
        with monkeypatch.context() as patch:
            patch.setattr(launch, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                alone.run(max, 1, 2)
        with pytest.raises(EngineError, match="these ranks are closed: create new ones"):
            alone.run(max, 3, 4)


def test_nccl_groups_are_aborted_side_by_side():
    """An abort may wait for the kernels of another group, which end when that one is aborted."""
    both = threading.Barrier(2, timeout=5)
    ended = []

    class Group:
        def abort(self):
            both.wait()
            ended.append(self)

    abort_nccl([Group(), Group()])
    assert len(ended) == 2


def test_a_stage_that_returns_no_tensor():
    found = outcomes(cases.wrong_output, zp.build("1f1b", ranks=4, microbatches=2))
    line = "rank 1 failed at 1F0: TypeError: 1F0 returned dict: a stage returns a Tensor or a tuple of Tensors"
    assert all(item.text == line for item in found), found


def test_without_torch_distributed():
    with LocalRanks(1) as ranks, pytest.raises(EngineError, match="start with torchrun and call init_process_group"):
        ranks.run(cases.no_group)


def test_the_launcher_stops_ranks_that_take_too_long():
    ranks = LocalRanks(2)
    with pytest.raises(EngineError, match="no result within 1 seconds"):
        ranks.run(cases.sleep_forever, timeout=1)
    assert gone(ranks.pids)


CAT = "ValueError: the cat sat on the keyboard"


@pytest.mark.parametrize("phase", cases.PHASES)
def test_an_error_names_its_rank_and_its_place_in_every_phase(phase):
    found = ranks().run(cases.struck, zp.build("zbv", ranks=4, microbatches=4), phase, "raise", 0, timeout=LIMIT)
    line = f"rank 0 failed at {cases.PHASES[phase][1]}: {CAT}"
    others = found[1:] if phase == "between" else found
    assert others == [("EngineError", line)] * len(others)
    if phase == "between":
        assert found[0] == tuple(CAT.split(": "))


@pytest.mark.parametrize("phase", mark_rest_full(cases.PHASES, ["loss", "norm", "between", "control", "set-up"]))
def test_a_rank_that_dies_is_named_in_every_phase(phase):
    timeout = 6.0 if phase == "control" else 60.0  # before they are connected nobody can see it
    found = outcomes(cases.struck, zp.build("zbv", ranks=3, microbatches=3), phase, "kill", 0, timeout, number=3)
    assert (found[0].kind, found[0].text) == ("Died", "killed by SIGKILL")
    for kind, text in found[1:]:
        assert kind == "EngineError"
        assert re.fullmatch(r"rank 0 was lost: .*", text)


@pytest.mark.parametrize(
    "kind, own, told",
    [
        ("interrupt", ("KeyboardInterrupt", ""), "rank 0 failed at {}: KeyboardInterrupt"),
        ("leave", ("SystemExit", "enough"), "rank 0 failed at {}: SystemExit: enough"),
    ],
)
@pytest.mark.parametrize("phase", ["loss", "between", "set-up"])
def test_a_rank_that_is_asked_to_end_tells_the_others(phase, kind, own, told):
    found = ranks().run(cases.struck, zp.build("zbv", ranks=4, microbatches=4), phase, kind, 0, timeout=LIMIT)
    assert found[0] == own
    assert found[1:] == [("EngineError", told.format(cases.PHASES[phase][1]))] * 3


def test_a_terminated_rank_is_named():
    found = outcomes(cases.struck, zp.build("1f1b", ranks=4, microbatches=8), "losses", "terminate", 2)
    assert (found[2].kind, found[2].text) == ("Died", "killed by SIGTERM")
    assert {text.split(":")[0] for _, text in found[:2] + found[3:]} == {"rank 2 was lost"}


def test_a_stopped_rank_is_blamed_alone():
    with LocalRanks(4, grace=2) as some:
        schedule = zp.build("zbv", ranks=4, microbatches=8)
        found = some.outcomes(cases.struck_and_failed, schedule, "loss", "stop", 0, 6.0, timeout=LIMIT)
    assert found[0].kind == "TimedOut"
    line = r"rank 0 was lost: no heartbeat for 3 s, it is stopped or its machine is gone \(last seen at .*\)"
    assert all(re.fullmatch(line, item.text) for item in found[1:]), found
    assert len({item.text for item in found[1:]}) == 1


@pytest.mark.parametrize("kind", ["kill", "stop"])
def test_a_lost_rank_that_hosts_the_store_is_named(kind):
    with LocalRanks(4, grace=5) as some:
        schedule = zp.build("1f1b", ranks=4, microbatches=4)
        found = some.outcomes(cases.hosted_by_rank_0, schedule, kind, free_port(), timeout=LIMIT)
    assert all(item.text.startswith("rank 0 was lost: ") for item in found[1:]), found


def test_a_rank_that_compiles_is_not_lost():
    assert len(set(ranks(2).run(cases.slow_compiler, zp.build("1f1b", ranks=2, microbatches=2)))) == 1


def test_a_rank_that_leaves_early_is_named():
    found = ranks().run(cases.left_early, zp.build("1f1b", ranks=4, microbatches=4))
    line = r"rank 2 has closed its Engine while rank [013] waits for it at .*: every rank must make the same calls"
    assert found[2] == "no error"
    assert all(re.fullmatch(line, text) for text in found[:2] + found[3:]), found


def test_a_rank_that_never_comes_is_named():
    found = ranks().run(cases.never_comes, zp.build("1f1b", ranks=4, microbatches=4))
    assert len(set(found)) == 1
    assert re.fullmatch(r"rank 1 has not created its Engine: rank \d waits for 4 s", found[0])


PARENT = """
import os
import signal

from zeropipe.engine.run.launch import LocalRanks
from zeropipe.engine.run.forkserver import ForkServer

ForkServer.preload = lambda *_: None  # these ranks need no model

def compute_forever():  # and never look at connections
    while True:
        pass

if __name__ == "__main__":
    ranks = LocalRanks(2)
    if {stopped}:
        os.kill(ranks.pids[0], signal.SIGSTOP)
    print(ranks._server._process.pid, *ranks.pids, flush=True)
    ranks.run(compute_forever, timeout=600)
"""


def start_parent(tmp_path, stopped):
    """A script whose ranks are busy; its process, and the ids of all that it started."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT.format(stopped=stopped))
    (tmp_path / "scratch").mkdir()
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch would make it in TMPDIR
    environment = {**os.environ, "TMPDIR": str(tmp_path / "scratch"), "TORCHINDUCTOR_CACHE_DIR": inductor}
    command = [sys.executable, str(script)]
    parent = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3
    assert not gone(pids)
    return parent, pids


def soon_gone(pids):
    end = time.monotonic() + 20
    while not gone(pids) and time.monotonic() < end:
        time.sleep(0.02)
    return gone(pids)


def test_killing_the_parent_leaves_nothing(tmp_path):
    parent, pids = start_parent(tmp_path, stopped=True)
    parent.kill()
    parent.wait()
    assert soon_gone(pids)
    assert not list((tmp_path / "scratch").iterdir())


def test_killing_the_fork_server_leaves_nothing(tmp_path):
    parent, pids = start_parent(tmp_path, stopped=False)
    os.kill(pids[0], signal.SIGKILL)
    assert parent.wait(60) == 1, "its ranks died, so its run failed"
    assert soon_gone(pids[1:])


@pytest.mark.skipif(not os.path.exists("/proc/loadavg"), reason="the next number of a process is not known")
def test_a_rank_with_the_number_of_one_that_ended_is_waited_for():
    server = fork_server()
    last = int(Path("/proc/loadavg").read_text().split()[-1])
    ended = {*range(last, last + 5000), *range(300, 5300)}  # the next ones, also where they begin again
    known = dict(server._exit_codes)
    server._exit_codes.update(dict.fromkeys(ended, -9))
    try:
        with LocalRanks(2) as some:
            assert ended.issuperset(some.pids)
            assert [server.wait(pid, 0) for pid in some.pids] == [None, None]
        assert gone(some.pids)
    finally:
        server._exit_codes = known


def test_ranks_that_get_on_are_not_stopped_for_silence():
    with LocalRanks(2) as ranks:
        assert ranks.run(cases.beat_for, 4.0, timeout=2.0) == [None, None]


def test_an_engine_at_work_is_a_sign_of_life():
    schedule = zp.build("1f1b", ranks=2, microbatches=2)
    assert min(ranks(2).run(cases.beats_of_a_run, schedule, timeout=LIMIT)) >= 2


def test_ranks_that_cannot_start_are_told_of_at_once():
    with pytest.raises(EngineError, match=r"rank 0: \w+: .*[Bb]ackend.*no-such-backend"):
        LocalRanks(2, backend="no-such-backend")
