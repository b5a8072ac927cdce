"""zeropipe.integrations.trainer without TRL: what is refused, batches and losses. Training is in tests/integrations."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.loss.loss_utils import ForCausalLMLoss

import zeropipe as zp
from zeropipe.errors import ConfigError, MissingExtra
from zeropipe.integrations.trainer import pipelined
from zeropipe.integrations.trainer.arguments import check_arguments, count_microbatches, engine_options
from zeropipe.integrations.trainer.batches import borders, divide
from zeropipe.integrations.trainer.losses import TokenLoss
from zeropipe.integrations.trainer.preferences import WEIGHT, count_tokens, divide_pairs, inputs_of, keep_pairs
from zeropipe.integrations.trainer.scores import score, score_tokens
from zeropipe.integrations.trainer.settings import PipelineSettings

# transformers renamed it
CHECKPOINTING = min(
    field.name
    for field in dataclasses.fields(transformers.TrainingArguments)
    if field.name in ("activation_checkpointing", "gradient_checkpointing")
)


def arguments(tmp_path, **changes):
    return transformers.TrainingArguments(str(tmp_path), **{"use_cpu": True, "report_to": "none"} | changes)


def settings(mesh="pp=1", microbatches=None, **options):
    return PipelineSettings.create("1f1b", mesh, microbatches, None, options)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("zeropipe.integrations.trainer")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingExtra, match=r"needs accelerate.*zeropipe\[trainer\]"):
        __import__("zeropipe.integrations.trainer")


@pytest.mark.parametrize(
    "kind, changes, says",
    [
        (dict, {}, "must be transformers.Trainer"),
        (transformers.Seq2SeqTrainer, {}, "Seq2SeqTrainer has a prediction_step of its own"),
        (transformers.Trainer, {"mesh": "pp=2,sp=2"}, "must be one of pp"),
        (transformers.Trainer, {"mesh": 4}, "must be sizes by dimension"),
        (transformers.Trainer, {"microbatches": 0}, "microbatches=0: must be a positive integer"),
        (transformers.Trainer, {"schedule": 1}, "schedule=1: must be a name"),
        (transformers.Trainer, {"compil": True}, "did you mean compile"),
    ],
)
def test_what_is_no_pipeline_is_refused(kind, changes, says):
    with pytest.raises(ConfigError, match=says) as caught:
        pipelined(kind, **{"mesh": "pp=2"} | changes)
    assert "\n" not in str(caught.value)


def test_a_step_of_ones_own_is_refused():
    class Weighted(transformers.Trainer):
        def compute_loss(self, model, inputs, **kwargs):
            return model(**inputs).loss

    with pytest.raises(ConfigError, match=r"Weighted has a compute_loss of its own, .* compute_loss_func"):
        pipelined(Weighted, mesh="pp=2")

    class Later(pipelined(transformers.Trainer, mesh="pp=2")):
        def training_step(self, *args):
            return None

    with pytest.raises(ConfigError, match="Later has a training_step of its own"):
        Later()


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True: .*batch size"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1: "),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0: "),
        ({"torch_empty_cache_steps": 2}, "torch_empty_cache_steps=2: "),
        ({"eval_use_gather_object": True}, "eval_use_gather_object=True: "),
        ({"save_on_each_node": True}, "save_on_each_node=True: "),
        ({"bf16_full_eval": True}, "bf16_full_eval=True: "),
        ({"debug": "underflow_overflow"}, "debug="),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
        ({CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"offload": True}}, "offload"),
        ({CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"context_fn": 1}}, "context_fn"),
        ({"torch_compile_backend": "eager"}, "stages are compiled by inductor"),
        ({"torch_compile_mode": "max-autotune"}, "in the default mode"),
    ],
)
def test_arguments_that_cannot_be_kept_are_refused(tmp_path, changes, says):
    with pytest.raises(ConfigError, match=says) as caught:
        check_arguments(arguments(tmp_path, **changes), settings())
    assert "\n" not in str(caught.value)


def test_arguments_of_several_pipelines(tmp_path):
    def refused(mesh, says, **changes):
        args = arguments(tmp_path, **changes)
        with pytest.raises(ConfigError, match=says):
            check_arguments(args, settings(mesh))

    refused("pp=2", "is for 2 processes, 1 are running: start with torchrun --nproc-per-node 2")
    check_arguments(arguments(tmp_path), settings())


def test_arguments_become_options_of_the_engine(tmp_path):
    assert engine_options(arguments(tmp_path), settings(timeout=5.0)) == {
        "compile": False,
        "ac": "none",
        "timeout": 5.0,
    }
    for kwargs, ac in (
        (None, "full"),
        ({"use_reentrant": False}, "full"),
        ({"every_n_layers": 3}, "selective:3"),
        ({"selective": True}, "selective:op"),
    ):
        args = arguments(tmp_path, **{CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": kwargs})
        assert engine_options(args, settings())["ac"] == ac
        assert engine_options(args, settings(ac="none"))["ac"] == "none"


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_checkpointing_has_the_name_of_any_version_of_transformers(name):
    args = SimpleNamespace(torch_compile=False, **{name: True, f"{name}_kwargs": {"every_n_layers": 2}})
    assert engine_options(args, settings())["ac"] == "selective:2"
    setattr(args, name, False)
    assert engine_options(args, settings())["ac"] == "none"


def test_microbatches_divide_batches(tmp_path):
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    assert count_microbatches(args, settings()) == 4
    assert count_microbatches(args, settings(microbatches=8)) == 8
    with pytest.raises(ConfigError, match="microbatches=6: must be a multiple of gradient_accumulation_steps=4"):
        count_microbatches(args, settings(microbatches=6))
    with pytest.raises(ConfigError, match="microbatches=12: a step has 8 rows"):
        count_microbatches(args, settings(microbatches=12))
    args.padding_free = True
    with pytest.raises(ConfigError, match="use gradient_accumulation_steps=8"):
        count_microbatches(args, settings(microbatches=8))


def test_a_schedule_of_another_number_of_ranks_is_refused():
    made = PipelineSettings.create(zp.build("zbv", ranks=4, microbatches=8), "pp=2", None, None, {})
    with pytest.raises(ConfigError, match="zbv is for 4 ranks, the mesh has pp=2"):
        made.build_schedule(8)


def test_batches_are_divided_by_rows():
    batch = {"input_ids": torch.arange(15).view(5, 3), "labels": torch.arange(15).view(5, 3), "attention_mask": None}
    parts = list(divide(batch, 2, index=7))
    assert [part["input_ids"].tolist() for part in parts] == [
        batch["input_ids"][:3].tolist(),
        [[9, 10, 11], [12, 13, 14]],
    ]
    assert [part["batch"] for part in parts] == [7, 7]
    assert len(list(divide(batch, 8))) == 5
    with pytest.raises(ConfigError, match="a batch has pixel_values, which stages do not take"):
        list(divide(batch | {"pixel_values": torch.zeros(5, 3)}, 1))
    with pytest.raises(ConfigError, match="must have input_ids"):
        list(divide({"labels": torch.zeros(2, 2)}, 1))


def test_position_ids_without_a_mask_are_packed_rows():
    rows = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])
    assert borders(rows).tolist() == [0, 3, 5, 10]
    batch = {
        "input_ids": rows,
        "position_ids": rows,
        "labels": rows,
        "cu_seq_lens_q": torch.zeros(3),
        "max_length_q": 3,
    }
    whole, halves = list(divide(batch, 1)), list(divide(batch, 2))
    assert whole[0]["cu_seqlens"].tolist() == [0, 3, 5, 10]
    assert [half["cu_seqlens"].tolist() for half in halves] == [[0, 3, 5], [0, 5]]
    assert "cu_seqlens" not in next(divide(batch | {"attention_mask": torch.ones_like(rows)}, 1))


@pytest.fixture
def logits_and_microbatch():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 11, (3, 6), generator=generator)
    labels[0, :4] = labels[2, 5] = -100
    logits = torch.randn(3, 6, 11, generator=generator, dtype=torch.float64)
    return logits, {"labels": labels, "batch": 2}


def test_the_loss_is_that_of_transformers(logits_and_microbatch):
    logits, microbatch = logits_and_microbatch
    total, count = TokenLoss()(logits, microbatch)
    assert count == TokenLoss().count(microbatch) == 11
    want = ForCausalLMLoss(logits, microbatch["labels"], 11, num_items_in_batch=torch.tensor(100))
    torch.testing.assert_close(total / 100, want.double(), rtol=1e-6, atol=0)  # transformers rounds to float32
    shifted = torch.nn.functional.pad(microbatch["labels"], (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(TokenLoss()(logits, microbatch | {"shift_labels": shifted})[0], total)


def test_a_loss_function_of_the_user_gets_logits_and_tokens(logits_and_microbatch):
    logits, microbatch = logits_and_microbatch

    def function(outputs, labels, num_items_in_batch):
        return ForCausalLMLoss(outputs.logits, labels, 11, num_items_in_batch=num_items_in_batch)

    total, count = TokenLoss(function, num_items=100.0)(logits, microbatch)
    assert count == 11
    torch.testing.assert_close(total.double(), TokenLoss()(logits, microbatch)[0], rtol=1e-6, atol=0)


def test_metrics_are_sums_over_tokens_with_a_loss(logits_and_microbatch):
    logits, microbatch = logits_and_microbatch
    _, count, metrics = TokenLoss(has_metrics=True)(logits, microbatch)
    mask = microbatch["labels"][:, 1:] != -100
    predicting = torch.distributions.Categorical(logits=logits[:, :-1][mask].float())
    assert float(metrics["entropy.2"]) == pytest.approx(float(predicting.entropy().sum()), rel=1e-5)
    correct = (logits[:, :-1].argmax(-1) == microbatch["labels"][:, 1:])[mask].sum()
    assert (int(metrics["correct.2"]), int(metrics["tokens.2"])) == (int(correct), int(count))


def test_a_router_loss_is_added_to_the_mean(logits_and_microbatch):
    logits, microbatch = logits_and_microbatch
    plain = TokenLoss()(logits, microbatch)[0]
    total = TokenLoss(num_items=100.0, router_weight=0.5)((logits, torch.tensor(3.0)), microbatch)[0]
    assert float((total - plain) / 100) == pytest.approx(1.5)


def pairs(num_pairs=3, length=5):
    rows = torch.arange(2 * num_pairs * length).view(2 * num_pairs, length)
    mask = torch.tensor([[0, 0, 1, 1, 1]] * num_pairs + [[0, 0, 1, 1, 0]] * num_pairs)
    return {
        "input_ids": rows,
        "attention_mask": torch.ones_like(rows),
        "completion_mask": mask,
        "ref_chosen_logps": torch.arange(num_pairs) / 10,
        "ref_rejected_logps": -torch.arange(num_pairs) / 10,
    }


def test_microbatches_have_whole_pairs():
    batch = pairs()
    first, second = divide_pairs(batch, 2, index=4)
    assert first["input_ids"].tolist() == batch["input_ids"][[0, 1, 3, 4]].tolist()
    assert second["input_ids"].tolist() == batch["input_ids"][[2, 5]].tolist()
    assert second["ref_chosen_logps"].tolist() == batch["ref_chosen_logps"][[2]].tolist()
    assert (first[WEIGHT], second[WEIGHT]) == pytest.approx((2 / 3, 1 / 3))
    assert second["labels"].tolist()[1] == [-100, -100, 27, 28, -100]
    assert set(inputs_of(first)) == set(batch)
    assert count_tokens(first) == {"chosen": 6, "rejected": 4, "tokens": 10, "pairs": 2}
    assert [len(one["input_ids"]) for one in divide_pairs(batch, 8)] == [2, 2, 2]
    kept = keep_pairs(batch, 2)
    assert kept["input_ids"].tolist() == batch["input_ids"][[0, 1, 3, 4]].tolist()
    with pytest.raises(ConfigError, match="a batch has pixel_values, which stages do not take"):
        list(divide_pairs({**batch, "pixel_values": torch.ones(6)}, 2))


def test_scores_are_those_of_the_distribution():
    torch.manual_seed(0)
    logits = torch.randn(2, 6, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(11, (2, 6))
    labels[0, :3] = labels[1, 5:] = -100
    found, mask = score(logits, labels), labels[:, 1:] != -100
    expected = torch.distributions.Categorical(logits=logits[:, :-1])
    chosen = expected.log_prob(labels[:, 1:].clamp(min=0))
    torch.testing.assert_close(found.log_probs.double(), chosen * mask, atol=1e-6, rtol=0)
    torch.testing.assert_close(found.entropy.double(), expected.entropy() * mask, atol=1e-5, rtol=0)
    squares = expected.probs.square().sum(-1).log()
    torch.testing.assert_close(found.log_sum_sq_probs.double(), squares * mask, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.mean_logits.double(), logits[:, :-1].mean(-1) * mask, atol=1e-6, rtol=0)
    assert torch.equal(found.is_top1, (logits[:, :-1].argmax(-1) == labels[:, 1:]) & mask)
    assert torch.equal(score_tokens(logits, {"labels": labels}), found.log_probs)
    found.log_probs.sum().backward()
    assert logits.grad[0, :2].abs().max() == 0
