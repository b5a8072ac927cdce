"""Private API of torch that counting needs: dispatch modes, trees of arguments, identity of storage."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["TorchDispatchMode", "list_tensors", "storage_id"]


def list_tensors(values: Any) -> list[Tensor]:
    """The tensors in nested arguments or results."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def storage_id(tensor: Tensor) -> int:
    """The identity of a tensor's storage, also on the meta device. It may be reused when the storage is freed."""
    return int(tensor.untyped_storage()._cdata)
