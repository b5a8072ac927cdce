"""How layers are spread over stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeropipe.core.model.layers import (
    format_counts,
    layer_counts,
    layer_ranges,
    num_stages_for,
    read_num_layers,
    require_layer_counts,
)
from zeropipe.errors import ConfigError


@pytest.mark.parametrize(
    "num_layers,num_stages,counts",
    [(4, 2, (2, 2)), (8, 4, (2, 3, 2, 1)), (6, 3, (2, 3, 1)), (5, 1, (5,)), (3, 4, (1, 1, 1, 0))],
)
def test_known_cuts(num_layers, num_stages, counts):
    assert layer_counts(num_layers, num_stages, first_less=1, last_less=1) == counts


@given(st.integers(1, 100), st.integers(1, 16), st.integers(0, 3), st.integers(0, 3))
def test_no_layer_is_lost(num_layers, num_stages, first_less, last_less):
    try:
        counts = layer_counts(num_layers, num_stages, first_less, last_less)
    except ConfigError:
        return
    assert sum(counts) == num_layers
    assert len(counts) == num_stages
    assert min(counts) >= 0
    assert [i for r in layer_ranges(counts) for i in r] == list(range(num_layers))


@pytest.mark.parametrize(
    "call,error",
    [
        (lambda: layer_counts(4, 0), "num_stages=0"),
        (
            lambda: layer_counts(4, 7, 1, 1),
            "7 stages for 4 layers and first_less=1, last_less=1 cannot be divided evenly; use at most 6",
        ),
        (lambda: layer_counts(8, 4, first_less=4), "first_less=4: must be at most the 3 layers"),
        (lambda: layer_counts(8, 4, last_less=9), "last_less=9: must be at most the"),
        (lambda: layer_counts(8, 4, first_less=-1), "first_less=-1"),
        (lambda: layer_counts(8, 4, first_less="1"), "first_less='1', last_less=0: must be non-negative integers"),
        (lambda: num_stages_for(7, 2, 3), "gives 4 stages"),
        (lambda: num_stages_for(7, 0, 3), "layers_per_stage=0"),
        (lambda: require_layer_counts([3, 2], 6, 2), "adds up to 5"),
    ],
)
def test_errors_name_value_and_rule(call, error):
    with pytest.raises(ConfigError, match=error):
        call()


def test_stages_from_layers_per_stage():
    assert num_stages_for(6, 2, 4, 1, 1) == 4


def test_many_stages_are_told_by_runs_of_equal_ones():
    assert format_counts((2, 3, 3, 2)) == "2,3,3,2"
    assert format_counts((0, *[1] * 40, 2)) == "0, 40 times 1, 2"


@pytest.mark.parametrize(
    "config,number",
    [
        ({"num_hidden_layers": 4}, 4),
        ({"n_layer": 4}, 4),
        ({"num_hidden_layers": 12, "encoder_layers": 12, "decoder_layers": 6}, 6),
        ({"num_hidden_layers": 12, "num_encoder_layers": 12, "num_decoder_layers": 6}, 6),
        ({"layers_block_type": ["linear_attention", "mlp", "full_attention"]}, 3),
        ({"num_hidden_layers": 2, "hybrid_override_pattern": "M-*-"}, 4),
        ({"model_type": "longcat_flash", "num_layers": 5, "num_hidden_layers": 10}, 5),
        ({"model_type": "llama", "num_layers": 5, "num_hidden_layers": 10}, 10),
        ({"hidden_size": 4}, None),
    ],
)
def test_layers_of_a_config_are_counted_as_transformers_does(config, number):
    assert read_num_layers(config) == number
