"""Which rank owns which blocks of sites, what that costs (work, and sites read of others), and other ownerships.

    halo[map][src, dst] = sites of the map's input level owned by src that an output site of dst reads, each once

A convolution on rank dst waits for those rows, ``bytes_per_site`` each; backward the same number of gradient rows goes
the other way.  Ignored here: the keys that the inspector exchanges once a map.

Last come other ways to give blocks to ranks, to compare with: any ownership is exact, few are balanced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.ir.errors import UsageError
from planner.sites.arrangement import TOLERANCE, Arrangement, RankOfSites, cut_places, halo_sites
from planner.sites.keys import AXIS_BITS, HALF, AnyInts, Floats, Numbers, block_keys, samples_of, unpack
from planner.sites.work import BlockWork, SiteLevel


@dataclass(frozen=True, slots=True, eq=False)
class Ownership:
    """Which of ``num_ranks`` ranks owns which block.

    Attributes:
        keys: [B], the blocks, ascending.
        ranks: [B], their owners.
    """

    num_ranks: int
    keys: Numbers
    ranks: RankOfSites

    def owner(self, samples: AnyInts, coordinates: AnyInts, stride: int | Sequence[int] = 1) -> RankOfSites:
        """The rank [N] that owns each site: ``samples`` [N], ``coordinates`` [N, 3] in units of ``stride``.

        A site that exists nowhere has an owner too, so that whoever looks for it knows whom to ask.

        Raises:
            UsageError: see :func:`planner.sites.keys.block_keys`.
        """
        return self.owner_of_blocks(block_keys(samples, coordinates, stride))

    def owner_of_blocks(self, keys: Numbers) -> RankOfSites:
        """The owner [N] of blocks: of one that is not listed, that of its sample's nearest listed one below, or above.

        Of a sample without blocks it is any rank, the same whoever asks; without any block, rank 0.
        """
        if not len(self.keys):
            return np.zeros(len(keys), np.int32)
        below = np.searchsorted(self.keys, keys, side="right") - 1
        above = np.minimum(below + 1, len(self.keys) - 1)
        foreign = (below < 0) | (samples_of(self.keys[below]) != samples_of(keys))
        owners: RankOfSites = self.ranks[np.where(foreign, above, below)]
        return owners


def ownership_of(num_ranks: int, keys: Numbers, ranks: AnyInts) -> Ownership:
    """The ownership that gives block ``keys[i]`` (distinct, in any order) to ``ranks[i]``; its arrays are its own."""
    order = np.argsort(keys)
    owned = Ownership(num_ranks, keys[order], np.asarray(ranks)[order].astype(np.int32))
    for array in (owned.keys, owned.ranks):
        array.setflags(write=False)
    return owned


def cut(arrangement: Arrangement, speeds: Sequence[float], tolerance: float = TOLERANCE) -> Ownership:
    """The intervals that ranks of ``speeds`` own, rank by rank along the order.

    At :func:`planner.sites.arrangement.cut_places`, which says what is raised.
    """
    ends = cut_places(arrangement, speeds, tolerance)
    ranks = np.repeat(np.arange(len(speeds)), np.diff(ends))
    return ownership_of(len(speeds), arrangement.keys, ranks)


@dataclass(frozen=True, slots=True, eq=False)
class SiteMap:
    """A layer's reading of one level for another.

    Attributes:
        source: the input level's place in the list of levels.
        target: the output level's.
        neighbours: [K, M], the input row of each output row at each offset, or -1.
        bytes_per_site: of an input row, all its channels; summed over the layers that use the map.
    """

    source: int
    target: int
    neighbours: AnyInts
    bytes_per_site: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class RankHalo:
    """What ranks read of one another.

    Attributes:
        sites: one [n, n] a map, from row to column; the diagonal is 0.
        received_bytes: [n], by the rank that receives, all maps.
        input_bytes: of all input rows of all maps, wherever they are.
    """

    sites: tuple[Numbers, ...]
    received_bytes: Floats
    input_bytes: float

    @property
    def share(self) -> float:
        """Bytes received by all ranks over bytes of all inputs."""
        return float(self.received_bytes.sum()) / self.input_bytes if self.input_bytes else 0.0


def rank_work(ownership: Ownership, work: BlockWork) -> Floats:
    """Seconds [n] of each rank, on a device of speed 1."""
    ranks = ownership.owner_of_blocks(work.keys)
    return np.bincount(ranks, work.work_s, minlength=ownership.num_ranks).astype(np.float64)


def imbalance(work_s: Floats, speeds: Sequence[float] | None = None) -> float:
    """Maximum over mean of the ranks' times, the mean as if work could be shared in proportion to speed; 1 is best."""
    pace = np.ones(len(work_s)) if speeds is None else np.asarray(speeds, dtype=np.float64)
    if len(pace) != len(work_s) or pace.sum() <= 0:
        raise UsageError("speeds do not fit", [f"{len(work_s)} ranks, speeds {pace.tolist()}"])
    if not work_s.sum():
        return 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.where(work_s > 0, work_s / pace, 0.0)
    return float(times.max() * pace.sum() / work_s.sum())


