"""MFU of a training run, on GPUs that are not here."""

import pytest
import torch

from zeropipe.train.config.tables import RunConfig
from zeropipe.train.loop.metrics import Utilization


def utilization(monkeypatch, name, pp=4, gpus=4, **model):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    config = RunConfig.model_validate({
        "model": {"path": "qwen3-8b", "weights": "random", "dtype": "bfloat16", **model}, "mesh": {"pp": pp},
        "data": {"sequence": 4096}, "train": {"steps": 1},
    })  # fmt: skip
    return Utilization(config, torch.device("cuda"))


def test_mfu_is_six_flops_per_parameter_and_token_and_attention(monkeypatch):
    found = utilization(monkeypatch, "NVIDIA H200").compute(4096, 1.0)
    layer = 4096 * (2 * 32 * 128 + 2 * 8 * 128) + 3 * 4096 * 12288
    attention = 3 * 2 * 4096 * 32 * 128  # causal: half of all pairs, two products, forward and twice backward
    tokens = 4096 * (6 * (36 * layer + 4096 * 151936) + 36 * attention)
    assert found == pytest.approx(tokens / 4 / 989.4e12, rel=0.02)


def test_processes_that_share_a_gpu_count_once(monkeypatch):
    alone = utilization(monkeypatch, "NVIDIA H200", gpus=4).compute(4096, 1.0)
    shared = utilization(monkeypatch, "NVIDIA H200", gpus=1).compute(4096, 1.0)
    assert shared == pytest.approx(4 * alone)


@pytest.mark.parametrize("name", ["NVIDIA GeForce GTX 1080", "NVIDIA H100 PCIe"])
def test_a_gpu_that_is_not_known_has_none(monkeypatch, name):
    assert (utilization(monkeypatch, name).compute(4096, 1.0) is None) is ("GTX" in name)


def test_no_gpu():
    config = RunConfig.model_validate({"model": {"path": "tiny-qwen3", "weights": "random"}, "train": {"steps": 1}})
    assert Utilization(config, torch.device("cpu")).compute(4096, 1.0) is None
