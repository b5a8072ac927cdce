"""The optimizer that the trainer makes."""

import order_cases as cases
import pytest
from engine_helpers import ranks


@pytest.mark.parametrize("kind, fused", [("adamw", "yes"), ("sgd", "auto")])
def test_parameters_may_be_sharded_or_whole(kind, fused):
    """torch's fused kernels take no mixture of both."""
    for decays, error in ranks(2).run(cases.fused_optimizer, kind, fused):
        assert decays == [0.1, 0.1, 0.0, 0.0]  # sharded and whole, with decay and without
        assert error < 1e-6  # of weights in float32


def test_what_torch_has_no_fused_kernel_for_is_refused():
    for said in ranks(2).run(cases.fused_optimizer, "sgd", "yes"):
        assert said == "optimizer.fused='yes': torch's fused sgd takes no sharded parameters; use auto"
