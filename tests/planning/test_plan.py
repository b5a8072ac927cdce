"""Plans: rows against simulations made by hand, memory that is kept, order, explanations, files, the command."""

import _thread
import json
from dataclasses import replace
from itertools import pairwise
from queue import SimpleQueue
from shutil import which
from threading import Timer
from time import monotonic

import pytest

import zeropipe as zp
from zeropipe.cli import main
from zeropipe.core.model.layers import layer_counts
from zeropipe.core.workers import WorkerMemoryError
from zeropipe.errors import ConfigError
from zeropipe.planning import pool, refine
from zeropipe.planning.candidates import list_candidates
from zeropipe.planning.layouts import Layout, list_layouts
from zeropipe.planning.pool import MIN_GROUPS
from zeropipe.planning.rows import Run
from zeropipe.planning.score import score_candidate
from zeropipe.planning.write import write_run
from zeropipe.schedules.registry import entries
from zeropipe.sim.layer_file import to_layer_json

SMALL = {"gpus": 4, "gpus_per_node": 2, "batch": 16, "sequence": 1024, "gpu": "a100", "search_seconds": 0, "workers": 1}
NAMES = ["1f1b", "zbv", "v-half"]


@pytest.fixture(scope="module")
def small():
    return zp.plan("qwen3-1.7b", memory=24e9, schedules=NAMES, **SMALL)


