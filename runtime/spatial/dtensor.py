"""Parts of a tensor as a DTensor, and back; nothing moves unless the two are divided differently."""

from __future__ import annotations

from collections.abc import Collection
from math import prod

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planner.ir.errors import UsageError
from planner.ir.graph import TensorSpec
from planner.ir.layout import Layout
from runtime.spatial.placements import Placements, by, to_placements


def as_dtensor(
    local: Tensor, layout: Layout, spec: TensorSpec, samples: int, mesh: DeviceMesh, sums: Collection[str] = ()
) -> DTensor:
    """The tensor of which ``local`` is this rank's part; differentiable, and nothing moves.

    Args:
        mesh: as :meth:`Placements.mesh` makes it.

    Raises:
        UnsupportedModelError: as :func:`to_placements`.
        UsageError: ``local`` does not have the shape that the layout gives this rank, or ``mesh`` is another grid.
    """
    placed = to_placements(layout, spec, samples, sums)
    _require_grid(placed, mesh)
    box = layout.boxes(spec, samples)[_position(mesh)]
    shape = tuple(len(interval) for interval in box)
    if tuple(local.shape) != shape:
        raise UsageError(
            "a local tensor is not the part that its layout says",
            [f"its shape is {by(tuple(local.shape))}, the part {by(shape)} of {by(spec.shape)}"],
        )
    return DTensor.from_local(
        local, mesh, placed.placements, run_check=False, shape=torch.Size(spec.shape), stride=_strides(spec.shape)
    )


def local_of(tensor: DTensor, layout: Layout, spec: TensorSpec, samples: int, sums: Collection[str] = ()) -> Tensor:
    """This rank's part of a DTensor; differentiable.  One that is placed otherwise on its mesh is redistributed first.

    Raises:
        UnsupportedModelError: as :func:`to_placements`.
        UsageError: the mesh is another grid than the layout's, or the tensor another than ``spec`` says.
    """
    placed = to_placements(layout, spec, samples, sums)
    _require_grid(placed, tensor.device_mesh)
    if tuple(tensor.shape) != spec.shape:
        raise UsageError("a DTensor is not what is divided", [f"shape {by(tuple(tensor.shape))}, not {by(spec.shape)}"])
    if tuple(tensor.placements) != placed.placements:
        tensor = tensor.redistribute(placements=placed.placements)
    local: Tensor = tensor.to_local()
    return local


def _require_grid(placed: Placements, mesh: DeviceMesh) -> None:
    if tuple(mesh.shape) != placed.mesh_shape:
        raise UsageError(
            "the mesh is not the grid of the layout", [f"{by(tuple(mesh.shape))}, not {by(placed.mesh_shape)}"]
        )


def _position(mesh: DeviceMesh) -> int:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError("this rank has no part of the tensor", [f"rank {mesh.get_rank()} is not in {mesh}"])
    position = 0
    for index, size in zip(coordinate, mesh.shape, strict=True):
        position = position * size + index
    return position


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(max(1, extent) for extent in shape[dim + 1 :]) for dim in range(len(shape)))
