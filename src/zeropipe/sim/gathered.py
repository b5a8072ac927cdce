"""The most memory that a pass over a stage needs; its blocks are gathered before it, or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Layer(Protocol):
    """The memory of a layer: see LayerCost."""

    @property
    def activation(self) -> float: ...
    @property
    def stash(self) -> float: ...
    @property
    def workspace(self) -> float: ...
    @property
    def f_workspace(self) -> float: ...


class GatheredPeak(NamedTuple):
    """Memory at a peak beside what was there before: workspace, and weights beside those gathered at a time."""

    workspace: float = 0.0
    weights: float = 0.0

    @property
    def total(self) -> float:
        return sum(self)


class GatheredPeaks(NamedTuple):
    """The peaks of the F, the B and the I of a stage."""

    f: GatheredPeak
    b: GatheredPeak
    i: GatheredPeak


def gathered_peaks(layers: Sequence[Layer], blocks: Sequence[int] = (), message: float = 0.0) -> GatheredPeaks:
    """The peaks of a stage with these layers, of which `blocks` are gathered one by one, each in a message.

    A pass has one block and the message of the next one. Where it enters a block, its own message is there too; while
    the last one runs, there is no next one. F does not have all that it keeps before the last layer. B and I begin with
    the last layer; what that frees is there for the others, but of an I the stash remains, which may be larger.
    """
    following = message if len(blocks) > 1 else 0.0
    most = max((layer.activation for layer in layers), default=0.0)
    forward = [GatheredPeak(), GatheredPeak(0.0, message - most)]  # it enters before it has all of its activations
    later = 0.0
    for index, layer in reversed(list(enumerate(layers))):
        is_last = bool(blocks) and index >= blocks[-1]
        forward.append(GatheredPeak(layer.f_workspace - later, -following if is_last else 0.0))
        later += layer.activation
    backward = []
    for is_split in (False, True):
        peaks, level = [GatheredPeak(), GatheredPeak(0.0, message)], 0.0
        for index, layer in reversed(list(enumerate(layers))):
            is_last = bool(blocks) and index <= blocks[0]
            peaks.append(GatheredPeak(level + layer.workspace, -following if is_last else 0.0))
            level += (layer.stash if is_split else 0.0) - layer.activation
        backward.append(max(peaks, key=_total))
    return GatheredPeaks(max(forward, key=_total), *backward)


def _total(peak: GatheredPeak) -> float:
    return peak.total
