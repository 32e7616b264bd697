"""How evenly ranks share the work of point clouds, and what they read of one another: no clocks, the same every time.

    python -m benchmarks.sparse_balance [--quick] [--json]

The network is torchsparse's MinkUNet (channels 32 to 256, strides 1 to 16; Choy et al. 2019 is its source), trained:
forward and weight gradient at the output sites, input gradient at the input sites.  A pair costs 9 ns and 2 flops a
pair of channels at 85 GFLOP/s: one core of an AMD EPYC, from 33 ns at 32 channels and 105 ns at 64.

*Scan*: the outdoor scan at 0.143 m, 101,364 voxels, one sample divided in space.  *Batch*: sixteen samples, crops of
the scan and shapes, from some hundred to some ten thousand voxels.  Each row of work is the slowest rank's time over
the mean; *halo* is the bytes of all rows that ranks receive over the bytes of all rows that convolutions read (once
each), forward.  The bisection by voxels or by the first level's pairs is the same bisection with other weights, and
its cuts are just as exact; what differs is what it holds equal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path

import numpy as np

from benchmarks.report import Row, at_most, run
from benchmarks.site_balance import (
    Ownership,
    SiteMap,
    cut,
    equal_counts,
    equal_slabs,
    halo,
    imbalance,
    morton,
    random_blocks,
    rank_work,
)
from planner.sites.arrangement import SiteOrder, arrange
from planner.sites.bisection import bisection
from planner.sites.keys import Numbers, pack, unpack
from planner.sites.work import BlockWork, SiteLevel, SiteLoad, block_work

SCAN = Path(__file__).parents[1] / "tests" / "data" / "scans" / "lone-star.laz"
VOXEL_M = 0.143
QUICK_VOXEL_M = 0.5
NUM_LEVELS = 5
BYTES = 4
PAIR_S = 9e-9
FLOP_PER_S = 85e9
MOST_SCAN = 1.02
MOST_BATCH = 1.06
MOST_UNEQUAL = 1.05
UNEQUAL = (1.0, 1.0, 2.0, 2.0)
CENTRED = tuple(product((-1, 0, 1), repeat=3))
CHILDREN = tuple(product((0, 1), repeat=3))
CROPS_M = (2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 11.0, 15.0)
"""Radii of the crops' cylinders."""
SHAPES = (5, 8, 11, 14, 17, 20, 26, 32)
"""Radii of the shapes, in voxels."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """``source`` to ``target`` level (0: stride 1) with kernel 3 within a level, 2 between levels, 1 on sites alone."""

    source: int
    target: int
    kernel: int
    inputs: int
    outputs: int

    @property
    def pair_s(self) -> float:
        """Seconds of a pair, one of three passes."""
        return PAIR_S + 2 * self.inputs * self.outputs / FLOP_PER_S


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A micro-batch, what the network costs on it and what it reads."""

    levels: tuple[SiteLevel, ...]
    loads: tuple[SiteLoad, ...]
    maps: tuple[SiteMap, ...]

    @property
    def first_pairs(self) -> BlockWork:
        """Pairs of the first level, as if the network had no other."""
        return block_work(self.levels[:1], [SiteLoad(0, self.loads[0].pairs, 1.0)])

    @property
    def voxels(self) -> BlockWork:
        """Sites of the first level."""
        return block_work(self.levels[:1], [SiteLoad(0, self.loads[0].pairs, 0.0, 1.0)])

    @property
    def work(self) -> BlockWork:
        """Seconds of the whole network."""
        return block_work(self.levels, self.loads)


def minkunet() -> tuple[Convolution, ...]:
    """The convolutions; the first is a 3 x 3 x 3 one on the first level."""
    found = [Convolution(0, 0, 3, 4, 32), Convolution(0, 0, 3, 32, 32)]

    def blocks(level: int, inputs: int, outputs: int) -> None:
        for width in (inputs, outputs):
            found.extend([Convolution(level, level, 3, width, outputs), Convolution(level, level, 3, outputs, outputs)])
            if width != outputs:
                found.append(Convolution(level, level, 1, width, outputs))

    widths = (32, 32, 64, 128, 256)
    for level in range(1, NUM_LEVELS):
        found.append(Convolution(level - 1, level, 2, widths[level - 1], widths[level - 1]))
        blocks(level, widths[level - 1], widths[level])
    wide = widths[-1]
    for level, outputs in zip(range(NUM_LEVELS - 2, -1, -1), (256, 128, 96, 96), strict=True):
        found.append(Convolution(level + 1, level, 2, wide, outputs))
        blocks(level, outputs + widths[level], outputs)
        wide = outputs
    return tuple(found)


