"""Training of a mixture of experts: its load in metrics and report, balanced by biases."""

from __future__ import annotations

import pytest
from train_runs import metrics_of, model_directory, run_config, train_on

EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip


def test_metrics_and_report_have_the_load_and_biases_balance_it(tmp_path):
    model, out = model_directory(tmp_path / "model", model_type="glm4_moe", **EXPERTS), tmp_path / "run"
    config = run_config(
        out, model, mesh={"pp": 2, "dp_replicate": 2, "ep": 2}, experts={"balance_rate": 0.01},
        train={"steps": 12, "record_every": 6}, optimizer={"lr": 1e-4},
    )  # fmt: skip
    train_on(config)
    metrics = metrics_of(out)
    layers = metrics[-1]["experts"]
    assert set(layers) == {f"model.layers.{layer}.mlp.experts" for layer in (1, 2, 3)}
    for line in metrics:
        assert line["expert_max_over_mean"] == max(load["max_over_mean"] for load in line["experts"].values())
        assert 0 < line["expert_entropy"] <= 1
        assert all(load["busiest"] == pytest.approx(load["max_over_mean"] / 4) for load in line["experts"].values())
    assert metrics[-1]["expert_entropy"] > metrics[0]["expert_entropy"]
    page = (out / "report.html").read_text()
    assert "Experts in step 12" in page
    assert "model.layers.3.mlp.experts" in page
