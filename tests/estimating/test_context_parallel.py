"""Parts of sequences in costs and plans: against hand arithmetic, the engine's parts, files, plans and dry runs."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from paths import ROOT

import zeropipe as zp
from zeropipe.cli.main import main
from zeropipe.core.model.operators import FULL_HEAD
from zeropipe.errors import ConfigError
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.estimate import part_length
from zeropipe.estimating.families import FAMILIES
from zeropipe.estimating.model import open_model
from zeropipe.planning.layouts import Layout
from zeropipe.planning.score import score_candidate, simulate_candidate
from zeropipe.sim.costs_file import load_costs
from zeropipe.sim.layer_file import to_layer_json
from zeropipe.train.config.read import read_run
from zeropipe.train.preview import preview

TOKENS, HIDDEN, HEADS, KEYS, WIDTH = 65536, 4096, 32, 8, 128  # of llama-3-8b
ALONE = {"search_seconds": 0, "workers": 1, "compile": True}
NVLINK, NETWORK = 450e9 * 0.8, 50e9 * 0.8


@pytest.fixture(scope="module")
def costs():
    return zp.estimate("llama-3-8b", sequence=TOKENS, cp=[1, 4, 16, 64], ac=["none", "full"])


def dense(costs, **wish):
    return costs.setting(**wish).kinds["dense"]


def test_work_and_memory_of_tokens_are_divided(costs):
    """The logits of a part are whole, without `cp` the fused head keeps none."""
    whole, part = (costs.setting(cp=cp, ac="full") for cp in (1, 4))
    for kind in ("dense", "head", "embedding"):
        assert part.kinds[kind].flops == whole.kinds[kind].flops / 4
        assert part.kinds[kind].parameters == whole.kinds[kind].parameters
    assert part.kinds["dense"].activation == part.kinds["dense"].message == TOKENS * HIDDEN * 2 / 4
    assert part.kinds["head"].activation > TOKENS / 4 * 128256 * 4 > whole.kinds[FULL_HEAD].activation
    assert dense(costs, cp=4, ac="none").activation < dense(costs, cp=1, ac="none").activation / 3.5


def test_heads_travel_once_before_and_once_after_attention(costs):
    """Queries, keys and values before it, results after it; backward their gradients, and checkpointed all again."""
    size = TOKENS / 4 * 2 * ((HEADS + 2 * KEYS) * WIDTH + HEADS * WIDTH)
    assert dense(costs, cp=4, ac="none").f_exchange == dense(costs, cp=4, ac="none").i_exchange == size
    assert dense(costs, cp=4, ac="full").i_exchange == 2 * size
    priced = costs.price_exchanges(costs.setting(cp=4, ac="none")).kinds["dense"]
    assert priced.f_exchange == pytest.approx(size * 3 / 4 / NVLINK)
    assert priced.f == pytest.approx(dense(costs, cp=4, ac="none").f + priced.f_exchange)


def test_with_fewer_key_heads_than_processes_several_get_the_same(costs):
    """16 processes, 8 key heads: each of them is sent twice, over the network between two machines."""
    size = TOKENS / 16 * 2 * ((HEADS + 2 * 2 * KEYS) * WIDTH + HEADS * WIDTH)
    assert dense(costs, cp=16, ac="none").f_exchange == size
    priced = costs.price_exchanges(costs.setting(cp=16, ac="none")).kinds["dense"]
    assert priced.f_exchange == pytest.approx(size * 8 / 16 / NETWORK)
    in_one = costs.price_exchanges(costs.setting(cp=16, ac="none"), gpus_per_node=16).kinds["dense"]
    assert in_one.f_exchange == pytest.approx(size * 15 / 16 / NVLINK)


def test_keys_are_gathered_where_heads_do_not_divide(costs):
    """64 processes and 32 heads."""
    assert dense(costs, cp=64, ac="none").f_exchange == TOKENS * 2 * 2 * KEYS * WIDTH
    assert dense(costs, cp=64, ac="none").flops == dense(costs, cp=1, ac="none").flops / 64


def test_a_ring_hides_its_messages_behind_attention():
    """16 processes of cp with 8 of tp: a head of keys each. In the backward float32 gradients go round with keys."""
    wish = {"sequence": TOKENS, "cp": 16, "tp": 8, "sequence_parallel": True, "compile": False, "ac": ["none", "full"]}
    costs, gathered = (zp.estimate("llama-3-70b", **wish, cp_exchange=name) for name in ("auto", "gather"))
    assert [setting.exchange for setting in costs.settings] == ["ring", "ring"], "between machines"
    plain, full = (one.kinds["dense"] for one in costs.settings)
    elements = TOKENS * 2 * WIDTH
    assert plain.f_exchange == 2 * elements == gathered.settings[0].kinds["dense"].f_exchange
    assert plain.i_exchange == pytest.approx(2 * elements + 4 * elements * 16 / 15)
    assert full.i_exchange == pytest.approx(plain.i_exchange + plain.f_exchange)
    assert full.i_hidden == pytest.approx(plain.i_hidden + plain.f_hidden)
    priced = costs.price_exchanges(costs.settings[0]).kinds["dense"]
    assert priced.f_exchange == priced.i_exchange == 0, "attention takes longer"
    slow = replace(costs, inter_node=costs.inter_node._replace(bandwidth=NETWORK / 10))
    exposed = slow.price_exchanges(costs.settings[0]).kinds["dense"]
    assert exposed.f_exchange == pytest.approx(plain.f_exchange * 15 / 16 / (NETWORK / 10) - plain.f_hidden)
    assert exposed.f == pytest.approx(plain.f + exposed.f_exchange)


def test_a_ring_needs_less_memory_than_gathered_keys():
    wish = {"sequence": 2**20, "cp": 16, "tp": 8, "sequence_parallel": True, "compile": False, "ac": ["none", "full"]}
    ring, gathered = (zp.estimate("llama-3-70b", **wish, cp_exchange=name) for name in ("auto", "gather"))
    one, other = ([setting.kinds["dense"] for setting in costs.settings] for costs in (ring, gathered))
    part, heads = 2**20 / 16, 8
    keys = 2 * 2 * WIDTH * (2**20 * (1 + heads) - part)  # of all tokens, for all heads too; not those of its own part
    assert other[0].activation - one[0].activation == keys, "it keeps its own keys"
    assert other[1].activation == one[1].activation
    assert one[1].workspace < 0.7 * other[1].workspace


def test_what_cannot_have_a_ring_gathers_keys():
    """Compiled, packed or with windows; in one machine and short; and as it is wished."""
    wish = {"sequence": TOKENS, "cp": 64, "compile": False}
    for changes, wanted in (
        ({}, "ring"), ({"compile": True}, "gather"), ({"sample": 1024}, "gather"), ({"dense_mask": True}, "gather"),
        ({"gpus_per_node": 64, "sequence": 32768}, "gather"), ({"cp_exchange": "gather"}, "gather"),
        ({"cp_exchange": "ring", "dense_mask": True}, "ring"), ({"cp": 4}, "heads"), ({"cp": 1}, ""),
    ):  # fmt: skip
        assert zp.estimate("llama-3-8b", **{**wish, **changes}).settings[0].exchange == wanted, changes
    config = {"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 32, "vocab_size": 64}  # fmt: skip
    assert zp.estimate({**config, "sliding_window": 4096}, **wish).settings[0].exchange == "gather"
    assert zp.estimate({**config, "sliding_window": None}, **wish).settings[0].exchange == "ring"
    for name, words in (("rings", "must be auto or one of heads, gather, ring"), ("heads", "must divide num_att")):
        with pytest.raises(ConfigError, match=f"cp_exchange='{name}': .*{words}"):
            zp.estimate("llama-3-8b", **wish, cp_exchange=name)
    with pytest.raises(ConfigError, match="cp_exchange='ring': a ring is estimated in blocks that are not compiled"):
        zp.estimate("llama-3-8b", sequence=TOKENS, cp=64, cp_exchange="ring")


def test_a_plan_names_and_writes_the_ring(tmp_path, monkeypatch, capsys):
    """10 heads do not divide over 4 processes; its file, and its dry run, have the ring that was priced."""
    monkeypatch.chdir(tmp_path)
    model = {"model_type": "llama", "hidden_size": 1280, "intermediate_size": 2560, "num_hidden_layers": 4,
             "num_attention_heads": 10, "num_key_value_heads": 2, "vocab_size": 1024,
             "max_position_embeddings": 2**20}  # fmt: skip
    Path("model.json").write_text(json.dumps(model))
    args = ["plan", "model.json", "--gpus", "4", "--batch", "4", "--sequence", "512K", "--cp", "4", "--ranks", "1"]
    args += ["--tp", "1", "--microbatch", "1", "--ac", "full", "--schedules", "1f1b", "--search-seconds", "0"]
    main([*args, "-o", "run.toml"])
    assert "1x1x1 cp4 ring" in capsys.readouterr().out
    assert '\ncp_exchange = "ring"\n' in Path("run.toml").read_text()
    made = zp.plan("model.json", gpus=4, batch=4, sequence=2**19, cp=4, pp=1, tp=1, ac="full", microbatch_sizes=1,
                   schedules="1f1b", **{**ALONE, "compile": False})  # fmt: skip
    shown = preview(read_run("run.toml", []))
    assert shown.prediction.step == pytest.approx(made.best.step)
    assert max(rank.peak for rank in shown.ranks) == pytest.approx(made.best.memory.peak, rel=1e-3)
    gathered = preview(read_run("run.toml", ["--mesh.cp_exchange", "gather"]))
    assert max(rank.peak for rank in gathered.ranks) > made.best.memory.peak
    compiled = zp.plan("model.json", gpus=4, batch=4, sequence=2**19, cp=4, pp=1, tp=1, ac="full", microbatch_sizes=1,
                       schedules="1f1b", **ALONE)  # fmt: skip
    assert "a ring of keys" in {item.name for item in compiled.untried}
    assert "a ring of keys" not in {item.name for item in made.untried}


def test_tp_takes_the_neighbours():
    costs = zp.estimate("llama-3-70b", sequence=TOKENS, cp=2, tp=8, sequence_parallel=True)
    layer = costs.settings[0].kinds["dense"]
    size = TOKENS / 2 * 2 * (8 + 2 * 2 + 8) * WIDTH  # both need the one key head of their GPU of tp
    assert layer.f_exchange == size
    assert costs.price_exchanges(costs.settings[0]).kinds["dense"].f_exchange == pytest.approx(size / 2 / NETWORK)
    assert layer.message == TOKENS / 2 / 8 * 8192 * 2


def test_parts_are_as_long_as_those_of_the_engine():
    pytest.importorskip("torch")
    from zeropipe.engine.stages.sequence_parts import SequenceParts

    for length in (1, 7, 128, 131, 250, 4097):
        for cp in (2, 3, 8):
            for multiple in (1, 2, 4):
                assert part_length(length, cp, multiple) * cp == SequenceParts(0, cp).padded(length, multiple)


def test_files_of_costs_have_cp(costs, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(to_layer_json(costs))
    assert load_costs(str(path)) == costs
    plain = to_layer_json(zp.estimate("llama-3-8b"))
    assert '"cp"' not in plain
    assert "exchange" not in plain


def test_the_types_that_are_estimated_are_exact_in_the_engine():
    page = (ROOT / "docs/long-sequences.md").read_text()
    exact = set(re.findall(r"`([\w-]+)`", page.split("92 are exact:")[1].split("The others are refused")[0]))
    texts_of_others = {name for name in FAMILIES if "_vl_" in name}
    assert set(FAMILIES) - texts_of_others - exact == {"kimi_k2"}, "DeepSeek-V3 by another name"


def test_what_is_not_estimated_is_refused():
    counted = CountedModel("gpt_oss", {}, "layers of gpt_oss")
    assert not counted.allows_cp(2)
    with pytest.raises(ConfigError, match=r"cp=2: layers of gpt_oss are counted, without parts of sequences"):
        zp.estimate(counted, cp=2)
    shape = {"model_type": "qwen2_5_vl", "text_config": {"model_type": "qwen2_5_vl_text", "hidden_size": 64,
             "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}}  # fmt: skip
    assert not open_model(shape).allows_cp(2)
    with pytest.raises(ConfigError, match=r"cp=2: .* is the text model of a multimodal one"):
        zp.estimate(shape, cp=2)
    with pytest.raises(ConfigError, match="cp=0: must be a positive integer"):
        zp.estimate("llama-3-8b", cp=0)


def test_weights_are_sharded_over_parts_too():
    """8.03 billion parameters, gathered and reduced over all 8 processes."""
    made = zp.plan("llama-3-8b", gpus=8, batch=8, sequence=TOKENS, pp=1, tp=1, cp=4, memory=1e12, ac="full",
                   microbatch_sizes=1, **ALONE)  # fmt: skip
    assert made.best.candidate.layout == Layout(1, 2, 1, cp=4, shard_cp=True)
    assert made.best.memory.optimizer == pytest.approx(12 * 8.03e9 / 8, rel=0.01)
    alone = replace(made.best.candidate, layout=Layout(1, 2, 1, cp=4))
    copied = score_candidate(made.context, alone, alone.build_schedule(), made.best.counts)
    assert copied.memory.optimizer == pytest.approx(12 * 8.03e9 / 2, rel=0.01)
    sums = 2 * 3 / 4 * 8.03e9 / 2 * 4 / NVLINK
    simulated = simulate_candidate(made.context, alone, alone.build_schedule(), made.best.counts)
    gathers = simulated.timeline.makespan - simulated.pipeline.makespan
    assert copied.seconds.data - gathers == pytest.approx(sums, rel=0.01)
    parts = vars(made.best.seconds)
    assert sum(parts.values()) == pytest.approx(made.best.step)
    layer = made.context.setting(made.best.candidate).kinds["dense"]
    assert parts["parts"] == pytest.approx(4 * 32 * (layer.f_exchange + layer.i_exchange))


def test_short_sequences_are_planned_without_parts():
    for sequence, has_parts in ((4096, False), (32768, True)):
        made = zp.plan("qwen3-0.6b", gpus=8, batch=8, sequence=sequence, ac="full", pp=1, schedules="1f1b",
                       microbatch_sizes=1, **ALONE)  # fmt: skip
        sizes = {row.candidate.layout.cp for row in (*made.rows, *made.misfits)}
        assert sizes == ({1, 2, 4} if has_parts else {1})
        assert ("context parallelism" in {item.name for item in made.untried}) is False


def test_a_planned_run_has_parts_in_its_file_and_dry_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ["plan", "llama-3-8b", "--gpus", "16", "--batch", "8", "--sequence", "131072", "--cp", "4", "--ranks", "2"]
    args += ["--compile", "--microbatch", "1", "--ac", "full", "--schedules", "1f1b", "--search-seconds", "0"]
    main([*args, "-o", "run.toml"])
    assert "cp4" in capsys.readouterr().out
    assert "\ncp = 4\nshard_cp = true\n" in Path("run.toml").read_text()
    made = zp.plan("llama-3-8b", gpus=16, batch=8, sequence=131072, cp=4, pp=2, ac="full", microbatch_sizes=1,
                   schedules="1f1b", **ALONE)  # fmt: skip
    shown = preview(read_run("run.toml", []))
    assert shown.prediction.step == pytest.approx(made.best.step)
    assert max(rank.peak for rank in shown.ranks) == pytest.approx(made.best.memory.peak, rel=1e-3)
    with pytest.raises(ConfigError, match="cp=3: must divide gpus=16"):
        zp.plan("llama-3-8b", gpus=16, batch=8, cp=3, **ALONE)
