"""Peaks of passes over stages whose blocks are gathered one by one."""

import pytest

from zeropipe.sim.gathered import GatheredPeak, gathered_peaks
from zeropipe.sim.layer_costs import LayerCost


def layer(activation, stash, workspace, f_workspace=0.0):
    return LayerCost(1, 1, 1, activation=activation, stash=stash, workspace=workspace, f_workspace=f_workspace)


PLAIN = layer(10, 4, 6)
CHECKPOINTED = layer(1, 4, 15, 8)


@pytest.mark.parametrize("layers, message, f, b, i", [
    # a message is more than what the last block needs, for which there is no next one
    ([CHECKPOINTED, PLAIN], 9, (0, 0), (0, 9), (0, 9)),
    # B: 10 are freed before the last one. I: 6 are, so its 15 are 9, without a message of 2
    ([CHECKPOINTED, PLAIN], 2, (0, 0), (6, 0), (9, -2)),
    # the next block's message is there
    ([PLAIN, CHECKPOINTED], 9, (8, -9), (15, 0), (15, 0)),
    ([PLAIN, CHECKPOINTED], 3, (8, -3), (15, 0), (15, 0)),
    # one block: nothing comes next, and its own message is more than its weights gathered
    ([CHECKPOINTED], 20, (0, 19), (0, 20), (0, 20)),
    ([CHECKPOINTED], 2, (8, 0), (15, 0), (15, 0)),
], ids=str)  # fmt: skip
def test_a_pass_has_more_where_it_enters_a_block_and_less_in_the_last_one(layers, message, f, b, i):
    peaks = gathered_peaks(layers, range(len(layers)), message)
    assert [peaks.b, peaks.i] == [GatheredPeak(*b), GatheredPeak(*i)]
    assert peaks.f.total == max(0, sum(f))


def test_what_is_outside_of_blocks_runs_before_the_first_or_after_the_last_one():
    """A backward begins with the head, and ends with the embedding."""
    outside = layer(0, 0, 60, 40)
    head = gathered_peaks([PLAIN, PLAIN, outside], [0, 1], 9)
    embedding = gathered_peaks([outside, PLAIN, PLAIN], [1, 2], 9)
    assert head == (GatheredPeak(40, -9), GatheredPeak(60), GatheredPeak(60))
    assert embedding == (GatheredPeak(20), GatheredPeak(40, -9), GatheredPeak(48, -9))
