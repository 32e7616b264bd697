"""How many samples of a micro-batch each rank of a stage takes."""

from __future__ import annotations

from planner.costs.grids import proportional
from planner.costs.stage import PriceBook
from planner.ir.graph import SAMPLE
from planner.ir.layout import Layout, cut_points
from planner.ir.problem import Problem
from planner.solvers.candidates.space import is_covered

_PARTS = 1000
"""Into how many parts, or somewhat fewer, the sites of a stage are divided."""


def equal_shares(samples: int, num_ranks: int) -> tuple[int, ...]:
    """As equal as can be, the first ones larger."""
    each, more = divmod(samples, num_ranks)
    return (each + 1,) * more + (each,) * (num_ranks - more)


def samples_of(shares: tuple[int, ...], rows: int) -> tuple[int, ...]:
    """Samples of each rank in a micro-batch of ``rows``, where ``shares`` are those of a full one."""
    return Layout({SAMPLE: cut_points(shares)} if len(shares) > 1 else {}).samples(rows)


def parts_of(shares: tuple[int, ...], rows: int) -> tuple[float, ...]:
    """The same where ranks share the sites of a stage: fractions of samples (``costs.placement.loads``)."""
    return tuple(rows * share / sum(shares) for share in shares)


def site_shares(problem: Problem, book: PriceBook, ranks: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Parts of the sites of each rank of a stage, whatever the number of samples: equal, else in proportion to speed.

    Their sum is not ``size``, samples of a full micro-batch, which would make them samples.
    """
    if len({book.kind(rank) for rank in ranks}) == 1:
        each = _PARTS // len(ranks)
        return (each + (each * len(ranks) == size),) * len(ranks)
    speeds = [_samples_per_s(book, book.kind(rank)) for rank in ranks]
    return proportional(_PARTS - (size == _PARTS), speeds)


def usable(
    problem: Problem, book: PriceBook, ranks: tuple[int, ...], shares: tuple[int, ...], micro_batches: tuple[int, ...]
) -> bool:
    """Whether every rank has a sample of every micro-batch (a mean over none is none), and none more than measured."""
    divide = samples_of if sum(shares) == max(micro_batches) else parts_of
    return all(
        samples > 0 and is_covered(problem, book, book.kind(rank), samples)
        for rows in set(micro_batches)
        for rank, samples in zip(ranks, divide(shares, rows), strict=True)
    )


def replica_shares(problem: Problem, book: PriceBook, ranks: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Samples of each rank that holds the whole model, in proportion to its speed."""
    return proportional(size, [_samples_per_s(book, book.kind(rank)) for rank in ranks])


def _samples_per_s(book: PriceBook, kind: str) -> float:
    samples = book.tables.largest_measured(kind)
    table = book.tables.at(kind, samples)
    seconds = float(table.forward_s[-1] + table.backward_s[-1])
    return samples / seconds if seconds > 0 else 1.0


def group_shares(problem: Problem, book: PriceBook, ranks: tuple[int, ...], samples: int) -> tuple[int, ...]:
    """Samples of each rank of a stage: equal on devices of one kind, else in proportion to speed."""
    if len({book.kind(rank) for rank in ranks}) == 1:
        return equal_shares(samples, len(ranks))
    return replica_shares(problem, book, ranks, samples)
