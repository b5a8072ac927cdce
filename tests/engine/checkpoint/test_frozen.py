"""The fingerprint of frozen weights: the same on every layout, another one for other weights."""

from __future__ import annotations

import json
import random
from pathlib import Path

import frozen_cases as cases
import pytest
import torch
from engine_helpers import ranks

from zeropipe.engine.checkpoint import fingerprint

DTYPES = [
    torch.uint8, torch.int8, torch.bool, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.int32,
    torch.float64, torch.int64, torch.complex64, torch.complex128,
]  # fmt: skip
SHAPES = [(6,), (7, 5), (3, 1, 5), (1, 13), (4, 3, 2, 3)]


def drawn(shape, dtype):
    bits = torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return bits.bool().squeeze(-1) if dtype is torch.bool else bits.view(dtype).squeeze(-1)


def boxes(tensor, offsets, randomly):
    """A tensor cut into boxes anywhere, some of them empty."""
    if randomly.random() < 0.3 or tensor.numel() == 0:
        return [(tensor, offsets)]
    dim = randomly.randrange(tensor.ndim)
    at = randomly.randint(0, tensor.shape[dim])
    parts = tensor.split([at, tensor.shape[dim] - at], dim)
    starts = (offsets, tuple(start + at * (d == dim) for d, start in enumerate(offsets)))
    return [box for part, start in zip(parts, starts) for box in boxes(part, start, randomly)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_of_any_pieces_is_that_of_the_tensor(dtype, monkeypatch):
    for shape in SHAPES:
        tensor = drawn(shape, dtype)
        zeros = (0,) * len(shape)
        whole = fingerprint.position_sum(tensor, zeros)
        for seed in range(8):
            found = boxes(tensor, zeros, random.Random(seed))
            assert sum(fingerprint.position_sum(*box) for box in found) % 2**64 == whole
        assert fingerprint.position_sum(tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor, zeros) == whole
        with monkeypatch.context() as patched:  # large tensors are looked at in parts
            patched.setattr(fingerprint, "_CHUNK_SIZES", {"cpu": 2})
            assert fingerprint.position_sum(tensor, zeros) == whole


@pytest.mark.parametrize("dtype", [one for one in DTYPES if one is not torch.float8_e4m3fn], ids=str)
def test_other_values_and_other_orders_have_other_sums(dtype):
    tensor = drawn((6, 4, 5), dtype)
    views = [tensor, tensor.flip(0), tensor.flip(1), tensor.flip(2), tensor.roll(1, 0), tensor.transpose(0, 1)]
    views += [tensor.reshape(4, 6, 5), tensor.reshape(6, 20), tensor.reshape(120)]
    if dtype is not torch.bool:
        views.append(-tensor)
        views.append(torch.cat([-tensor[:1], tensor[1:]]))
        views.append(torch.cat([-tensor[:2], tensor[2:]]))  # also an even number of signs
    flat = tensor.reshape(-1)
    for _ in range(200):
        one, other = torch.randint(120, (2,)).tolist()
        if not torch.equal(flat[one].view(-1), flat[other].view(-1)):
            views.append(swapped(flat, one, other).reshape(tensor.shape))
    for place in range(120):
        changed = flat.clone()
        as_bytes = changed.view(torch.uint8)
        as_bytes[place * dtype.itemsize] ^= 1
        views.append(changed.reshape(tensor.shape))
    sums = {}
    for view in views:
        key = (tuple(view.shape), bytes_of(view))
        assert sums.setdefault(fingerprint.position_sum(view, (0,) * view.ndim), key) == key


def swapped(flat, one, other):
    found = flat.clone()
    found[one], found[other] = flat[other], flat[one]
    return found


def bytes_of(tensor):
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist())


CHANGES = ("rows", "columns", "signs", "swapped", "one")


@pytest.mark.parametrize(
    ("model", "dtype", "before", "after"),
    [
        ("modules", torch.bfloat16, {"pp": 2}, [{"dp_shard": 2}, {"pp": 2, "dp_shard": 2}]),
        ("modules", torch.float32, {"dp_shard": 4}, [{"pp": 2}]),
        ("llama", torch.bfloat16, {"pp": 2, "dp_shard": 2}, [{"pp": 2, "tp": 2}]),
    ],
    ids=["bf16", "float32", "llama"],
)
def test_a_checkpoint_goes_with_its_frozen_weights_only(tmp_path, model, dtype, before, after):
    path = str(tmp_path / "saved")
    assert len(set(on(before).run(cases.saved, model, before, dtype, path))) == 1
    for sizes in after:
        assert set(on(sizes).run(cases.loaded, model, sizes, dtype, path, None)) == {""}
        changes = CHANGES if sizes is after[0] else CHANGES[:1]
        for change in changes:
            told = on(sizes).run(cases.loaded, model, sizes, dtype, path, change)
            assert all("has other frozen weights than the model" in one for one in told), change


def test_checkpoints_of_older_versions(tmp_path):
    """They are compared as before; where that depends on the layout, a difference is a warning."""
    cut, whole = {"dp_shard": 2}, {"pp": 2}
    for dtype, sizes, other in ((torch.float32, cut, "refused"), (torch.bfloat16, cut, "cannot be compared"),
                                (torch.bfloat16, whole, "refused")):  # fmt: skip
        path = str(tmp_path / f"{dtype}{other}")
        (base, *_) = on(whole).run(cases.saved, "modules", whole, dtype, path, True)
        assert ":" not in base
        told = on(sizes).run(cases.loaded, "modules", sizes, dtype, path, None)[0]
        assert told == "" if other == "refused" else other in told
        assert other in on(sizes).run(cases.loaded, "modules", sizes, dtype, path, "one")[0]
    file = Path(path) / "checkpoint.json"
    manifest = json.loads(file.read_text())
    manifest["model"]["base"] = "0" * 32
    file.write_text(json.dumps(manifest))
    assert "refused" in on(whole).run(cases.loaded, "modules", whole, torch.bfloat16, path, None)[0]


def on(sizes):
    number = 1
    for size in sizes.values():
        number *= size
    return ranks(number)
