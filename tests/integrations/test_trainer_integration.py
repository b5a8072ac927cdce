"""transformers' Trainer and TRL's SFTTrainer on a pipeline, beside the same in one process without zeropipe."""

import json
import shutil
import subprocess
import sys

import peft
import pytest
import torch
import trainer_cases
import transformers
import trl
from trainer_cases import Case

from zeropipe.errors import ConfigError
from zeropipe.integrations.trainer import pipelined

pytestmark = pytest.mark.timeout(1000)  # each process imports TRL
CASES = "trainer_cases"  # where ranks find their functions
TOLERANCE = 1e-5


TRAINED = {"loss", "grad_norm", "learning_rate", "epoch", "train_loss", "total_flos", "eval_loss"}
LOGGED_BY_TRL = {"entropy", "mean_token_accuracy", "num_tokens"}


def require_equal(seen, want, names=TRAINED):
    """The logs of all ranks, and the weights, are those of one process."""
    for one in seen:
        assert [sorted(names & log.keys()) for log in one.logs] == [sorted(names & log.keys()) for log in want.logs]
        for log, other in zip(one.logs, want.logs):
            for name in names & log.keys():
                assert log[name] == pytest.approx(other[name], rel=TOLERANCE, abs=TOLERANCE), (name, log, other)
    weights = seen[0].weights
    assert weights.keys() >= want.weights.keys() - {"lm_head.weight"}
    for name, weight in weights.items():
        torch.testing.assert_close(weight, want.weights[name], rtol=0, atol=TOLERANCE)


HALVED = {"gradient_accumulation_steps": 2}  # of two pipelines: the same rows per step


@pytest.fixture(scope="module")
def trainer_alone(tmp_path_factory):
    return trainer_cases.plain(Case(str(tmp_path_factory.mktemp("alone"))))


@pytest.mark.parametrize(
    "changes",
    [{}, {"schedule": "zbv"}, {"microbatches": 8}, {"schedule": "zbv", "args": {"gradient_checkpointing": True}}],
    ids=["1f1b", "zbv", "batches divided", "checkpointed"],
)
def test_trainer_equals_one_process(two, trainer_alone, tmp_path, changes):
    seen = two.run(trainer_cases.ours, Case(str(tmp_path))._replace(**changes), timeout=300)
    require_equal(seen, trainer_alone)
    assert seen[0].memory == 0


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_trainer_with_shards_equals_one_process(four, trainer_alone, tmp_path, schedule):
    case = Case(str(tmp_path), schedule, "pp=2,dp_shard=2", args=HALVED)
    require_equal(four.run(trainer_cases.ours, case, timeout=300), trainer_alone)


@pytest.mark.parametrize("mesh", ["pp=2,dp_replicate=2", "pp=2,tp=2"])
def test_other_meshes_equal_one_process(four, trainer_alone, tmp_path, mesh):
    case = Case(str(tmp_path), "zbv", mesh, args=HALVED if "dp" in mesh else {})
    require_equal(four.run(trainer_cases.ours, case, timeout=300), trainer_alone)


def test_steps_at_the_end_of_an_epoch_are_shorter(two, tmp_path):
    """48 rows are 6 steps of 7 rows and one of 6, with evaluation after each epoch."""
    args = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 7, "max_steps": -1, "num_train_epochs": 2}
    case = Case(str(tmp_path), "zbv", tied=False, args=args | {"eval_strategy": "epoch", "lr_scheduler_type": "cosine"})
    require_equal(two.run(trainer_cases.ours, case, timeout=300), trainer_cases.plain(case))


EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 4}


@pytest.mark.parametrize("data", ["", "text"], ids=["Trainer", "SFTTrainer"])
def test_metrics_get_the_logits_of_one_process(two, tmp_path, data):
    case = Case(str(tmp_path), "zbv", data=data, metrics=True, args=EVALUATED)
    names = TRAINED | {"eval_accuracy", "eval_mean", *(f"eval_{name}" for name in LOGGED_BY_TRL)}
    require_equal(two.run(trainer_cases.ours, case, timeout=300), trainer_cases.plain(case), names)


def test_rows_that_fill_up_an_evaluation_do_not_count(four, tmp_path):
    """Two pipelines evaluate 11 rows: 2 + 2, 2 + 2, and 2 + 1 and a repeated one."""
    case = Case(str(tmp_path), "zbv", metrics=True, args=EVALUATED)
    halved = case.args | HALVED | {"per_device_eval_batch_size": 2}
    seen = four.run(trainer_cases.ours, case._replace(mesh="pp=2,dp_shard=2", args=halved), timeout=300)
    require_equal(seen, trainer_cases.plain(case), TRAINED | {"eval_accuracy", "eval_mean"})


