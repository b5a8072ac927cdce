"""DTensors between stages: a rank sends its piece, and the ranks of the next stage make a DTensor of theirs again.

The processes of a mesh hold the same stages and send at the same places, so every piece arrives where it belongs.
"""

from __future__ import annotations

import ast
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from zeropipe.engine.torch_private import tensors as torch_tensors


def is_spread(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return isinstance(tensor, DTensor)


def words_of(tensor: Any, name: str) -> str:
    """How a DTensor is spread, for a header; nothing for any other tensor."""
    if not is_spread(tensor):
        return ""
    names = tensor.device_mesh.mesh_dim_names
    placements = tuple(_word(placement) for placement in tensor.placements)
    if not names or None in placements:
        raise TypeError(
            f"{name} returned a DTensor on a mesh with dimensions {names} as {tensor.placements}, which cannot be sent "
            "to another stage: name the mesh's dimensions, and return a plain Shard, Replicate or sum"
        )
    return repr((tuple(names), placements, tuple(tensor.shape), tuple(tensor.stride())))


def piece_of(tensor: Any) -> Tensor:
    """This rank's piece of an output."""
    return torch_tensors.settled(tensor.detach().to_local())


def made_again(piece: Tensor, words: str, module: nn.Module, stage: int) -> Tensor:
    """The DTensor that a piece is of, on the mesh of a stage's own weights."""
    names, placements, shape, stride = ast.literal_eval(words)
    return _dtensor(piece, _mesh(names, module, stage), [_placement(word) for word in placements], shape, stride)


def gradient_again(piece: Tensor, words: str, module: nn.Module, stage: int) -> Tensor:
    """The gradient of an output that was spread."""
    names, placements, shape, stride = ast.literal_eval(words)
    return _dtensor(
        piece, _mesh(names, module, stage), [_answer(_placement(word)) for word in placements], shape, stride
    )


def piece_of_gradient(gradient: Any, x: Any) -> Tensor:
    """This rank's piece of an input's gradient, spread as the stage before expects it."""
    if not is_spread(x):
        return gradient
    return torch_tensors.settled(gradient.redistribute(x.device_mesh, [_answer(p) for p in x.placements]).to_local())


def _answer(placement: Any) -> Any:
    """How the gradient of a tensor is spread: that of a sum is the same for every summand."""
    return Replicate() if isinstance(placement, Partial) else placement


def _word(placement: Any) -> str | None:
    if type(placement) is Shard:
        return f"S{placement.dim}"
    if isinstance(placement, Replicate):
        return "R"
    return "P" if isinstance(placement, Partial) and placement.reduce_op == "sum" else None


def _placement(word: str) -> Any:
    return Shard(int(word[1:])) if word[0] == "S" else Replicate() if word == "R" else Partial()


def _mesh(names: tuple[str, ...], module: nn.Module, stage: int) -> Any:
    for parameter in module.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.mesh_dim_names == names:
            return mesh
        if mesh is not None and set(names) <= set(mesh.mesh_dim_names or ()):
            return mesh[names]
    raise TypeError(
        f"stage {stage} shares a DTensor on a mesh with dimensions {names} with its neighbour, and none of its own "
        "weights is on such a mesh: return to_local() of it, and make the DTensor in the next stage"
    )


def _dtensor(piece: Tensor, mesh: Any, placements: list[Any], shape: Any, stride: Any) -> Tensor:
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride).detach()
