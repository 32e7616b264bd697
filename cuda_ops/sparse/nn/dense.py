"""From sites to a dense grid."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.nn.checks import triple
from cuda_ops.sparse.nn.tensor import SparseTensor


class ToDense(nn.Module):
    """The features on a dense grid, 0 where there is no site.

    Args:
        shape: sites along x, y and z, in units of the tensor's stride.
        origin: the coordinates of the grid's first site.

    Raises:
        SparseInputError: in use, where a site lies outside the grid.
    """

    def __init__(self, shape: Sequence[int], origin: Sequence[int] = (0, 0, 0)) -> None:
        super().__init__()
        self.shape = triple(shape, "shape", "ToDense")
        self.origin = tuple(origin)

    def forward(self, input: SparseTensor) -> Tensor:
        """(samples, channels, x, y, z)."""
        return to_dense(input, self.shape, self.origin)

    def extra_repr(self) -> str:
        """The grid."""
        return f"shape={self.shape}, origin={self.origin}"


def to_dense(input: SparseTensor, shape: Sequence[int], origin: Sequence[int] = (0, 0, 0)) -> Tensor:
    """(samples, channels, x, y, z): the features on a grid; see :class:`ToDense`."""
    extents = triple(shape, "shape", "to_dense")
    coordinates = input.coords.to(torch.int64)
    batch, places = coordinates[:, 0], coordinates[:, 1:] - coordinates.new_tensor(list(origin))
    if not torch.compiler.is_compiling():
        _require_inside(places, extents)
    x, y, z = places.unbind(1)
    rows = ((batch * extents[0] + x) * extents[1] + y) * extents[2] + z
    channels = input.feats.shape[1]
    flat = input.feats.new_zeros((input.num_samples * extents[0] * extents[1] * extents[2], channels))
    grid = flat.index_put((rows,), input.feats).view(input.num_samples, *extents, channels)
    return grid.permute(0, 4, 1, 2, 3).contiguous()


def _require_inside(places: Tensor, extents: Sequence[int]) -> None:
    outside = ((places < 0) | (places >= places.new_tensor(list(extents)))).any(1)
    if bool(outside.any()):
        raise SparseInputError(
            f"{int(outside.sum())} sites outside the grid",
            where="to_dense",
            found=places[outside][0].tolist(),
            expected=f"below {list(extents)} and not negative, from the origin on",
            remedy="give a larger shape or another origin",
        )
