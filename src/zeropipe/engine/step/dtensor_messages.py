"""DTensors between stages: a rank sends its shard, and the ranks of the next stage build a DTensor of theirs.

The processes of a mesh hold the same stages and run the same sends, so every shard arrives where it belongs.
"""

from __future__ import annotations

import ast
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from zeropipe.engine.torch_private import tensors as torch_tensors


def describe_layout(tensor: Any, name: str) -> str:
    """The mesh dimensions, placements, shape and strides of a DTensor, for a header; "" for any other tensor."""
    if not isinstance(tensor, DTensor):
        return ""
    names = tensor.device_mesh.mesh_dim_names
    placements = tuple(_encode(placement) for placement in tensor.placements)
    if not names or None in placements:
        raise TypeError(
            f"{name} returned a DTensor on a mesh with dimensions {names} as {tensor.placements}, which cannot be sent "
            "to another stage: name the mesh's dimensions, and return a plain Shard, Replicate or sum"
        )
    return repr((tuple(names), placements, tuple(tensor.shape), tuple(tensor.stride())))


def local_shard(tensor: Any) -> Tensor:
    """This rank's shard of an output."""
    return torch_tensors.wait_for(tensor.detach().to_local())


def build_dtensor(shard: Tensor, layout: str, module: nn.Module, stage: int, is_gradient: bool = False) -> Tensor:
    """The DTensor of a shard, on the mesh of a stage's own weights; with `is_gradient` the gradient of `layout`."""
    names, codes, shape, stride = ast.literal_eval(layout)
    placements = [_decode(code) for code in codes]
    if is_gradient:
        placements = [_gradient_placement(placement) for placement in placements]
    mesh = _find_mesh(names, module, stage)
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride).detach()


def local_gradient(gradient: Any, x: Any) -> Tensor:
    """This rank's shard of an input's gradient, with the placements that the previous stage expects."""
    if not isinstance(x, DTensor):
        return gradient
    placements = [_gradient_placement(placement) for placement in x.placements]
    return torch_tensors.wait_for(gradient.redistribute(x.device_mesh, placements).to_local())


def _gradient_placement(placement: Any) -> Any:
    """The gradient of a sum is the same for every summand."""
    return Replicate() if isinstance(placement, Partial) else placement


def _encode(placement: Any) -> str | None:
    if type(placement) is Shard:
        return f"S{placement.dim}"
    if isinstance(placement, Replicate):
        return "R"
    return "P" if isinstance(placement, Partial) and placement.reduce_op == "sum" else None


def _decode(code: str) -> Any:
    return Shard(int(code[1:])) if code[0] == "S" else Replicate() if code == "R" else Partial()


def _find_mesh(names: tuple[str, ...], module: nn.Module, stage: int) -> Any:
    for parameter in module.parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)
        if mesh is not None and mesh.mesh_dim_names == names:
            return mesh
        if mesh is not None and set(names) <= set(mesh.mesh_dim_names or ()):
            return mesh[names]
    raise TypeError(
        f"stage {stage} shares a DTensor on a mesh with dimensions {names} with its neighbour, and none of its own "
        "weights is on such a mesh: return to_local() of it, and create the DTensor in the next stage"
    )