SFT = {
    "texts": {"data": "text"},
    "completions": {"data": "prompt"},
    "answers of a chat": {"data": "chat", "args": {"assistant_only_loss": True}},
    "dft": {"data": "text", "args": {"loss_type": "dft"}},
    "packed": {"data": "text", "args": {"packing": True, "per_device_train_batch_size": 1}},
    "padding-free": {"data": "text", "args": {"padding_free": True, "max_length": None}},
    "LoRA": {"data": "text", "lora": True},
    "LoRA, checkpointed": {"data": "text", "lora": True, "args": {"gradient_checkpointing": True}},
}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("changes", SFT.values(), ids=SFT)
def test_sft_equals_one_process(two, tmp_path, schedule, changes):
    case = Case(str(tmp_path), schedule)._replace(**changes)
    names = TRAINED | LOGGED_BY_TRL
    require_equal(two.run(trainer_cases.ours, case, timeout=300), trainer_cases.plain(case), names)


@pytest.mark.parametrize("name", ["texts", "packed", "LoRA"])
def test_sft_with_shards_equals_one_process(four, tmp_path, name):
    case = Case(str(tmp_path), "zbv")._replace(**SFT[name])
    halved = case._replace(mesh="pp=2,dp_shard=2", args=case.args | HALVED)
    names = TRAINED - {"epoch"} | {"num_tokens"}  # an odd number of batches is no whole number of both
    require_equal(four.run(trainer_cases.ours, halved, timeout=300), trainer_cases.plain(case), names)


@pytest.mark.parametrize("data", ["", "text"], ids=["Trainer", "SFTTrainer"])
def test_router_loss_of_experts_equals_one_process(two, tmp_path, data):
    case = Case(str(tmp_path), "zbv", data=data, experts=True)
    require_equal(two.run(trainer_cases.ours, case, timeout=300), trainer_cases.plain(case))


def test_router_loss_of_two_pipelines_equals_one_process(four, tmp_path):
    case = Case(str(tmp_path), "zbv", data="text", experts=True)
    halved = case._replace(mesh="pp=2,dp_shard=2", args=HALVED)
    require_equal(four.run(trainer_cases.ours, halved, timeout=300), trainer_cases.plain(case))


@pytest.mark.timeout(1500)
def test_bfloat16_and_compiled_stages_come_close(two, tmp_path):
    case = Case(str(tmp_path), "zbv", args={"bf16": True})
    want = trainer_cases.plain(case)
    compiled = case._replace(args=case.args | {"torch_compile": True, "gradient_checkpointing": True})
    for seen in (*two.run(trainer_cases.ours, case, timeout=300), *two.run(trainer_cases.ours, compiled, timeout=900)):
        for log, other in zip(seen.logs, want.logs):
            if "loss" in log:
                assert log["loss"] == pytest.approx(other["loss"], rel=2e-3)
                assert log["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-2)


LOGGED_BY_DPO = LOGGED_BY_TRL | {
    "logits/chosen", "logits/rejected", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins",
    "logps/chosen", "logps/rejected",
}  # fmt: skip
DPO_NAMES = TRAINED | LOGGED_BY_DPO | {f"eval_{name}" for name in LOGGED_BY_DPO}
DPO = {
    "reference": {"reference": True},
    "1f1b": {"schedule": "1f1b", "reference": True},
    "precomputed": {"args": {"precompute_ref_log_probs": True}},
    "precomputed by a reference": {"reference": True, "args": {"precompute_ref_log_probs": True}},
    "LoRA": {"lora": True},
    "LoRA, checkpointed": {"lora": True, "args": {"gradient_checkpointing": True}},
    "batches divided": {"reference": True, "microbatches": 8},
    "several losses": {
        "reference": True,
        "microbatches": 8,
        "args": {"loss_type": ["ipo", "apo_zero", "nca_pair"], "loss_weights": [1.0, 0.5, 0.2], "use_weighting": True},
    },
    "losses of a batch": {"reference": True, "args": {"loss_type": ["aot", "sft"], "ld_alpha": 0.5}},
}


@pytest.mark.parametrize("changes", DPO.values(), ids=DPO)
def test_dpo_equals_one_process(two, tmp_path, changes):
    case = Case(str(tmp_path), "zbv", data="pairs")._replace(**changes)
    case = case._replace(args=case.args | EVALUATED)
    # before the first step the model is the reference, and rounding decides which of two equal rewards is larger
    names = DPO_NAMES - {"rewards/accuracies"} if case.args.get("precompute_ref_log_probs") else DPO_NAMES
    require_equal(two.run(trainer_cases.ours, case, timeout=300), trainer_cases.plain(case), names)


@pytest.mark.parametrize("name", ["reference", "precomputed", "LoRA"])
def test_dpo_with_shards_equals_one_process(four, tmp_path, name):
    case = Case(str(tmp_path), "zbv", data="pairs")._replace(**DPO[name])
    case = case._replace(args=case.args | EVALUATED)
    halved = case.args | HALVED | {"per_device_eval_batch_size": 2}
    seen = four.run(trainer_cases.ours, case._replace(mesh="pp=2,dp_shard=2", args=halved), timeout=300)
    # as TRL does on two processes, batches of a step are averaged together
    names = DPO_NAMES - {"epoch", "entropy", "logits/chosen", "logits/rejected", "mean_token_accuracy"}
    require_equal(seen, trainer_cases.plain(case), names - {"rewards/accuracies"} if name != "reference" else names)


@pytest.mark.parametrize("kind", [trl.GRPOTrainer, trl.RLOOTrainer], ids=lambda kind: kind.__name__)
def test_trainers_that_generate_are_refused(kind):
    with pytest.raises(ConfigError, match=r"generates completions with the full model.*zeropipe\.integrations\.verl"):
        pipelined(kind, mesh="pp=2")


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"experts": True, "reference": True}, "router_aux_loss_coef: .* set it to 0.0"),
        ({"metrics": True, "reference": True}, "compute_metrics: .*eval_rewards"),
        ({"reference": True, "args": {"sync_ref_model": True}}, "sync_ref_model=True: .*leave it out"),
        (
            {"reference": True, "microbatches": 8, "args": {"loss_type": ["sigmoid", "aot"]}},
            "loss_type='aot': .*gradient_accumulation_steps=8",
        ),
    ],
)
def test_what_dpo_cannot_do_on_a_pipeline_is_refused(tmp_path, changes, says):
    """In this process: before anything is cut."""
    trainer_cases.reset_states()
    trainer = trainer_cases.make_trainer(Case(str(tmp_path), data="pairs")._replace(**changes))
    made = pipelined(trl.DPOTrainer, mesh="pp=2", microbatches=changes.get("microbatches"))
    trainer.__class__ = made
    trainer._num_microbatches = changes.get("microbatches", 4)
    with pytest.raises(ConfigError, match=says) as caught:
        trainer._check()
    assert "\n" not in str(caught.value)


