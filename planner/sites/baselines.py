"""Other ways to give blocks to ranks, to compare with and to test with: any ownership is exact, few are balanced."""

from __future__ import annotations

import numpy as np

from planner.sites.arrangement import Ownership, ownership_of
from planner.sites.keys import Ints, samples_of, unpack


def equal_counts(keys: Ints, num_samples: int, num_ranks: int) -> Ownership:
    """SparsePipe's split inside a batch: as many whole samples on each rank, in the order of their numbers."""
    return ownership_of(num_ranks, keys, samples_of(keys) * num_ranks // max(num_samples, 1))


def equal_slabs(keys: Ints, num_ranks: int) -> Ownership:
    """Each sample's bounding box cut into slabs of equal width along its longest side, as dense grids are."""
    samples, blocks = unpack(keys)
    ranks = np.zeros(len(keys), np.int64)
    for sample in np.unique(samples):
        inside = samples == sample
        low, high = blocks[inside].min(axis=0), blocks[inside].max(axis=0) + 1
        axis = int(np.argmax(high - low))
        ranks[inside] = (blocks[inside, axis] - low[axis]) * num_ranks // (high[axis] - low[axis])
    return ownership_of(num_ranks, keys, ranks)


def random_blocks(keys: Ints, num_ranks: int, seed: int = 0) -> Ownership:
    """Every block to a rank by lot: the worst halo there is."""
    return ownership_of(num_ranks, keys, np.random.default_rng(seed).integers(num_ranks, size=len(keys)))
