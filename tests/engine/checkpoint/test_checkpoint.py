"""A checkpoint of one layout goes on in any other, as if nothing had happened."""

from __future__ import annotations

import json
from collections import Counter

import pytest

pytest.importorskip("torch")

import checkpoint_cases as cases
from checkpoint_chain import chain
from engine_helpers import TOLERANCE, largest, ranks

import zeropipe as zp
from zeropipe.engine import load_checkpoint, save_checkpoint
from zeropipe.engine.checkpoint.manifest import decode, encode, read_manifest


def test_from_layout_to_layout(tmp_path):
    layouts = [
        ("zbv", {"pp": 4}), ("1f1b", {"pp": 2, "dp_shard": 2}), ("dualpipe", {"pp": 4}),
        ("1f1b", {"dp_replicate": 2, "dp_shard": 2}),
    ]  # fmt: skip
    seen = chain(tmp_path, cases.Model(tied=False), layouts)
    assert max(seen) < TOLERANCE, seen


def test_from_layout_to_layout_with_tensor_parallelism(tmp_path):
    layouts = [("1f1b", {"pp": 2, "tp": 2}), ("zbv", {"pp": 2, "dp_shard": 2})]
    seen = chain(tmp_path, cases.Model(tied=False, config={}), layouts)
    assert max(seen) < TOLERANCE, seen


@pytest.mark.full
def test_from_shards_over_parts_of_sequences(tmp_path):
    layouts = [("1f1b", {"dp_shard": 2, "cp": 2}), ("zbv", {"pp": 2, "cp": 2}), ("1f1b", {"pp": 4})]
    seen = chain(tmp_path, cases.Model(tied=False, config={}), layouts)
    assert max(seen) < TOLERANCE, seen


def test_tied_weights_are_saved_once_and_in_the_background(tmp_path):
    layouts = [("1f1b", {"pp": 4}), ("zbv", {"pp": 2, "dp_shard": 2}), ("1f1b", {"dp_replicate": 4})]
    seen = chain(tmp_path, cases.Model(tied=True), layouts, asynchronous=True)
    assert max(seen) < TOLERANCE, seen
    manifest = read_manifest(tmp_path / "checkpoint")
    assert manifest.model["ties"] == {"7.weight": "0.weight"}
    assert "optim.0.weight.exp_avg" in manifest.tensors
    assert not [name for name in manifest.tensors if "7.weight" in name]


@pytest.mark.full
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_twelve_pairs_of_layouts(tmp_path, tied):
    layouts = [
        ("1f1b", {"pp": 4}), ("1f1b", {"pp": 2, "dp_shard": 2}), ("dualpipe", {"pp": 4}), ("zbv", {"pp": 4}),
        ("1f1b", {"dp_shard": 4}), ("interleaved", {"pp": 2, "dp_replicate": 2}), ("dualpipev", {"pp": 4}),
        ("1f1b", {"dp_replicate": 2, "dp_shard": 2}), ("chimera", {"pp": 4}), ("zbv", {"pp": 2, "dp_shard": 2}),
    ]  # fmt: skip
    layouts[2:2] = [("1f1b", {"pp": 2, "tp": 2}), ("zbv", {"pp": 2, "dp_shard": 2, "tp": 2}), ("1f1b", {"tp": 4})]
    model = cases.Model(tied, {"num_hidden_layers": 8, "num_key_value_heads": 4})
    seen = chain(tmp_path, model, layouts)
    assert len(seen) == 13
    assert max(seen) < TOLERANCE, seen


@pytest.mark.parametrize(
    "names",
    [
        ["momentum", "adafactor", "two"],
        ["masters"],
        pytest.param(["sgd", "adam", "adamw, fused", "nadam", "rmsprop"], marks=pytest.mark.full),
    ],
    ids=", ".join,
)
def test_any_optimizer_goes_on(tmp_path, names):
    one, other = (zp.build(n, ranks=4, microbatches=6) for n in ("dualpipe", "interleaved"))
    seen = largest(ranks(4).run(cases.go_on, one, other, names, str(tmp_path)))
    # in 16 bits gradients of the two orders differ in their last place
    assert max(seen.values()) < (0.02 if names == ["masters"] else TOLERANCE), seen


def test_what_does_not_fit_is_refused(tmp_path):
    every = ranks(4).run(cases.refuses, zp.build("zbv", ranks=4, microbatches=4), str(tmp_path))
    assert all(seen == every[0] for seen in every), "all ranks say the same"
    for key, part in {
        "step": "step=1.5: must be an integer or None",
        "extra": "extra['a'][0] is a object",
        "differs": "rank 1 saves another path, step or extra than rank 0",
        "not alike": "the optimizers differ: rank 0 saves Adam, rank 1 saves SGD; use the same kind on all ranks",
        "one has none": "rank 1 saves no optimizer, rank 0 saves one; pass the optimizer of ",
        "no optimizers": "the optimizer is a NoneType: must be a torch optimizer, MasterWeights, or a list of them",
        "twice": "two optimizers have the parameter",
        "other of two": "the checkpoint is of Muon, the optimizer of ",
        "stranger": "the optimizer has a parameter of shape (3,) that is in no stage",
        "half": "rank 1 loads no optimizer, rank 0 loads one; pass the optimizer of ",
        "nothing": "is not a checkpoint, as it has no checkpoint.json",
        "no optimizer": "the checkpoint has no optimizer state; load it without an optimizer",
        "kind": "the checkpoint is of Adam, the optimizer is SGD",
        "fewer": "the checkpoint has optimizer state of 0.",
        "random": "the checkpoint has no random states",
        "masters": "the checkpoint has a float32 copy of 0.down.weight (and 7 more); load it with MasterWeights",
        "no masters": "the checkpoint has no float32 copy of 0.down.weight (and 7 more); load it without MasterWeights",
        "dtype": "is float64 in",
        "names": "has no 0.bias (and 15 more): it is a checkpoint of another model",
    }.items():
        assert part in every[0][key], (key, every[0][key])
        assert len(every[0][key].splitlines()) == 1


def test_a_rank_that_cannot_write(tmp_path):
    every = ranks(4).run(cases.fails, zp.build("1f1b", ranks=4, microbatches=4), str(tmp_path / "c"))
    disk = "No space left on device"
    first = f"the checkpoint {tmp_path / 'c'} was not saved: rank 2: {disk}"
    assert every == [[first, first, first, first.replace("rank 2", "rank 0")]] * 4
    assert read_manifest(tmp_path / "c").step == 7
    assert len(list((tmp_path / "c").iterdir())) == 2, "nothing is left of what failed"


def test_random_numbers_go_on(tmp_path):
    assert all(ranks(4).run(cases.numbers_go_on, zp.build("1f1b", ranks=4, microbatches=4), str(tmp_path / "c")))


@pytest.mark.parametrize(
    "value",
    [None, True, 3, -2.5, "ü", [1, (2, [3])], {"a": {1: 2, "b": ()}}, {"__is__": 3}, Counter({5: 2}), float("inf")],
    ids=str,
)
def test_extra_values_come_back_as_they_were(value):
    tensors: dict = {}
    back = decode(json.loads(json.dumps(encode(value, "extra", tensors))), tensors)
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("call", [save_checkpoint, load_checkpoint])
def test_a_folder_in_the_engines_place(call):
    with pytest.raises(
        zp.ConfigError, match=r"engine='run': must be an Engine; pass the folder, then the Engine, then its optimizer"
    ):
        call(object(), "run")
