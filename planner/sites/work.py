"""Work of each block: the seconds that a network spends on the sites in it, all levels and layers together.

    work_s(block) = sum over loads of  pair_s * (pairs of the block's sites)  +  site_s * (the block's sites)

A load is what the layers that write the sites of one level cost there.  A forward pass and a weight gradient read the
pairs of output sites; an input gradient those of input sites, a load of its own.  Pairs and sites are counted exactly,
in integers, before any price is applied, so that the sums do not depend on the order of sites.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.ir.errors import UsageError
from planner.sites.keys import AnyInts, Floats, Numbers, block_keys


@dataclass(frozen=True, slots=True, eq=False)
class SiteLevel:
    """The sites of a micro-batch at one stride.

    Attributes:
        samples: [N], which sample each site belongs to.
        coordinates: [N, 3], in units of the level.
        stride: finest voxels a unit, one number or one an axis.
    """

    samples: AnyInts
    coordinates: AnyInts
    stride: int | tuple[int, int, int] = 1


@dataclass(frozen=True, slots=True, eq=False)
class SiteLoad:
    """What layers cost on the sites of a level.

    Attributes:
        level: its place in the list of levels.
        pairs: [N], neighbours of each site that are there.
        pair_s: seconds a pair; summed over the layers that use these pairs.
        site_s: seconds a site (normalisation, activation), summed likewise.
    """

    level: int
    pairs: AnyInts
    pair_s: float
    site_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class BlockWork:
    """Blocks that hold a site of any level, and what they cost.

    Attributes:
        keys: [B], ascending.
        work_s: [B], not negative.
    """

    keys: Numbers
    work_s: Floats


def block_work(levels: Sequence[SiteLevel], loads: Sequence[SiteLoad]) -> BlockWork:
    """The work of every block that holds a site of ``levels``.

    Raises:
        UsageError: a load that does not fit its level, or has a price below 0.
    """
    for load in loads:
        _require_load(levels, load)
    runs = [_runs(block_keys(level.samples, level.coordinates, level.stride)) for level in levels]
    empty = np.zeros(0, np.int64)
    keys = np.unique(np.concatenate([empty, *(run_keys for run_keys, _ in runs)]))
    rows = [np.searchsorted(keys, run_keys) for run_keys, _ in runs]
    work_s = np.zeros(len(keys))
    for load in loads:
        starts = runs[load.level][1]
        row = rows[load.level]
        if not len(row):
            continue
        pairs = np.add.reduceat(np.asarray(load.pairs, dtype=np.int64), starts)
        sites = np.diff(starts, append=len(load.pairs))
        # bincount adds in float64: whole numbers below 2^53, hence exactly
        work_s += load.pair_s * np.bincount(row, pairs, minlength=len(keys))
        if load.site_s:
            work_s += load.site_s * np.bincount(row, sites, minlength=len(keys))
    return BlockWork(keys, work_s)


def _runs(keys: Numbers) -> tuple[Numbers, Numbers]:
    """Keys of runs of equal keys, and where they start; sorted sites have few runs a block."""
    starts = np.flatnonzero(np.diff(keys, prepend=-1))
    return keys[starts], starts


def _require_load(levels: Sequence[SiteLevel], load: SiteLoad) -> None:
    if not 0 <= load.level < len(levels):
        raise UsageError("a load names no level", [f"level {load.level} of {len(levels)}"])
    sites = len(levels[load.level].samples)
    pairs = np.shape(load.pairs)
    if pairs != (sites,):
        raise UsageError(
            "a load does not fit its level", [f"level {load.level}: {sites} sites, pairs of shape {list(pairs)}"]
        )
    if not (0 <= load.pair_s < np.inf and 0 <= load.site_s < np.inf):
        raise UsageError("a load has no price", [f"{load.pair_s} s a pair, {load.site_s} s a site"])
    least = int(np.min(load.pairs, initial=0))
    if least < 0:
        raise UsageError("pairs are counts", [f"level {load.level}: {least} is one"])