def case_of(clouds: Sequence[Numbers]) -> Case:
    """A micro-batch of these samples, [N, 3] voxels each."""
    samples = np.concatenate([np.full(len(cloud), number) for number, cloud in enumerate(clouds)])
    sites = [np.unique(pack(samples, np.concatenate(clouds)))]
    for _ in range(1, NUM_LEVELS):
        numbers, coordinates = unpack(sites[-1])
        sites.append(np.unique(pack(numbers, coordinates // 2)))
    levels = tuple(SiteLevel(*unpack(keys), 2**place) for place, keys in enumerate(sites))
    tables = {(place, place): neighbours(keys, keys, 1, CENTRED) for place, keys in enumerate(sites)}
    for place, (fine, coarse) in enumerate(pairwise(sites)):
        tables[place, place + 1] = neighbours(fine, coarse, 2, CHILDREN)
        tables[place + 1, place] = reverse(tables[place, place + 1], len(fine))
    loads = []
    maps = []
    for (source, target), table in tables.items():
        own = [layer for layer in minkunet() if (layer.source, layer.target) == (source, target)]
        pair_s = sum(layer.pair_s for layer in own if layer.kernel > 1)
        site_s = sum(layer.pair_s for layer in own if layer.kernel == 1)
        loads.append(SiteLoad(target, (table >= 0).sum(axis=0), 2 * pair_s, 3 * site_s))
        loads.append(SiteLoad(source, (tables[target, source] >= 0).sum(axis=0), pair_s))
        maps.append(SiteMap(source, target, table, sum(BYTES * layer.inputs for layer in own if layer.kernel > 1)))
    return Case(levels, tuple(loads), tuple(maps))


def neighbours(source: Numbers, target: Numbers, stride: int, offsets: Sequence[tuple[int, int, int]]) -> Numbers:
    """The input row [K, M] of each output site at each offset, or -1; by search in the sorted keys."""
    samples, coordinates = unpack(target)
    table = np.full((len(offsets), len(target)), -1, np.int64)
    for row, offset in zip(table, offsets, strict=True):
        asked = pack(samples, coordinates * stride + offset)
        places = np.minimum(np.searchsorted(source, asked), max(len(source) - 1, 0))
        there = source[places] == asked
        row[there] = places[there]
    return table


def reverse(table: Numbers, num_inputs: int) -> Numbers:
    """The output row [K, N] that reads each input row through each offset, or -1."""
    reversed_table = np.full((len(table), num_inputs), -1, np.int64)
    for row, rows in zip(reversed_table, table, strict=True):
        outputs = np.flatnonzero(rows >= 0)
        row[rows[outputs]] = outputs
    return reversed_table


def points() -> np.ndarray:
    """The scan's points [N, 3] in metres from their corner."""
    import laspy

    file = laspy.read(SCAN)
    found = np.stack([file.x, file.y, file.z], axis=1)
    return found - found.min(axis=0)


def voxels(cloud: np.ndarray, voxel_m: float) -> Numbers:
    """The distinct voxels of points."""
    return np.unique(np.floor(cloud / voxel_m).astype(np.int64), axis=0)


def batch(cloud: np.ndarray, voxel_m: float) -> list[Numbers]:
    """Crops of the scan and shapes, in turn."""
    found = []
    middle = np.median(cloud[:, :2], axis=0)
    for number, (crop_m, radius) in enumerate(zip(CROPS_M, SHAPES, strict=True)):
        angle = 2.4 * number
        centre = middle + 0.4 * (16 - crop_m) * np.array([np.cos(angle), np.sin(angle)])
        found.append(voxels(cloud[((cloud[:, :2] - centre) ** 2).sum(axis=1) < crop_m**2], voxel_m))
        found.append(shape(number, radius))
    return found


def shape(kind: int, radius: int) -> Numbers:
    """The surface of a ball, a box, a cylinder or a torus, one voxel thick or two, around the origin."""
    axis = np.arange(-radius, radius + 1)
    x, y, z = np.meshgrid(axis, axis, axis, indexing="ij")
    inside = (
        x**2 + y**2 + z**2 <= radius**2,
        (abs(x) <= radius // 2) & (abs(z) <= radius // 3) & (abs(y) < radius),
        (x**2 + y**2 <= (radius // 2) ** 2) & (abs(z) < radius),
        16 * ((2 * radius**2 // 3) * (x**2 + y**2)) >= (x**2 + y**2 + z**2 + radius**2 // 3) ** 2 * 4,
    )[kind % 4]
    padded = np.pad(inside, 1)
    core = np.logical_and.reduce([np.roll(padded, step, axis) for axis in range(3) for step in (-1, 1)])
    return np.argwhere(padded & ~core) - radius - 1


def measure(quick: bool) -> list[Row]:
    """All rows."""
    cloud = points()
    voxel_m = QUICK_VOXEL_M if quick else VOXEL_M
    return [*scan_rows(case_of([voxels(cloud, voxel_m)])), *batch_rows(case_of(batch(cloud, voxel_m)))]


def scan_rows(case: Case) -> Iterator[Row]:
    """One sample on eight ranks, and on four of unequal speeds."""
    work = case.work
    equal = (1.0,) * 8
    name = f"scan, {len(case.levels[0].samples)} voxels, 8 ranks"
    yield from rows(case, f"{name}: whole network", divided(work, equal), equal, MOST_SCAN)
    yield from rows(case, f"{name}: whole network, Morton", divided(work, equal, morton), equal)
    yield from rows(case, f"{name}: by voxels", divided(case.voxels, equal), equal)
    yield from rows(case, f"{name}: by pairs of the first level", divided(case.first_pairs, equal), equal)
    yield from rows(case, f"{name}: equal slabs", equal_slabs(work.keys, 8), equal)
    yield from rows(case, f"{name}: random blocks", random_blocks(work.keys, 8), equal)
    owned = divided(work, UNEQUAL)
    yield from rows(case, "scan, speeds 1:1:2:2: whole network", owned, UNEQUAL, MOST_UNEQUAL)


def batch_rows(case: Case) -> Iterator[Row]:
    """Sixteen samples on four and eight ranks, and on four of unequal speeds."""
    work = case.work
    count = int(case.levels[0].samples.max()) + 1
    sizes = np.bincount(case.levels[0].samples)
    yield Row(f"batch of {count}: voxels of the largest sample over the smallest", sizes.max() / sizes.min(), "ratio")
    for speeds in ((1.0,) * 4, (1.0,) * 8, UNEQUAL):
        name = f"batch of {count}, {len(speeds)} ranks" + ("" if len(set(speeds)) == 1 else ", speeds 1:1:2:2")
        most = MOST_BATCH if len(set(speeds)) == 1 else MOST_UNEQUAL
        owned = divided(work, speeds, tolerance=most - 1)
        yield from rows(case, f"{name}: by work", owned, speeds, most)
        yield Row(f"{name}: by work, samples cut in space", float(samples_cut(owned)), "")
        yield from rows(case, f"{name}: equal counts", equal_counts(work.keys, count, len(speeds)), speeds)


def divided(
    work: BlockWork, speeds: Sequence[float], order: SiteOrder = bisection, tolerance: float = MOST_SCAN - 1
) -> Ownership:
    """The planner's intervals by this work."""
    return cut(arrange(work, speeds, tolerance, order), speeds, tolerance)


def samples_cut(owned: Ownership) -> int:
    """Samples that more than one rank owns a part of."""
    samples = unpack(owned.keys)[0]
    return int((np.bincount(np.unique(samples * owned.num_ranks + owned.ranks) // owned.num_ranks) > 1).sum())


def rows(case: Case, name: str, owned: Ownership, speeds: Sequence[float], most: float | None = None) -> Iterator[Row]:
    """Balance and halo of an ownership, under the whole network's work."""
    value = imbalance(rank_work(owned, case.work), speeds)
    yield at_most(name, value, "max/mean", most)
    yield Row(f"{name}, halo", 100 * halo(owned, case.levels, case.maps).share, "%")


main = partial(run, str(__doc__).splitlines()[0], measure)

if __name__ == "__main__":
    sys.exit(main())
