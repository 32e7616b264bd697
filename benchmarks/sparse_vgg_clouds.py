"""Batches of clouds of varied sizes, the same whoever asks for them."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from cuda_ops.sparse.preparation import padded
from profiler.models.shapes import shapes

Batch = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""(coordinates, features, counts), (targets): samples first, padded to the largest cloud of all batches."""

_NEAR = 0.01


def sizes(samples: int, least: int, most: int, mean: int, seed: int) -> list[int]:
    """Voxels of each sample of a batch: uniform from ``least`` to ``most``, drawn again until their mean is ``mean``.

    (Within a hundredth: what is predicted is a step on clouds of ``mean`` voxels.)
    """
    draw = random.Random(seed)
    while True:
        found = [draw.randint(least, most) for _ in range(samples)]
        if abs(sum(found) / samples / mean - 1) <= _NEAR:
            return found


def batch(counts: list[int], num_classes: int, points: int, seed: int) -> Batch:
    """Shapes of such sizes, with one feature a voxel and a class each."""
    clouds = [shapes("clouds", (1, count, 1), seed + 101 * number) for number, count in enumerate(counts)]
    raw = padded([cloud.coords[:, 1:] for cloud in clouds], [cloud.feats for cloud in clouds], points)
    generator = torch.Generator().manual_seed(seed)
    return raw, (torch.randint(num_classes, (len(counts),), generator=generator),)


def batches(number: int, samples: int, num_classes: int, least: int, most: int, mean: int) -> list[Batch]:
    """``number`` batches of ``samples`` samples."""
    return [batch(sizes(samples, least, most, mean, seed), num_classes, most, seed) for seed in range(number)]