SAVED = {"save_strategy": "steps", "save_steps": 2}


@pytest.mark.parametrize(
    "kind",
    [{}, {"data": "text", "lora": True}, {"data": "pairs", "reference": True}],
    ids=["Trainer", "SFTTrainer with LoRA", "DPOTrainer"],
)
def test_runs_resume_on_another_layout(two, four, tmp_path, kind):
    case = Case(str(tmp_path), "zbv", args=SAVED)._replace(**kind)
    want = trainer_cases.plain(case._replace(output=str(tmp_path / "alone")))
    halved = case._replace(mesh="pp=2,dp_shard=2", args=case.args | HALVED)
    require_equal(four.run(trainer_cases.ours, halved, timeout=300), want)
    for name in ("checkpoint-4", "checkpoint-5"):
        shutil.rmtree(tmp_path / name)
    resumed = two.run(trainer_cases.ours, case._replace(schedule="1f1b", resume=True), timeout=300)
    require_equal(resumed, want, TRAINED - {"train_loss"})  # that of the steps after the checkpoint
    require_loadable(tmp_path, case, want)
    require_loadable(tmp_path / "checkpoint-5", case, want)


def require_loadable(directory, case, want):
    """`from_pretrained` and peft load what `save_model` wrote, with the weights of one process."""
    if case.lora:
        loaded = peft.PeftModel.from_pretrained(trainer_cases.make_model(case), directory).base_model.model
    else:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(directory)
    tensors = loaded.state_dict()
    assert tensors.keys() == want.weights.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, want.weights[name], rtol=0, atol=TOLERANCE)
    if case.data:
        assert len(transformers.AutoTokenizer.from_pretrained(directory)) == len(trainer_cases.WORDS)


def test_the_best_model_is_loaded_at_the_end(two, tmp_path):
    args = SAVED | {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    case = Case(str(tmp_path / "ours"), "zbv", args=args)
    want = trainer_cases.plain(case._replace(output=str(tmp_path / "alone")))
    seen = two.run(trainer_cases.ours, case, timeout=300)
    losses = [log["eval_loss"] for log in want.logs if "eval_loss" in log]
    assert losses[0] < losses[1]  # the best is not the last
    for name, weight in seen[0].weights.items():
        torch.testing.assert_close(weight, want.weights[name], rtol=0, atol=TOLERANCE)


def run_torchrun(output, killed_after, resume="new"):
    script = [trainer_cases.__file__, str(output), str(killed_after), resume]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    return subprocess.run(command, capture_output=True, text=True, timeout=480)


def test_a_killed_run_resumes(tmp_path):
    """Killed after step 3 it goes on from step 2, also past a later checkpoint that was never completed."""
    want = trainer_cases.plain(Case(str(tmp_path / "alone")))
    killed = run_torchrun(tmp_path / "ours", 3)
    assert killed.returncode != 0
    assert (tmp_path / "ours" / "checkpoint-2" / "trainer_state.json").exists()
    half = tmp_path / "ours" / "checkpoint-3"
    shutil.copytree(tmp_path / "ours" / "checkpoint-2", half)
    (half / "trainer_state.json").unlink()
    resumed = run_torchrun(tmp_path / "ours", 0, "resume")
    assert resumed.returncode == 0, resumed.stderr
    state = json.loads((tmp_path / "ours" / "checkpoint-5" / "trainer_state.json").read_text())
    losses = [log["loss"] for log in state["log_history"] if "loss" in log]
    assert losses == pytest.approx([log["loss"] for log in want.logs[:-1]], rel=TOLERANCE)
    require_loadable(tmp_path / "ours", Case(""), want)
