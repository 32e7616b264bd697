"""Which hybrids there are: stages of replicas on whole hosts or beside one another in each, kinds in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

from planner.solvers.best_first.device_groups import Counts
from planner.solvers.best_first.pace_table import Places
from planner.solvers.best_first.pace_table import placed as columns_placed
from planner.solvers.best_first.priced_groups import GroupPrices
from planner.solvers.candidates.candidate import DevicePool

_STAGES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32)
_STAGES_OF_KIND = (1, 2, 3, 4, 6, 8)
_MANY_KINDS = 3  # of more, kinds come in order of speed alone


@dataclass(frozen=True, slots=True)
class Shape:
    """Stages on devices, not yet cut.

    Attributes:
        segments: (kinds, stages, devices of each kind that a stage has), along the pipeline.
        beside: how many stages that follow one another share hosts, each with as many devices of every host.
    """

    segments: tuple[tuple[tuple[str, ...], int, tuple[int, ...]], ...]
    beside: int = 1

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return sum(count for _, count, _ in self.segments)


def shapes(prices: GroupPrices) -> Iterator[Shape]:
    """Every hybrid of the pools."""
    kinds = prices.devices_by_kind()
    most = min(prices.cuts.last, prices.freedom.max_stages or prices.cuts.last)
    replicates, host = prices.freedom.may_replicate, max(len(pool.ranks) for pool in prices.pools)
    for kind, count in kinds.items():
        for stages in _up_to(_STAGES, min(most, count)):
            for each in _sizes(count // stages, host) if replicates else (1,):
                yield from _in_hosts((((kind,), stages, (each,)),), prices.pools)
    if len(kinds) < 2:
        return
    if replicates:
        every = tuple(kinds)
        for stages in _up_to(_STAGES, min(most, *kinds.values())):
            yield Shape(((every, stages, tuple(kinds[kind] // stages for kind in every)),))
    fastest = sorted(kinds, key=lambda kind: float(prices.capacity_s()[list(kinds).index(kind)].sum()))
    orders = permutations(kinds) if len(kinds) <= _MANY_KINDS else iter((fastest, fastest[::-1]))
    for order in orders:
        for counts in product(*(_up_to(_STAGES_OF_KIND, min(most, kinds[kind])) for kind in order)):
            if sum(counts) <= most:
                rooms = [kinds[kind] // stages for kind, stages in zip(order, counts, strict=True)]
                sizes = [_sizes(room, host)[0] if replicates else 1 for room in rooms]
                parts = zip(order, counts, sizes, strict=True)
                yield Shape(tuple(((kind,), stages, (size,)) for kind, stages, size in parts))


def _in_hosts(
    segments: tuple[tuple[tuple[str, ...], int, tuple[int, ...]], ...], pools: Sequence[DevicePool]
) -> Iterator[Shape]:
    """Stages on hosts of their own, and where that is another shape those with others beside them."""
    yield Shape(segments)
    ((kinds, stages, (each,)),) = segments
    host = min(len(pool.ranks) for pool in pools if pool.kind in kinds)
    for beside in {stages, *(1 << power for power in range(host.bit_length()))}:
        if 1 < beside <= min(stages, host) and stages % beside == 0 and each > host // beside:
            yield Shape(segments, beside)


def _up_to(numbers: Sequence[int], most: int) -> tuple[int, ...]:
    return tuple(sorted({number for number in numbers if number <= most} | ({most} if most <= numbers[-1] else set())))


def _sizes(most: int, host: int) -> tuple[int, ...]:
    """All, of larger groups than a host whole hosts, and the powers of two below."""
    whole = most - most % host if most > host else most
    return tuple(sorted({whole, *(1 << power for power in range(whole.bit_length()))}, reverse=True))


def placed(shape: Shape, pools: Sequence[DevicePool]) -> tuple[Counts, ...] | None:
    """The devices of each stage by pool, hosts whole where a stage is larger than one; None if there are too few."""
    if shape.beside > 1:
        return _placed_beside(shape, pools)
    columns: list[Places] = []
    for kinds, stages, sizes in shape.segments:
        of_kind = dict(zip(kinds, sizes, strict=True))
        every = dict.fromkeys(pool.kind for pool in pools)
        columns += [Places(tuple(of_kind.get(kind, 0) for kind in every))] * stages
    return columns_placed(columns, pools)


def _placed_beside(shape: Shape, pools: Sequence[DevicePool]) -> tuple[Counts, ...] | None:
    ((kinds, stages, (size,)),) = shape.segments
    members = [number for number, pool in enumerate(pools) if pool.kind in kinds]
    each = min(len(pools[number].ranks) for number in members) // shape.beside
    hosts = -(-size // each)
    by_stage: list[Counts] = []
    for stage in range(stages):
        own = members[stage // shape.beside * hosts :][:hosts]
        counts, left = [0] * len(pools), size
        for number in own:
            counts[number] = min(each, left)
            left -= counts[number]
        if left:
            return None
        by_stage.append(tuple(counts))
    return tuple(by_stage)
