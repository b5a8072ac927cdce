"""`train(config)`: the weights of plain torch on every mesh, metrics, exports, what is not finite, signals."""

from __future__ import annotations

import re
import sys
from unittest import mock

import pytest
import torch
from train_cases import train_counting, train_not_finite, train_unlike
from train_runs import difference, metrics_of, model_directory, plain_training, pool, run_config, train_on
from transformers import AutoModelForCausalLM

from zeropipe.errors import ConfigError
from zeropipe.train.config.tables import RateTable
from zeropipe.train.loop.checkpoints import compare_configs
from zeropipe.train.loop.metrics import MetricsLog, drop_lines_after
from zeropipe.train.loop.optimizer import find_norms_and_biases, rate_factor
from zeropipe.train.loop.trainer import count_steps, is_better
from zeropipe.train.report.recorder import MAX_KEPT, thin_out

LAYOUTS = [
    pytest.param({"pp": 2}, "1f1b", False, id="pp2"),
    pytest.param({"pp": 2, "dp_shard": 2}, "zbv", True, id="pp2-shard2-tied"),
    pytest.param({"pp": 4}, "1f1b", True, id="pp4-tied", marks=pytest.mark.full),
    pytest.param({"pp": 2}, "zbv", True, id="pp2-zbv-tied", marks=pytest.mark.full),
    pytest.param({"pp": 2, "dp_shard": 2}, "1f1b", False, id="pp2-shard2", marks=pytest.mark.full),
    pytest.param({"pp": 2, "dp_replicate": 2}, "1f1b", False, id="pp2-replicate2", marks=pytest.mark.full),
    pytest.param({"pp": 2, "tp": 2}, "1f1b", False, id="pp2-tp2", marks=pytest.mark.full),
    pytest.param({"pp": 2, "tp": 2}, "zbv", True, id="pp2-tp2-tied", marks=pytest.mark.full),
    pytest.param({"pp": 1}, "gpipe", False, id="one", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("mesh", "schedule", "tied"), LAYOUTS)
def test_five_steps_give_the_weights_of_plain_torch(tmp_path, mesh, schedule, tied):
    start = model_directory(tmp_path / "start", tied=tied)
    config = run_config(tmp_path / "out", start, mesh=mesh, schedule={"name": schedule})
    outcome = train_on(config)
    plain = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    wanted = plain_training(config, plain)
    assert outcome.losses == pytest.approx(wanted, rel=1e-10)
    assert outcome.steps == 5
    ours = AutoModelForCausalLM.from_pretrained(outcome.export, dtype=torch.float64)
    assert ours.config.tie_word_embeddings == tied
    assert difference(ours, plain) < 1e-9
    assert [line["loss"] for line in metrics_of(tmp_path / "out")] == list(outcome.losses)


@pytest.mark.full
def test_divided_experts_give_the_weights_of_plain_torch(tmp_path):
    start = model_directory(
        tmp_path / "start", model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        output_router_logits=False,
    )  # fmt: skip
    mesh = {"pp": 2, "dp_shard": 2, "ep": 2}
    config = run_config(tmp_path / "out", start, mesh=mesh, schedule={"name": "dualpipev"}, data={"batch": 8})
    outcome = train_on(config)
    plain = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64, experts_implementation="eager")
    assert outcome.losses == pytest.approx(plain_training(config, plain), rel=1e-10)
    assert difference(AutoModelForCausalLM.from_pretrained(outcome.export, dtype=torch.float64), plain) < 1e-9


def test_machines_with_different_files_are_refused(tmp_path):
    config = run_config(tmp_path / "out", model_directory(tmp_path / "start"), mesh={"pp": 2})
    for copied, trained, ran in pool(2).run(train_unlike, config):
        file = r"\S+/config.json='\d+ bytes, sum \w{8}'"
        assert re.fullmatch(
            f"rank 1 has {file}, rank 0 has {file}: every rank must have the same files of the model", copied
        )
        assert trained == (
            f"rank 1 has optimizer.lr=7.0, rank 0 has optimizer.lr={config.optimizer.lr}: every rank must have the "
            "same training file and options"
        )
        assert ran == "rank 1 has seed=1, rank 0 has seed=0: every rank must have the same options"


def test_norms_and_biases_do_not_decay_whatever_their_shape():
    """gpt_oss has a bias for each expert, cohere a norm for each head: two dimensions."""

    class ManyNorms(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, 4))

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), ManyNorms(), torch.nn.Embedding(3, 4))
    model.register_parameter("gate_up_proj_bias", torch.nn.Parameter(torch.ones(2, 4)))
    found = {id(parameter) for parameter in find_norms_and_biases(model)}
    small = [name for name, parameter in model.named_parameters() if id(parameter) in found]
    assert small == ["gate_up_proj_bias", "0.bias", "1.weight"]


