"""Plans and estimates of divided experts: against published runs, and sums by hand."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import zeropipe as zp
from zeropipe.cli.main import main
from zeropipe.core.phases import EXCHANGES
from zeropipe.sim.costs_file import load_costs
from zeropipe.sim.layer_file import to_layer_json
from zeropipe.train.config.read import read_run
from zeropipe.train.preview import preview

ALONE = {"search_seconds": 0, "workers": 1, "compile": True, "microbatch_sizes": 1}
DEEPSEEK = {"gpus": 256, "batch": 1024, **ALONE}
TOKENS, HIDDEN, ACTIVE, WIDTH, EXPERTS = 4096, 2048, 8, 768, 128  # of qwen3-30b-a3b, at most one sequence


@pytest.fixture(scope="module")
def costs():
    return zp.estimate("qwen3-30b-a3b", ep=[1, 8, 64], ac=["none", "full"])


def experts(costs, **wish):
    return costs.price_exchanges(costs.setting(**wish)).kinds["experts"]


def test_each_process_has_its_part_of_the_experts(costs):
    whole, divided = (costs.setting(ep=ep, ac="none").kinds["experts"] for ep in (1, 8))
    assert divided.experts == 3 * HIDDEN * WIDTH * EXPERTS // 8
    assert whole.parameters - divided.parameters == 7 * divided.experts
    assert (whole.experts, whole.phases) == (0, None)


def test_every_row_travels_once_per_expert_over_its_link(costs):
    size = TOKENS * ACTIVE * HIDDEN * 2
    inside, across = (experts(costs, ep=ep, ac="none") for ep in (8, 64))
    assert inside.phases.dispatch.f == pytest.approx(size * 7 / 8 / (450e9 * 0.8))
    assert across.phases.combine.i == pytest.approx(size * 56 / 64 / (50e9 * 0.8))
    machines_of_16 = costs.price_exchanges(costs.setting(ep=64, ac="none"), gpus_per_node=16).kinds["experts"]
    assert machines_of_16.phases.dispatch.f == pytest.approx(size * 48 / 64 / (50e9 * 0.8))


def test_a_token_travels_once_per_process():
    """8 of 128 experts on 8 processes: 5.3 have one of them, counted over random sets."""
    random = Random(0)
    sets = [{expert // 16 for expert in random.sample(range(EXPERTS), ACTIVE)} for _ in range(20_000)]
    expected = sum(map(len, sets)) / len(sets)
    by_row, by_process = (
        zp.estimate("qwen3-30b-a3b", ep=8, dispatch=dispatch).settings[0].kinds["experts"].phases.dispatch.f
        for dispatch in ("expert", "process")
    )
    assert by_process / by_row == pytest.approx(expected / ACTIVE, rel=0.01)


def test_phases_are_the_times_of_the_layer(costs):
    for ac in ("none", "full"):
        for ep in (8, 64):
            layer = experts(costs, ep=ep, ac=ac)
            for name in ("f", "i", "w"):
                assert sum(getattr(part, name) for part in layer.phases) == pytest.approx(getattr(layer, name))
    plain, recomputed = (experts(costs, ep=8, ac=ac).phases for ac in ("none", "full"))
    assert [getattr(recomputed, name).i for name in EXCHANGES] == [2 * getattr(plain, name).i for name in EXCHANGES]
    assert recomputed.experts.i > plain.experts.i


def test_imbalance_slows_experts_and_exchanges_only():
    even, uneven = (zp.estimate("qwen3-30b-a3b", ep=8, imbalance=x, compile=True) for x in (1, 1.5))
    one, other = (costs.settings[0].kinds["experts"] for costs in (even, uneven))
    assert other.phases.dispatch.f == 1.5 * one.phases.dispatch.f
    assert other.phases.attention.f == pytest.approx(one.phases.attention.f)
    assert 1.2 < other.phases.experts.f / one.phases.experts.f < 1.5 + 1e-9
    assert other.activation > one.activation
    assert other.flops == one.flops  # of the model


def test_experts_over_all_shards_are_resident_and_others_are_sharded(costs):
    """bf16 with float32 gradients and optimizer state: 18 bytes of a parameter, 16 where its weights are unsharded."""
    layer = costs.setting(ep=8, ac="none").kinds["experts"]
    rest = layer.parameters - layer.experts

    def weights(dp_shard):
        stages = costs.costs([24, 24], costs.setting(ep=8, ac="none"), shards=dp_shard, gather="keep")
        other = costs.costs([23, 25], costs.setting(ep=8, ac="none"), shards=dp_shard, gather="keep")
        return other.column("weights", 2)[1] - stages.column("weights", 2)[1]  # of one layer

    assert weights(8) == pytest.approx(16 * layer.experts + (12 + 4) * rest / 8)
    assert weights(32) == pytest.approx((12 + 4) * layer.experts / 4 + (12 + 4) * rest / 32)
    gathered = [
        costs.costs([24, 24], costs.setting(ep=8, ac="none"), shards=shards, gather="keep").column("full_weights", 2)[0]
        for shards in (8, 32)
    ]
    assert gathered[1] - gathered[0] == pytest.approx(24 * 2 * layer.experts)


def test_files_of_costs_have_ep(costs, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(to_layer_json(costs))
    assert load_costs(str(path)) == costs
    assert "ep" not in to_layer_json(zp.estimate("qwen3-30b-a3b"))


@pytest.mark.parametrize(
    "wish,message",
    [
        ({"ep": 3}, "ep=3: qwen3-30b-a3b has 128 experts: ep must divide them"),
        ({"ep": 2, "tp": 2}, "ep=2: is estimated with tp=1 only"),
        ({"ep": 2, "imbalance": 0.5}, "imbalance=0.5: must be a number from 1"),
        ({"ep": 2, "dispatch": "token"}, "dispatch='token': must be 'expert' or 'process'"),
        ({"ep": 0}, "ep=0: must be a positive integer"),
    ],
)
def test_what_is_not_estimated_is_refused(wish, message):
    with pytest.raises(zp.ConfigError, match=message):
        zp.estimate("qwen3-30b-a3b", **wish)
    with pytest.raises(zp.ConfigError, match="ep=2: qwen3-8b has no experts"):
        zp.estimate("qwen3-8b", ep=2)


def test_the_prediction_of_deepseek_v3_on_256_gpus_is_near_a_published_run():
    """4 pipeline ranks of 8 stages, ep 64, bf16: 1,002 tokens/s per GPU were published."""
    made = zp.plan("deepseek-v3", **DEEPSEEK, pp=4, ep=64, memory=400e9, schedules="interleaved:v=8", ac="none")
    assert made.best.candidate.layout.ep == 64
    assert made.speed(made.best) == pytest.approx(1002, rel=0.25)


def test_deepseek_v3_on_256_gpus_reaches_900_tokens_per_second():
    made = zp.plan("deepseek-v3", **DEEPSEEK, pp=32, schedules=["1f1b-overlap", "1f1b"], ac="full")
    assert made.speed(made.best) >= 900
    assert made.best.fits
    assert made.best.candidate.schedule == "1f1b-overlap"
    without = zp.plan("deepseek-v3", **DEEPSEEK, pp=32, ep=1, schedules="1f1b", ac="full")
    assert made.speed(made.best) > 2 * max((without.speed(row) for row in without.rows), default=0.0)


def test_qwen3_30b_a3b_on_16_gpus_reaches_12000_tokens_per_second():
    made = zp.plan(
        "qwen3-30b-a3b", gpus=16, batch=256, **ALONE, pp=2, ac="none", schedules=["interleaved-overlap:v=4", "zbv"]
    )
    assert made.speed(made.best) >= 12_000


@pytest.fixture(scope="module")
def small():
    """A plan of few candidates, inside and across machines of 4 GPUs."""
    return zp.plan(
        "qwen3-30b-a3b", gpus=32, gpus_per_node=4, batch=128, **ALONE, pp=4, ac="full",
        schedules=["1f1b", "1f1b-overlap"],
    )  # fmt: skip


def test_experts_are_divided_inside_and_across_machines(small):
    assert {row.candidate.layout.ep for row in small.rows} == {1, 4, 8}
    for row in small.rows:
        layers = small.context.decoder_layers(row.candidate)
        most = row.candidate.num_microbatches * sum(layer.exchanging for layer in layers) / 4
        assert 0 <= row.seconds.exchange <= most * (1 + 1e-9)
        hides = row.candidate.schedule == "1f1b-overlap"
        assert (row.seconds.exchange < 0.9 * most) == (hides and row.candidate.layout.ep > 1)
        assert row.step == pytest.approx(row.makespan + row.seconds.optimizer, rel=0.05)


def test_across_machines_more_of_the_exchange_is_exposed(small):
    exposed = {
        row.candidate.layout.ep: row.seconds.exchange
        for row in reversed(small.rows)
        if row.candidate.schedule == "1f1b"
    }
    assert exposed[8] > 2 * exposed[4] > exposed[1] == 0


def test_the_dry_run_of_a_planned_file_has_its_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ["plan", "qwen3-30b-a3b", "--gpus", "16", "--batch", "64", "--ranks", "2", "--ep", "8", "--ac", "full"]
    main([*args, "--schedules", "1f1b", "--compile", "--microbatch", "1", "--search-seconds", "0", "-o", "run.toml"])
    assert "2x8x1 ep8" in capsys.readouterr().out
    text = Path("run.toml").read_text()
    assert "ep = 8" in text
    made = zp.plan("qwen3-30b-a3b", gpus=16, batch=64, **ALONE, pp=2, ep=8, ac="full", schedules="1f1b")
    found = preview(read_run("run.toml", ["--data.kind", "synthetic"]))
    assert found.prediction is not None
    assert found.prediction.step == pytest.approx(made.best.step, rel=0.02)
    assert max(rank.peak for rank in found.ranks) == pytest.approx(made.best.memory.peak, rel=0.1)
    with_tp = preview(read_run("run.toml", ["--mesh.tp", "2"]))
    assert with_tp.prediction is None
    assert "no prediction with mesh.ep=8 and mesh.tp=2" in with_tp.notes[0]


def test_a_planned_file_takes_turns_where_it_has_overlaps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ["plan", "qwen3-30b-a3b", "--gpus", "16", "--batch", "64", "--ranks", "2", "--ep", "8", "--ac", "full"]
    args += ["--compile", "--microbatch", "1", "--search-seconds", "0", "--dispatch", "process", "-o", "run.toml"]
    main([*args, "--schedules", "dualpipev"])
    capsys.readouterr()
    text = Path("run.toml").read_text()
    assert 'overlap = "turns"' in text
    assert 'dispatch = "process"' in text
    made = zp.plan(
        "qwen3-30b-a3b", gpus=16, batch=64, **ALONE, pp=2, ep=8, ac="full", schedules="dualpipev", dispatch="process"
    )
    turns, streams = (preview(read_run("run.toml", more)) for more in ([], ["--engine.overlap", "streams"]))
    assert turns.prediction.step == pytest.approx(made.best.step, rel=0.02)
    assert streams.prediction.step > 1.05 * turns.prediction.step
    assert turns.prediction.parts["exchange"] < 0.6 * streams.prediction.parts["exchange"]


def test_selective_checkpointing_of_every_nth_layer_prices_exchanges(costs):
    setting = costs.price_exchanges(costs.setting(ep=8, ac="none"))
    layers = costs.layer_list(setting, "selective:2")
    assert {layer.i for layer in layers} == {experts(costs, ep=8, ac=ac).i for ac in ("none", "full")}
    assert replace(setting, ep=8).bandwidths is not None
