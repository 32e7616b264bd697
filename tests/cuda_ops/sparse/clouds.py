"""Small random clouds, their maps, and the same as dense grids: what the tests of sparse operators share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cuda_ops.sparse import operators
from cuda_ops.sparse.keys import axis_offsets, unpack

Triple = tuple[int, int, int]
ONES = (1, 1, 1)
KERNELS: list[Triple] = [(1, 1, 1), (2, 2, 2), (3, 3, 3), (5, 5, 5), (3, 1, 1), (2, 3, 4)]
BATCHES = 2
EXTENT = 6


def cloud(sites: int = 70, seed: int = 0, extent: int = EXTENT, batches: int = BATCHES) -> Tensor:
    """int32 [N, 4], each once, in any order; coordinates -extent..extent - 1."""
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randint(batches, (sites, 1), generator=generator)
    coordinates = torch.cat([batch, torch.randint(-extent, extent, (sites, 3), generator=generator)], 1).int()
    unique = coordinates.unique(dim=0)
    return unique[torch.randperm(len(unique), generator=generator)]


def sites(count: int = 70, seed: int = 0, extent: int = EXTENT, batches: int = BATCHES) -> Tensor:
    """The keys of a cloud."""
    return operators.sorted_sites(cloud(count, seed, extent, batches))[0]


def maps(
    source: Tensor,
    target: Tensor,
    kernel: Triple,
    stride: Triple = ONES,
    dilation: Triple = ONES,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Neighbours and their reverse."""
    neighbours = operators.kernel_map(source, target, kernel, stride, dilation, transposed)
    return neighbours, operators.reversed_map(neighbours, len(source))


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, grad: bool = False) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_(grad)


def dense(keys: Tensor, feats: Tensor, first: Sequence[int], size: Sequence[int], fill: float = 0.0) -> Tensor:
    """[batches, C, X, Y, Z] with the features at coordinates - first, ``fill`` elsewhere; differentiable."""
    batch, *places = unpack(keys).long().unbind(1)
    grid = feats.new_full((BATCHES, *size, feats.shape[1]), fill)
    where = (batch, *(place - start for place, start in zip(places, first, strict=True)))
    return grid.index_put(where, feats).permute(0, 4, 1, 2, 3)


def at_sites(grid: Tensor, keys: Tensor, first: Sequence[int]) -> Tensor:
    """[N, C] of a grid [batches, C, X, Y, Z] that starts at ``first``."""
    batch, *places = unpack(keys).long().unbind(1)
    where = (batch, *(place - start for place, start in zip(places, first, strict=True)))
    return grid.permute(0, 2, 3, 4, 1)[where]


def window(kernel: Triple, stride: Triple, dilation: Triple) -> tuple[list[int], list[int], list[int]]:
    """A grid that needs no padding: its first coordinate, its size, and the first coordinate of what it becomes.

    Index p of the result reads coordinates first + p * stride + t * dilation, t = 0, 1, ...: those of output
    p + out_first if first = out_first * stride + the smallest offset.
    """
    firsts = []
    extents = []
    out_firsts = []
    for size, step, dilate in zip(kernel, stride, dilation, strict=True):
        offsets = axis_offsets(size, dilate)
        out_first = (-EXTENT - offsets[-1]) // step - 1
        out_last = (EXTENT - offsets[0]) // step + 1
        firsts.append(out_first * step + offsets[0])
        extents.append(out_last * step + offsets[-1] - firsts[-1] + 1)
        out_firsts.append(out_first)
    return firsts, extents, out_firsts


def dense_weight(weight: Tensor, kernel: Triple) -> Tensor:
    """[K, in, out] as conv3d wants it: [out, in, X, Y, Z]."""
    return weight.view(*kernel, *weight.shape[1:]).permute(4, 3, 0, 1, 2)