def test_steps_that_are_not_finite_are_left_out_on_all_ranks(tmp_path):
    start = model_directory(tmp_path / "start")
    config = run_config(tmp_path / "out", start, mesh={"pp": 2})
    outcome = pool(2).run(train_not_finite, config, 1, (1, 3))[0]
    plain = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float64)
    assert outcome.losses == pytest.approx(plain_training(config, plain, left_out=(1, 3)), rel=1e-10)
    assert outcome.skipped == 2
    assert difference(AutoModelForCausalLM.from_pretrained(outcome.export, dtype=torch.float64), plain) < 1e-9
    assert [line.get("skipped_now", False) for line in metrics_of(tmp_path / "out")] == [
        False,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.full
def test_open_files_and_threads_stay_as_many(tmp_path):
    start = model_directory(tmp_path / "start")
    tables = {"train": {"steps": 30, "record_every": 5}, "checkpoint": {"every": 4, "export": False}}
    config = run_config(tmp_path / "out", start, mesh={"pp": 2}, schedule={"name": "zbv"}, **tables)
    for seen in pool(2).run(train_counting, config):
        assert len(seen) == 30
        files, threads = zip(*seen)
        assert min(files[-5:]) <= min(files[5:10])  # a thread that has ended may be there for a moment
        assert min(threads[-5:]) <= min(threads[5:10])
    assert (tmp_path / "out" / "report.html").exists()


@pytest.mark.parametrize(
    ("shape", "wanted"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.7, 0.4, 0.1]),
        ("cosine", [0.5, 1, 1, 0.775, 0.325, 0.1]),
        ("wsd", [0.5, 1, 1, 1, 1, 0.1]),
    ],
)
def test_the_rate_goes_up_and_down(shape, wanted):
    table = RateTable(shape=shape, warmup=2, final=0.1, decay=0.2)
    assert [rate_factor(table, step, 6) for step in range(6)] == pytest.approx(wanted)


def test_fewer_steps_than_are_done_are_refused():
    config = run_config("out", "tiny-qwen3")
    assert count_steps(config, None, 5) == 5
    with pytest.raises(ConfigError, match=r"train.steps=5: 6 are done already in train.output='out'; use more, or"):
        count_steps(config, None, 6)


def test_an_evaluation_that_is_not_a_number_is_never_the_best():
    nan = float("nan")
    losses = [(nan, None), (2.0, None), (nan, {"loss": 2.0}), (1.0, {"loss": 2.0}), (2.0, {"loss": 2.0})]
    assert [is_better(*pair) for pair in losses] == [False, True, False, True, False]
    assert is_better(3.0, {"loss": nan})  # of a checkpoint that an older version wrote


def test_a_checkpoint_is_of_another_model_where_both_say_so():
    before = {"rope": {"theta": 1.0, "kind": "a"}, "layers": 4, "attention_dropout": 0.1, "dtype": "float32", "old": 1}
    now = {"rope": {"theta": 2.0, "kind": "a"}, "layers": 4, "attention_dropout": 0.2, "dtype": "bfloat16", "new": 1}
    assert list(compare_configs(before, now)) == [("rope.theta", 1.0, 2.0)]


def test_a_resumed_curve_has_no_step_twice_and_no_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2, "evaluation_loss": 1}\n{"step": 3}\n{"st')
    drop_lines_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 2, "evaluation_loss": 1}\n'
    drop_lines_after(path, 0)
    assert path.read_text() == ""


def test_other_writers_get_the_metrics_until_they_fail(tmp_path, monkeypatch, capsys):
    """Both were run for real by hand; here they are stood in for."""
    board, run = mock.MagicMock(), mock.MagicMock()
    for name, module in {"torch.utils.tensorboard": mock.MagicMock(SummaryWriter=board),
                         "wandb": mock.MagicMock(init=run)}.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    log = {"tensorboard": True, "wandb": "mine", "every": 9}
    metrics = MetricsLog(run_config(tmp_path, "tiny-qwen3", log=log), 5, 2)
    board.assert_called_once_with(str(tmp_path / "tensorboard"), purge_step=3)
    run.return_value.log.side_effect = [None, OSError("the network is away\nfor good")]
    for step in (3, 4, 5):
        metrics.log_evaluation(step, 1.5, False)
    metrics.close()
    assert board().add_scalar.mock_calls == [mock.call("evaluation_loss", 1.5, step) for step in (3, 4, 5)]
    assert run.return_value.log.call_count == 2
    board().close.assert_called_once_with()
    assert "warning: no more metrics to wandb: OSError: the network is away\n" in capsys.readouterr().err
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_long_run_keeps_some_of_its_recorded_steps():
    kept: list = []
    for step in range(1000):
        kept = thin_out([*kept, step])
        assert len(kept) <= MAX_KEPT
    assert kept[0] == 0
    assert kept[-100:] == list(range(900, 1000))
