"""Clouds for the tests of the layers, and the dense grids that they are held against."""

from __future__ import annotations

import torch
from torch import Tensor

from cuda_ops.sparse.nn import SparseTensor

FIRST = 8
EXTENT = 6
"""Of the coordinates: FIRST .. FIRST + EXTENT - 1, so that no field of a kernel reaches below 0."""
SIDE = 24


def cloud(
    channels: int = 3, sites: int = 60, samples: int = 2, seed: int = 0, empty: int | None = None
) -> SparseTensor:
    """Random sites in float64; the sample ``empty`` has none."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.randperm(samples * EXTENT**3, generator=generator)[:sites]
    batch = flat // EXTENT**3
    cell = flat % EXTENT**3
    places = torch.stack((cell // EXTENT**2, cell // EXTENT % EXTENT, cell % EXTENT), 1) + FIRST
    coords = torch.cat((batch[:, None], places), 1).to(torch.int32)
    feats = torch.randn(sites, channels, generator=generator, dtype=torch.float64)
    there = coords[:, 0] != (-1 if empty is None else empty)
    return SparseTensor(feats[there], coords[there], num_samples=samples)


def on_grid(x: SparseTensor, side: int = SIDE) -> Tensor:
    """(samples, channels, side, side, side), by a loop over sites."""
    grid = x.feats.new_zeros((x.num_samples, side, side, side, x.feats.shape[1]))
    index = x.coords.long().unbind(1)
    return grid.index_put(index, x.feats).permute(0, 4, 1, 2, 3)


def at_sites(grid: Tensor, x: SparseTensor) -> Tensor:
    """The rows of a grid (samples, channels, x, y, z) at the sites of ``x``."""
    return grid.permute(0, 2, 3, 4, 1)[x.coords.long().unbind(1)]