def halo(ownership: Ownership, levels: Sequence[SiteLevel], maps: Sequence[SiteMap]) -> RankHalo:
    """The rows that each rank receives of each other for ``maps``.

    Raises:
        UsageError: a map that does not fit its levels.
    """
    owners = [ownership.owner(level.samples, level.coordinates, level.stride) for level in levels]
    received = np.zeros(ownership.num_ranks)
    inputs = 0.0
    sites = []
    for table in maps:
        rows = len(owners[table.source])
        read = np.shape(table.neighbours)
        if len(read) != 2 or read[1] != len(owners[table.target]) or np.max(table.neighbours, initial=-1) >= rows:
            sizes = f"{rows} input sites, {len(owners[table.target])} output sites, neighbours {list(read)}"
            raise UsageError("a map does not fit its levels", [sizes], ["give input rows [K, outputs], or -1"])
        sites.append(halo_sites(owners[table.source], owners[table.target], table.neighbours, ownership.num_ranks))
        received += table.bytes_per_site * sites[-1].sum(axis=0)
        inputs += table.bytes_per_site * rows
    return RankHalo(tuple(sites), received, inputs)


def equal_counts(keys: Numbers, num_samples: int, num_ranks: int) -> Ownership:
    """SparsePipe's split inside a batch: as many whole samples on each rank, in the order of their numbers."""
    return ownership_of(num_ranks, keys, samples_of(keys) * num_ranks // max(num_samples, 1))


def equal_slabs(keys: Numbers, num_ranks: int) -> Ownership:
    """Each sample's bounding box cut into slabs of equal width along its longest side, as dense grids are."""
    samples, blocks = unpack(keys)
    ranks = np.zeros(len(keys), np.int64)
    for sample in np.unique(samples):
        inside = samples == sample
        low = blocks[inside].min(axis=0)
        high = blocks[inside].max(axis=0) + 1
        axis = int(np.argmax(high - low))
        ranks[inside] = (blocks[inside, axis] - low[axis]) * num_ranks // (high[axis] - low[axis])
    return ownership_of(num_ranks, keys, ranks)


def random_blocks(keys: Numbers, num_ranks: int, seed: int = 0) -> Ownership:
    """Every block to a rank by lot: the worst halo there is."""
    return ownership_of(num_ranks, keys, np.random.default_rng(seed).integers(num_ranks, size=len(keys)))


def morton(keys: Numbers, work: Numbers, goals: Numbers | None = None) -> Numbers:
    """The permutation [B] that puts blocks in Morton's order (their coordinates' bits in turn), samples ascending."""
    del work, goals
    samples, blocks = unpack(keys)
    spread = np.zeros(len(keys), np.int64)
    for bit in range(AXIS_BITS):
        for axis in range(3):
            spread |= (blocks[:, axis] + HALF >> bit & 1) << 3 * bit + 2 - axis
    return np.lexsort((spread, samples))
