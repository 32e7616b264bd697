"""Example clouds for the sparse networks: voxelised shapes, samples first, padded to the largest.

A sample is a ball's surface, squeezed by its own factor along each axis and cut to the number of voxels asked for, so
that sites have the neighbours that scanned surfaces have.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cuda_ops.sparse.nn import SparseTensor
from profiler.models.example import indices, normal, require_dims

CloudInputs = tuple[Tensor, Tensor, Tensor]
"""Coordinates int32 (sample, site, 3), features (sample, site, channel), and the sites of each sample (sample,)."""

CloudExample = tuple[nn.Module, tuple[CloudInputs, Tensor], Callable[..., Tensor]]
"""What a sparse factory returns: the module of a sparse tensor, the inputs and targets that it is made of, the loss.

A target is (sample,) for a classification, and (sample, site) for a segmentation.
"""

_DIMS = ("sample", "site", "channel")


def clouds(network: str, input_shape: tuple[int, ...], seed: int = 0) -> CloudInputs:
    """Clouds of exactly ``input_shape[1]`` sites each; raises `ValueError` for another number of dims.

    Coordinates are whole numbers, int32, on torch's default device; features are standard normal numbers.
    """
    require_dims(network, input_shape, _DIMS)
    samples, sites, _ = input_shape
    coordinates = torch.stack([_surface(sites, seed + 7919 * sample) for sample in range(samples)])
    counts = torch.full((samples,), sites)
    device = torch.get_default_device()
    return coordinates.to(device), normal(input_shape, seed), counts.to(device)


def site_labels(num_classes: int, input_shape: tuple[int, ...], seed: int = 1) -> Tensor:
    """Uniform class numbers, int64 (sample, site)."""
    return indices(num_classes, input_shape[:2], seed)


def sparse_batch(inputs: CloudInputs) -> SparseTensor:
    """The sparse tensor of a batch of clouds; row ``i`` is site ``order[i]`` of all samples one after another."""
    coordinates, features, counts = inputs
    there = torch.arange(coordinates.shape[1], device=counts.device) < counts.unsqueeze(1)
    sample = torch.arange(len(counts), device=counts.device, dtype=torch.int32).unsqueeze(1).expand_as(there)
    coords = torch.cat((sample.unsqueeze(2), coordinates.to(torch.int32)), 2)
    return SparseTensor(features[there], coords[there], num_samples=len(counts))


def _surface(sites: int, seed: int) -> Tensor:
    """int32 (sites, 3), each once: as many of the voxels of a squeezed sphere as are asked for."""
    generator = torch.Generator("cpu").manual_seed(seed)
    squeeze = 0.6 + 0.4 * torch.rand(3, generator=generator, device="cpu")
    radius = 1 + int(sites**0.5)
    while True:  # the voxels of a surface grow with the square of its radius
        points = torch.randn(40 * sites + 400, 3, generator=generator, device="cpu")
        voxels = (points / points.norm(dim=1, keepdim=True) * squeeze * radius).round().to(torch.int32).unique(dim=0)
        if len(voxels) >= sites:
            return voxels[:sites] + radius
        radius *= 2
