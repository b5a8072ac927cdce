"""Sequence parallelism in costs: against counted layers and hand arithmetic, in files, plans and dry runs."""

import json
from dataclasses import replace

import pytest
from full_marker import mark_rest_full

import zeropipe as zp
from zeropipe.cli import main
from zeropipe.core.formats.json import from_json, to_json
from zeropipe.core.timeline import Origin
from zeropipe.errors import ConfigError
from zeropipe.estimating.counted import CountedModel
from zeropipe.estimating.estimate import estimate
from zeropipe.estimating.model import open_model
from zeropipe.estimating.operators import Sizes
from zeropipe.planning.plan import plan
from zeropipe.sim.layer_file import from_layer_data, to_layer_data
from zeropipe.train.config.read import read_run
from zeropipe.train.preview import preview

HIDDEN, TOKENS, TP = 256, 1024, 2
SMALL = {
    "hidden_size": HIDDEN, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "pad_token_id": 0,
}  # fmt: skip
MORE = {
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "phi3": {"bos_token_id": 1, "eos_token_id": 2},
}


@pytest.mark.parametrize("kind", mark_rest_full(["llama", "qwen3_moe", "phi3"], ["qwen3_moe"]))
def test_counted_layers_shrink_by_what_shapes_say(kind):
    """Counted are the engine's own sharded layers; what shapes leave out (see test_count) is not sharded."""
    pytest.importorskip("torch")
    config = {"model_type": kind, **SMALL, **MORE.get(kind, {})}
    shaped, counted = open_model(config), CountedModel(kind, config, "")
    assert shaped.allows_sequence_parallel(TP)
    assert counted.allows_sequence_parallel(TP)
    plain, parallel = (Sizes(TOKENS, 512, 2, TP, value) for value in (False, True))
    for model in (shaped, counted):
        assert model.message_bytes(parallel) == model.message_bytes(plain) / TP
    for layer in dict.fromkeys(shaped.layers):
        for compiled in (False, True):
            saved = [
                sum(op.kept[compiled] for op in model.layer_operators(plain)[layer])
                - sum(op.kept[compiled] for op in model.layer_operators(parallel)[layer])
                for model in (shaped, counted)
            ]
            # eager, two norms keep float32 and 16-bit copies of their inputs; compiled, the inputs
            assert saved[0] == 2 * TOKENS * HIDDEN * (2 if compiled else 4 + 2) * (1 - 1 / TP)
            assert saved[1] == pytest.approx(saved[0], rel=0.01)
        sums = [
            [sum(op.summed for op in model.layer_operators(at)[layer]) for at in (plain, parallel)]
            for model in (shaped, counted)
        ]
        assert sums[0] == sums[1]  # a gather and a reduce-scatter move as much as the sum that they replace


def test_checkpointed_activations_and_messages_are_divided_by_tp():
    plain, parallel = estimate("llama-3-70b", tp=8, sequence=8192, ac="full", sequence_parallel=(False, True)).settings
    one, other = plain.kinds["dense"], parallel.kinds["dense"]
    assert one.activation == one.message == 8192 * 8192 * 2
    assert other.activation == other.message == one.message / 8
    assert other.stash == one.stash
    assert other.parameters == one.parameters
    assert other.flops == one.flops
    assert other.workspace < one.workspace
    assert "sequence parallelism" in str(parallel)
    assert "sequence parallelism" not in str(plain)


def test_costs_files_keep_sequence_parallel_and_older_ones_load():
    costs = estimate("qwen3-8b", tp=(1, 2), sequence_parallel=(False, True))
    assert [(one.tp, one.sequence_parallel) for one in costs.settings] == [(1, False), (2, False), (2, True)]
    data = json.loads(json.dumps({"zeropipe": 1, "type": "layer costs", **to_layer_data(costs)}))
    assert from_layer_data(data) == costs
    assert costs.setting(tp=2, sequence_parallel=True) is costs.settings[2]
    old = {**data, "settings": data["settings"][:2]}
    for setting in old["settings"]:
        del setting["sequence_parallel"]
    assert from_layer_data(old).settings == costs.settings[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sequence_parallel": True}, "sequence_parallel=True shards sequences over tp; use a tp of at least 2"),
        ({"tp": 4, "sequence": 510, "sequence_parallel": True}, "sequence=510: must be a multiple of tp=4 with"),
        ({"tp": 2, "sequence_parallel": "yes"}, "sequence_parallel='yes': must be True, False or a list of both"),
    ],
)
def test_impossible_settings_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        estimate("qwen3-8b", **arguments)


def test_plan_tries_sequence_parallelism_and_writes_it(tmp_path, capsys):
    options = {
        "gpus": 16, "batch": 16, "sequence": 32768, "pp": 2, "tp": 8, "ac": "full", "schedules": "1f1b",
        "microbatch_sizes": 1, "search_seconds": 0, "workers": 1,
    }  # fmt: skip
    both, without, only = (plan("llama-3-8b", sequence_parallel=value, **options) for value in (None, False, True))
    assert both.best.candidate.layout.sequence_parallel
    assert only.best.candidate == both.best.candidate
    assert not any(row.candidate.layout.sequence_parallel for row in without.rows)
    assert both.best.memory.activations < 0.4 * without.best.memory.activations
    out = tmp_path / "run.toml"
    main([
        "plan", "llama-3-8b", "--gpus", "16", "--batch", "16", "--sequence", "4096", "--ranks", "2", "--tp", "8",
        "--schedules", "1f1b", "--search-seconds", "0", "--json", "-o", str(out),
    ])  # fmt: skip
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["sequence_parallel"] is True
    assert "with sequence parallelism" in row["text"]
    assert read_run(str(out)).mesh.sequence_parallel


def test_dry_run_knows_sequence_parallelism(tmp_path):
    found = [preview(read_run(_write_run(tmp_path, sequence_parallel=value))) for value in (False, True)]
    plain, parallel = (one.ranks[0].memory for one in found)
    assert parallel["activations"] == pytest.approx(plain["activations"] / 8, rel=0.1)
    assert parallel["weights"] == plain["weights"]
    assert found[1].prediction is not None


def _write_run(folder, sequence_parallel):
    path = folder / f"{sequence_parallel}.toml"
    path.write_text(f"""
        [model]
        path = "llama-3-70b"
        dtype = "bfloat16"
        weights = "random"
        [mesh]
        pp = 8
        tp = 8
        sequence_parallel = {str(sequence_parallel).lower()}
        [schedule]
        name = "1f1b"
        costs = "h100"
        [engine]
        ac = "full"
        [data]
        kind = "synthetic"
        sequence = 8192
        batch = 16
        [train]
        steps = 1
        output = "out"
        """)
    return str(path)


def test_recordings_name_sequence_parallelism():
    timeline = zp.simulate(zp.build("1f1b", ranks=2, microbatches=2))
    recorded = replace(timeline, origin=Origin((1, 1), tp=2, sequence_parallel=True))
    assert from_json(to_json(recorded)).origin == recorded.origin
    old = json.loads(to_json(recorded))
    del old["origin"]["sequence_parallel"]
    assert from_json(json.dumps(old)).origin == replace(recorded.origin, sequence_parallel=False)
