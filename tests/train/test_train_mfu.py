"""MFU of a training run, on GPUs that are not here."""

import pytest
import torch

from zeropipe.train.config.tables import RunConfig
from zeropipe.train.loop.metrics import Memory, Utilization, format_progress


def utilization(monkeypatch, name, pp=4, gpus=4, lora=None, sequence=4096, **model):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = RunConfig.model_validate({
        "model": {"path": "qwen3-8b", "weights": "random", "dtype": "bfloat16", **model}, "mesh": {"pp": pp},
        "data": {"sequence": sequence}, "train": {"steps": 1}, "lora": lora,
    })  # fmt: skip
    return Utilization(config, torch.device("cuda"))


def test_mfu_is_six_flops_per_parameter_and_token_and_attention(monkeypatch):
    found = utilization(monkeypatch, "NVIDIA H200").compute([4096], 1.0)
    layer = 4096 * (2 * 32 * 128 + 2 * 8 * 128) + 3 * 4096 * 12288
    attention = 3 * 2 * 4096 * 32 * 128  # causal: half of all pairs, two products, forward and twice backward
    tokens = 4096 * (6 * (36 * layer + 4096 * 151936) + 36 * attention)
    assert found == pytest.approx(tokens / 4 / 989.4e12, rel=0.02)


def test_a_frozen_model_has_no_flops_of_weight_gradients(monkeypatch):
    """Products with weights: forward and the gradient of their input. Attention has no weights: nothing is saved."""
    found = utilization(monkeypatch, "NVIDIA H200", lora={"rank": 4}).compute([4096], 1.0)
    layer = 4096 * (2 * 32 * 128 + 2 * 8 * 128) + 3 * 4096 * 12288
    attention = 3 * 2 * 4096 * 32 * 128
    tokens = 4096 * (4 * (36 * layer + 4096 * 151936) + 36 * attention)
    assert found == pytest.approx(tokens / 4 / 989.4e12, rel=0.02)
    full = utilization(monkeypatch, "NVIDIA H200").compute([4096], 1.0)
    assert 0.66 < found / full < 0.72


@pytest.mark.parametrize("path", ["qwen3-8b", pytest.param("gpt-oss-20b", marks=pytest.mark.full)])
def test_packed_samples_attend_within_themselves(monkeypatch, path):
    """As in a run whose rows have that length; with windows, too."""
    lengths = [512, 1024, 512, 2048]
    packed = utilization(monkeypatch, "NVIDIA H200", path=path).compute(lengths, 1.0)
    alone = [
        utilization(monkeypatch, "NVIDIA H200", path=path, sequence=length).compute([length], 1.0) for length in lengths
    ]
    assert packed == pytest.approx(sum(alone), rel=0.005)
    assert packed < 0.99 * utilization(monkeypatch, "NVIDIA H200", path=path).compute([4096], 1.0)


def test_progress_names_both_numbers_of_tokens():
    values = {
        "step": 2, "loss": 1.5, "grad_norm": 0.25, "processed_tokens_per_second": 5000.0,
        "loss_tokens_per_second": 1000.0, "seconds": 0.5, "memory": 1e6,
    }  # fmt: skip
    assert format_progress(values, 4, 60.0) == (
        "step 2/4  loss 1.5000  norm 0.25  5,000 tokens/s processed  1,000 with a loss  0.5 s  1 MB  1:00 left"
    )


def test_progress_names_the_memory_that_is_reserved():
    values = {
        "step": 2, "loss": 1.5, "grad_norm": 0.25, "processed_tokens_per_second": 5000.0,
        "loss_tokens_per_second": 1000.0, "seconds": 0.5,
    }  # fmt: skip
    peaks = [Memory(3_000_000, 4_000_000), Memory(2_000_000, 5_000_000)]
    line = format_progress({**values, **Memory.largest(peaks).values()}, 4, 60.0)
    assert "  3 MB (5 MB reserved)  1:00 left" in line
    assert Memory.largest([Memory(1, None), Memory(2, None)]).values() == {"memory": 2}


def test_processes_that_share_a_gpu_count_once(monkeypatch):
    alone = utilization(monkeypatch, "NVIDIA H200", gpus=4).compute([4096], 1.0)
    shared = utilization(monkeypatch, "NVIDIA H200", gpus=1).compute([4096], 1.0)
    assert shared == pytest.approx(4 * alone)


@pytest.mark.parametrize("name", ["NVIDIA GeForce GTX 1080", "NVIDIA H100 PCIe"])
def test_a_gpu_that_is_not_known_has_none(monkeypatch, name):
    assert (utilization(monkeypatch, name).compute([4096], 1.0) is None) is ("GTX" in name)


def test_no_gpu():
    config = RunConfig.model_validate({"model": {"path": "tiny-qwen3", "weights": "random"}, "train": {"steps": 1}})
    assert Utilization(config, torch.device("cpu")).compute([4096], 1.0) is None