def test_a_row_is_the_simulation_of_its_stages(small):
    """Layouts, costs, messages and memory put together by hand."""
    costs = zp.estimate("qwen3-1.7b", sequence=1024, gpu="a100", ac=["none", "selective:op", "full"],
                        microbatch_size=[1, 2, 4], tp=[1, 2], sequence_parallel=[False, True])  # fmt: skip
    assert len({row.candidate.layout for row in small.rows}) > 3
    for row in small.rows[::7]:
        one = row.candidate
        schedule = zp.build(one.schedule, ranks=one.layout.pp, microbatches=one.num_microbatches)
        setting = costs.setting(
            ac=one.ac, microbatch_size=one.microbatch_size, tp=one.layout.tp,
            sequence_parallel=one.layout.sequence_parallel,
        )  # fmt: skip
        shards, tp = one.layout.dp_shard, one.layout.tp
        own = costs.for_schedule(schedule).costs(
            row.counts, setting, placement=schedule.placement, shards=shards, gather="keep" if shards > 1 else None,
            shard_link=costs.link if shards * tp <= 2 else costs.inter_node,
            node_size=max(1, 2 // (shards * tp)), memory_limit=20e9,
        )  # fmt: skip
        timeline = zp.simulate(schedule, own)
        assert row.makespan == pytest.approx(timeline.makespan)
        assert row.memory.peak == pytest.approx(max(timeline.peak_memory))
        assert small.timeline(row) == timeline
        assert row.step >= row.makespan
        assert one.num_microbatches * one.microbatch_size * one.layout.dp_shard == 16
        assert one.layout.num_gpus == 4


def test_the_parts_of_a_row_add_up(small):
    for row in small.rows:
        parts = vars(row.seconds)
        assert sum(parts.values()) == pytest.approx(row.step)
        one = row.candidate
        ends = small.schedule(row).placement
        tied = ends.rank_of(0) != ends.rank_of(len(row.counts) - 1)  # the two sum their gradients, in float32
        link = small.context.costs.inter_node if tied and one.layout.num_gpus > 2 else small.context.costs.link
        sums = tied * 4 * 151936 * 2048 / one.layout.tp / link.bandwidth
        assert row.step == pytest.approx(row.makespan + row.seconds.optimizer + sums)
        assert min(parts.values()) >= -1e-9
        assert sum(vars(row.memory).values()) == pytest.approx(row.memory.peak)
        assert min(vars(row.memory).values()) >= -1.0  # a byte of rounding
        assert (row.seconds.recompute > 0) <= (row.candidate.ac != "none")  # hidden where launching takes longer
        assert (row.seconds.recompute > 0) >= (row.candidate.ac == "full" and row.candidate.layout.tp == 1)
        assert (row.seconds.data > 0) <= (one.layout.dp_shard > 1 or tied)


def even_row(made, row):
    """The same with even layers."""
    schedule = made.schedule(row)
    counts = layer_counts(made.context.costs.num_layers, schedule.num_stages)
    return score_candidate(made.context, replace(row.candidate, cut="even"), schedule, counts)


def test_two_copies_of_the_model_sum_their_gradients():
    costs = zp.estimate("qwen3-8b", gpu="h100")
    made = zp.plan(costs, gpus=4, batch=16, memory=800e9, schedules=["chimera"], pp=[4], search_seconds=0)
    row = even_row(made, made.best)
    dense = costs.settings[0].kinds["dense"].parameters
    ends = costs.settings[0].kinds["head"].parameters + costs.settings[0].kinds["embedding"].parameters
    assert row.seconds.data == pytest.approx(4 * (18 * dense + ends) / costs.link.bandwidth)
    assert row.memory.weights == pytest.approx(2 * (18 * dense + ends)), "ranks hold two stages"


def test_nothing_that_was_tried_is_faster_and_fits(small):
    """All of it again, one by one."""
    costs, best = small.context.costs, float("inf")
    for name in NAMES:
        for layout in list_layouts(4, 2, [1, 2], 28):
            schedule = zp.build(name, ranks=layout.pp, microbatches=16 // layout.dp_shard)
            own = costs.costs(
                layer_counts(28, schedule.num_stages), costs.setting(ac="none", microbatch_size=1, tp=layout.tp),
                placement=schedule.placement, shards=layout.dp_shard, memory_limit=20e9,
                node_size=layout.node_size(2),
            )  # fmt: skip
            timeline = zp.simulate(schedule, own)
            if not timeline.over_limit:
                best = min(best, timeline.makespan)
    assert small.best.makespan <= best


def test_rows_are_ranked_fit_and_are_on_the_front_or_beaten(small):
    assert all(row.fits and row.memory.peak <= 20e9 * (1 + 1e-9) for row in small.rows)
    assert all(a.step <= b.step for a, b in pairwise(small.rows))
    assert all(not row.fits for row in small.misfits)
    assert all(a.excess <= b.excess for a, b in pairwise(small.misfits))
    front = set(map(id, small.front))
    for row in small.rows:
        beaten = any(o.step <= row.step and o.memory.peak < row.memory.peak for o in small.rows if o is not row)
        faster = any(o.step < row.step and o.memory.peak <= row.memory.peak for o in small.rows)
        assert (id(row) in front) <= (not faster)
        assert (id(row) in front) or beaten or faster or any(o.step == row.step for o in small.front)
    assert small.rows[0].gap is not None
    assert small.rows[0].gap >= 0


def test_more_memory_is_never_slower(small):
    steps = [zp.plan("qwen3-1.7b", memory=size, schedules=NAMES, **SMALL).best.step for size in (18e9, 40e9, 80e9)]
    assert steps[0] >= small.best.step >= steps[1] >= steps[2]


def test_nothing_that_fits_is_told_with_what_is_missing(small):
    made = zp.plan("qwen3-1.7b", memory=7e9, schedules=["1f1b"], **SMALL)
    assert made.rows == ()
    with pytest.raises(ConfigError, match=r"nothing fits into 3\.0 GB: pp"):
        _ = made.best
    close = replace(small.best, limit=small.best.memory.peak - 2.5e6)
    made = replace(made, closest=replace(made.closest, row=close))
    assert made.describe_closest().endswith(" GB, 2.5 MB over it")


def test_a_slower_row_says_what_takes_longer(small):
    full = next(row for row in small.rows if row.candidate.ac == "full")
    assert "recomputation +" in small.why(full)
    assert small.why(full).startswith(f"{full.step / small.best.step - 1:.1%} slower")
    assert small.why(small.best) == "it is as fast"


def test_speed_and_mfu_follow_from_the_step(small):
    row = small.best
    assert small.speed(row) == pytest.approx(16 * 1024 / row.step / 4)
    total = 6 * 16 * 1024 * 1.72e9 / row.step / 4 / 312e12  # 6 N D, without attention
    assert small.mfu(row) == pytest.approx(total, rel=0.15)


def test_other_processes_give_the_same_rows():
    wish = {**SMALL, "microbatch_sizes": [1], "ac": ["none"], "tp": [1]}
    one = zp.plan("qwen3-0.6b", memory=80e9, **wish)
    two = zp.plan("qwen3-0.6b", memory=80e9, **{**wish, "workers": 2})
    assert one.num_tried > MIN_GROUPS
    assert one.rows == two.rows
    assert one.misfits == two.misfits


def test_schedules_made_of_overlaps_need_to_know_what_an_overlap_takes():
    costs = zp.estimate("qwen3-0.6b", gpu="a100", sequence=1024)
    wish = {**SMALL, "pp": [4]}
    tried = {row.candidate.schedule for row in zp.plan(costs, **wish).rows}
    overlapping = {entry.name for entry in entries() if entry.overlaps}
    assert not tried & overlapping
    faster = {
        kind: replace(cost, overlap=0.8 * (cost.f + cost.i + cost.w)) for kind, cost in costs.settings[0].kinds.items()
    }
    known = replace(costs, settings=(replace(costs.settings[0], kinds=faster),))
    assert zp.plan(known, **wish).best.candidate.schedule in overlapping


def test_tensor_parallelism_stays_inside_a_machine_and_all_gpus_are_used():
    found = list_layouts(24, 8, [1, 2, 4, 8, 16], 12)
    assert all(layout.num_gpus == 24 and layout.tp <= 8 and layout.pp <= 14 for layout in found)
    assert Layout(3, 1, 8) in found
    assert [Layout(2, 4, 2).node_size(8), Layout(2, 8, 2).node_size(8), Layout(8, 1, 2).node_size(8)] == [1, 1, 4]


def test_groups_that_do_not_divide_a_machine_reach_into_the_next():
    """Of 24 GPUs, 8 in a machine, the second six are GPUs 6 to 11."""
    costs = zp.estimate("gemma-7b")
    assert Layout(4, 3, 2).shard_link(costs, 8) == costs.inter_node
    assert Layout(4, 3, 2).shard_link(costs, 24) == Layout(2, 3, 1).shard_link(costs, 8) == costs.link
    assert [Layout(8, 3, 1).node_size(8), Layout(2, 3, 1).node_size(8)] == [1, 2]
    assert [layout.tp for layout in list_layouts(24, 8, [1, 3, 6], 1)] == [1, 1, 1]
    assert {layout.tp for layout in list_layouts(6, 8, [1, 3, 6], 1)} == {1, 3, 6}
    with pytest.raises(ConfigError, match="tp=16: must divide gpus=64 and gpus_per_node=8"):
        list_layouts(64, 8, [16], 12)


def test_mfu_is_that_of_the_tokens_whatever_the_layout():
    """What every GPU of tp computes (routers, latent queries) is not more of the model."""
    made = zp.plan("deepseek-v3", gpu="b200", memory=1e13, gpus=8, batch=16, pp=[1, 2], tp=[1, 8], ac="full",
                   microbatch_sizes=1, schedules=["1f1b"], search_seconds=0, workers=1)  # fmt: skip
    assert {row.candidate.layout.tp for row in made.rows} == {1, 8}
    assert [made.mfu(row) / made.speed(row) for row in made.rows] == pytest.approx(
        [made.mfu(made.best) / made.speed(made.best)] * len(made.rows)
    )


def test_a_schedule_is_tried_with_the_stages_that_its_name_says():
    wish = {**SMALL, "pp": [2], "tp": [1], "memory": 80e9}
    made = zp.plan("qwen3-0.6b", **wish, schedules=["interleaved:v=3", "1f1b"])
    assert {(row.candidate.schedule, row.candidate.stages_per_rank) for row in made.rows} == {
        ("interleaved", 3),
        ("1f1b", 1),
    }
    with pytest.raises(ConfigError, match=r"zbv:v=3: zbv has 2 stages per rank"):
        zp.plan("qwen3-0.6b", **wish, schedules=["zbv:v=3"])
    with pytest.raises(ConfigError, match="unknown schedule 'zbv:v=x'"):
        zp.plan("qwen3-0.6b", **wish, schedules=["zbv:v=x"])


def test_rows_that_look_alike_differ_in_memory(small):
    """Of two cuts of one candidate the slower one is there only if it is smaller."""
    seen = {}
    for row in small.rows:
        one = replace(row.candidate, cut="")
        assert row.memory.peak < seen.get(one, float("inf"))
        seen[one] = row.memory.peak


def test_a_worker_process_that_ends_early_is_reported(monkeypatch):
    monkeypatch.setattr("sys.executable", which("false"))
    with pytest.raises(ConfigError, match=r"the worker process ended with status 1; .*; use workers=1"):
        zp.plan("qwen3-0.6b", memory=80e9, **{**SMALL, "workers": 2})


def fail_in_worker(*args):
    raise WorkerMemoryError("this takes more than 1 GiB of memory")


def test_a_worker_process_without_memory_is_reported(monkeypatch):
    monkeypatch.setattr(pool.Worker, "call", fail_in_worker)
    with pytest.raises(ConfigError, match="not enough memory to try 28 layers on these GPUs: use fewer GPUs or pass"):
        zp.plan("qwen3-0.6b", memory=80e9, **{**SMALL, "workers": 2})


def test_waiting_for_worker_processes_can_be_interrupted():
    done, begun = SimpleQueue(), monotonic()
    interrupt, end = Timer(0.5, _thread.interrupt_main), Timer(20, done.put, [(0, None)])
    end.start()
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        pool._get(done)
    end.cancel()
    assert monotonic() < begun + 15


def test_a_mesh_is_written_and_read_again(tmp_path, capsys):
    made = zp.plan("qwen3-0.6b", memory=80e9, pp=[2], tp=[1], schedules=["1f1b"], **SMALL)
    assert made.best.candidate.layout == Layout(2, 2, 1)
    write_run(made, made.best, str(tmp_path / "run.toml"), "qwen3-0.6b")
    assert "[mesh]\npp = 2\ndp_shard = 2\ntp = 1\n" in (tmp_path / "run.toml").read_text()
    main(["run", str(tmp_path / "run.toml"), "--dry-run", "--json"])
    assert json.loads(capsys.readouterr().out)[0]["layers_per_stage"] == list(made.best.counts)


def test_sizes_beyond_reason_end_soon():
    with pytest.raises(ConfigError, match=r"batch=1000000000: too many microbatches of 1, 2, 4 to simulate"):
        zp.plan("qwen3-0.6b", **{**SMALL, "batch": 10**9})
    with pytest.raises(ConfigError, match="cannot be divided over"):
        zp.plan("qwen3-0.6b", **{**SMALL, "gpus": 2**40})


def test_schedules_with_more_stages_than_layers_take_no_place_among_what_is_tried():
    runs = [Run(Layout(pp, 1, 1), 8, 1, "none") for pp in (1, 4, 8)]
    made = list_candidates(runs, [("1f1b", 1), ("zbv", 2)], 7)
    assert {(one.layout.pp, one.schedule, one.cut) for one in made} == {
        (1, "1f1b", "even"), (4, "1f1b", "even"), (4, "1f1b", "balanced"), (4, "zbv", "balanced"),
        (8, "1f1b", "balanced"),
    }  # fmt: skip


def test_a_search_that_had_no_time_is_left_out(small, monkeypatch):
    row = next(row for row in small.rows if row.candidate.layout.pp > 1)
    slow = replace(row, seconds=replace(row.seconds, schedule=1e3))
    monkeypatch.setattr(refine, "_search_candidate", lambda *_: (slow, False))
    assert refine.search_best_runs(small.context, small.rows, 1.0, None, lambda share: None) == []
    monkeypatch.setattr(refine, "_search_candidate", lambda *_: (row, False))
    assert refine.search_best_runs(small.context, small.rows, 1.0, None, lambda share: None) != []


def test_a_searched_schedule_is_offered_and_written(tmp_path, capsys):
    """Qwen3-8B's head is as long as two layers: balanced layers and a schedule made for them win."""
    made = zp.plan(
        "qwen3-8b", gpus=4, batch=16, memory=160e9, pp=[4], tp=[1], microbatch_sizes=[1], ac=["none"], search_steps=300,
        workers=1,
    )  # fmt: skip
    row = next(row for row in made.rows if row.own_schedule is not None)
    zp.check(row.own_schedule)
    assert row.memory.peak <= 152e9
    named_even = min(even_row(made, row).step for row in made.rows if row.own_schedule is None)
    assert named_even > 1.1 * row.step
    files = write_run(made, row, str(tmp_path / "run.toml"), "qwen3-8b")
    assert files == [str(tmp_path / "run.toml"), str(tmp_path / "run.schedule.json")]
    main(["run", files[0], "--dry-run", "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert shown[0]["layers_per_stage"] == list(row.counts)


# the test above has Qwen3's head with a whole plan
@pytest.mark.parametrize("model", ["qwen3-4b", pytest.param("qwen3-8b", marks=pytest.mark.full)])
def test_balanced_layers_and_a_search_beat_names_with_even_layers(model):
    """The cases of docs/plan.md: at least ten percent, against every schedule with a name that fits."""
    costs, even = zp.estimate(model, gpu="h100"), float("inf")
    for entry in entries():
        for per_rank in (v for v in entry.stages_per_rank if 8 * v <= costs.num_layers):
            try:
                schedule = zp.build(entry.name, ranks=8, microbatches=32, stages_per_rank=per_rank)
            except ConfigError:
                continue
            counts = layer_counts(costs.num_layers, schedule.num_stages)
            own = costs.for_schedule(schedule).costs(counts, placement=schedule.placement, memory_limit=76e9)
            timeline = zp.simulate(schedule, own)
            even = even if timeline.over_limit else min(even, timeline.makespan)
    schedule = zp.build("zbv", ranks=8, microbatches=32)
    own = costs.costs(zp.balance(costs, schedule).counts, placement=schedule.placement, memory_limit=76e9)
    found = zp.search(ranks=8, microbatches=32, costs=own, stages_per_rank=2, placement=zp.vee, steps=300)
    zp.check(found.schedule)
    assert max(found.timeline.peak_memory) <= 76e9 * (1 + 1e-9)
    assert even > 1.1 * found.timeline.makespan


def test_the_command_ranks_explains_and_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    file, out = tmp_path / "costs.json", tmp_path / "run.toml"
    file.write_text(to_layer_json(zp.estimate("qwen3-0.6b", sequence=512, ac=["none", "full"])))
    args = ["plan", str(file), "--gpus", "4", "--batch", "16", "--memory", "40GB", "--search-seconds", "0"]
    main([*args, "-o", str(out), "--workers", "1"])
    text = capsys.readouterr().out
    assert "estimated costs" in text.splitlines()[0]
    assert "1: layers " in text
    assert "memory of the fullest rank: weights" in text
    assert "2: " in text
    assert f"wrote {out}" in text
    main([*args, "--json", "--workers", "1"])
    shown = json.loads(capsys.readouterr().out)
    assert (shown["source"], shown["gpu"], shown["gpus_per_node"]) == ("estimate", "h100", 8)
    assert shown["rows"][0]["front"]
    assert shown["rows"][1]["why"]
    assert '[model]\npath = "qwen3-0.6b"\n' in out.read_text()
    assert 'costs = "costs.json"\n' in out.read_text()
    shorter = json.loads(file.read_text())  # as `zeropipe profile tiny-qwen3 --num-layers 6` writes it
    file.write_text(json.dumps({**shorter, "model": "tiny-qwen3", "layers": shorter["layers"][:6]}))
    main([*args, "-o", str(out), "--workers", "1"])
    capsys.readouterr()
    assert 'path = "tiny-qwen3"\ndtype = "bfloat16"\nnum_layers = 6\n' in out.read_text()


@pytest.mark.parametrize(
    "args,message",
    [
        (["qwen9", "--gpus", "4", "--batch", "16"], "model 'qwen9'"),
        (
            ["qwen3-0.6b", "--gpus", "4", "--batch", "3", "--microbatch-sizes", "2"],
            "batch=3: cannot be divided over 4 GPUs in microbatches of 2",
        ),
        (
            ["qwen3-0.6b", "--gpus", "4", "--batch", "16", "--memory", "1GB"],
            "memory=1000000000.0: must be a number of bytes above the reserve of 4 GB",
        ),
        (["qwen3-32b", "--gpus", "2", "--batch", "16", "--memory", "24GB"], "nothing fits into 20.0 GB"),
        (
            ["qwen3-0.6b", "--gpus", "64", "--batch", "64", "--pp", "64"],
            "pp=64: no layout of 64 GPUs and 28 layers has that many pipeline ranks; use one of 1, 2, 4, 8, 16",
        ),
        (["qwen3-32b", "--gpus", "2", "--batch", "16", "--memory", "24GB", "--json"], "nothing fits into 20.0 GB"),
        (["qwen3-0.6b", "--gpus", "4", "--batch", "16", "--tp", "3"], "tp=3: qwen3-0.6b has num_attention_heads=16"),
        (["qwen3-0.6b", "--gpus", "4", "--batch", "16", "--schedules", "zvb"], "unknown schedule 'zvb'"),
        (["qwen3-0.6b", "--gpus", "4", "--batch", "16", "--search-steps", "9"], "search_steps=9: nothing is searched"),
        (["qwen3-0.6b", "--gpus", "4", "--batch", "16", "--ac", "some"], "activation checkpointing 'some'"),
        (["qwen3-0.6b", "--gpus", "4", "--batch", "16", "-o", "run.json"], "must end in .toml"),
        (["qwen3-0.6b", "--gpus", "4", "--batch", "16", "--pp", "3"], "pp=3: no layout of 4 GPUs"),
        (["qwen3-0.6b", "--gpus", "4", "--batch", "16", "--reserve", "-1GB"], "reserve="),
        (
            ["qwen3-0.6b", "--gpus", "16", "--batch", "64", "--pp", "16", "--schedules", "zbv"],
            "16 pipeline ranks with 2 stages each are 32 stages, and 28 layers fill 30 at most",
        ),
        (
            ["qwen3-0.6b", "--gpus", "8", "--batch", "4", "--pp", "8", "--schedules", "dualpipev"],
            "dualpipev needs 2 x ranks - 1 microbatches",
        ),
        (["no.json", "--gpus", "4", "--batch", "16"], "cannot read the costs file no.json"),
        (["qwen3-0.6b", "--gpus", "0", "--batch", "16"], "0 is not in the range"),
    ],
)
def test_mistakes_are_told_in_one_line(args, message, capsys):
    short = [] if "--schedules" in args else ["--schedules", "1f1b"]
    with pytest.raises(SystemExit) as stop:
        main(["plan", *args, "--search-seconds", "0", "--workers", "1", *short])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_ctrl_c_ends_all_searches_of_a_plan(monkeypatch):
    """What was found until then is ranked."""
    seconds = []

    def interrupted(**wish):
        seconds.append(wish.pop("seconds"))
        return replace(zp.search(**{**wish, "steps": 3}), interrupted=True)

    monkeypatch.setattr(refine, "search", interrupted)
    made = zp.plan("qwen3-0.6b", pp=2, tp=1, microbatch_sizes=1, ac="none", **{**SMALL, "search_seconds": 40.0})
    assert seconds == [20.0]
    assert made.rows


def test_costs_without_a_gpus_memory_ask_for_it():
    costs = replace(zp.estimate("qwen3-0.6b"), machine={"cpu": "some"})
    with pytest.raises(ConfigError, match=r"memory is missing: the costs do not have the memory of a GPU"):
        zp.plan(costs, gpus=2, batch=4)


def test_flags_that_a_costs_file_answers_are_refused(tmp_path, capsys):
    file = tmp_path / "costs.json"
    file.write_text(to_layer_json(zp.estimate("qwen3-0.6b", sequence=512)))
    with pytest.raises(SystemExit):
        main(["plan", str(file), "--gpus", "4", "--batch", "16", "--sequence", "4096"])
    assert "set by the costs in" in capsys.readouterr().err


@pytest.mark.parametrize("wish", [("--tp", "2"), ("--microbatch-sizes", "1,2"), ("--ac", "none,full")])
def test_what_a_costs_file_is_not_of_is_refused(wish, tmp_path, capsys):
    """It was left out without a word where there was more to try, and else told as a batch that cannot be shared."""
    file = tmp_path / "costs.json"
    file.write_text(to_layer_json(zp.estimate("qwen3-0.6b", sequence=512)))
    with pytest.raises(SystemExit) as stop:
        main(["plan", str(file), "--gpus", "4", "--batch", "16", "--search-seconds", "0", "--workers", "1", *wish])
    assert stop.value.code == 2
    asked = {"--tp": "tp=2", "--microbatch-sizes": "microbatch_size=2", "--ac": "ac=full"}[wish[0]]
    assert f"the costs of qwen3-0.6b have no setting with {asked}: must be one of ac" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line,message",
    [('modle = "x"', "[run] has 'modle'"), ("sequence = 1", "[run] sequence=1"), ('dtype = "int3"', "[run] dtype")],
)
def test_a_wrong_run_table_is_told_in_one_line(line, message, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(f'schedule = "1f1b"\nranks = 2\nmicrobatches = 4\n[run]\n{line}\n')
    with pytest.raises(SystemExit) as stop:
        main(["run", str(tmp_path / "run.toml"), "--dry-run"])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_flags_of_the_command_line_come_before_those_of_the_file(tmp_path, capsys):
    (tmp_path / "run.toml").write_text(
        'schedule = "1f1b"\nranks = 2\nmicrobatches = 4\n[run]\nlayers = [3, 5]\nac = "full"\ncompile = true\n'
    )
    main(["run", str(tmp_path / "run.toml"), "--dry-run", "--json"])
    assert json.loads(capsys.readouterr().out)[0]["layers_per_stage"] == [3, 5]
    main(["run", str(tmp_path / "run.toml"), "--dry-run", "--json", "--layers", "4,4"])
    assert json.loads(capsys.readouterr().out)[0]["layers_per_stage"] == [4, 4]


@pytest.mark.parametrize("columns,lines", [(80, 2), (120, 1)])
def test_a_narrow_terminal_folds_no_cell_of_the_ranking(columns, lines):
    from rich.console import Console

    from zeropipe.cli.plan_output import _create_table

    row = [
        "16x8x8",
        "interleaved-overlap:v=4",
        "1024x1",
        "selective:op",
        "27.69 s",
        "11,656",
        "57.8%",
        "10.8%",
        "175.8 GB",
    ]
    console = Console(width=columns, highlight=False)
    with console.capture() as told:
        console.print(_create_table({"10*": [*row, "10.3%"], "11": [*row, ""]}, console))
    text = told.get()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= columns
    assert all(text.count(cell) == 2 for cell in row)
    assert text.count("\n") == text[: text.index("10*")].count("\n") + 2 * lines + 1


def test_json_is_one_document_if_nothing_fits(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "qwen3-32b", "--gpus", "2", "--batch", "16", "--memory", "24GB", "--schedules", "1f1b", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["error"].startswith("nothing fits into 20.0 GB")
    assert found["rows"] == []
    assert found["misfits"] or found["too_large"], "with what comes closest"


def test_recomputation_is_known_with_one_mode_of_checkpointing():
    def seconds(*modes):
        rows = zp.plan(
            "qwen3-8b", gpus=8, batch=16, pp=4, tp=2, ac=modes, microbatch_sizes=[1], schedules=["1f1b"],
            search_seconds=0, workers=1,
        ).rows  # fmt: skip
        assert {row.candidate.ac for row in rows} <= set(modes)
        return next(row.seconds for row in rows if row.candidate.ac == "full")

    alone = seconds("full")
    assert alone.recompute > 0
    assert alone == seconds("none", "full")
