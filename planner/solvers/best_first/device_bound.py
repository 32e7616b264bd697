"""A bound of every pipeline of one way to cut the batch: how few devices a step of T needs, whatever its groups.

Given       M micro-batches of S samples; kinds k of D_k devices; a chain of cuts, or a lattice of them
Relaxed     links between stages take nothing; a stage keeps one micro-batch; members of a group are of any hosts; a
            device counts by what it can do: weights w_k with all devices sum w_k D_k                  ``capacity``

A stage on the layers i to j whose fullest member, of kind k, has x samples of each micro-batch ends no sooner than

    A_k(i, j, x) = h(i) + max(M (f + b)_k(i, j, x) + g(i), M (f + W)_k(i, j, x) + a(i, j, n) + u(i, j))    ``_ends_s``

    h(i), g(i)  F before the stage, B behind it: the longest path to what it reads, in the shortest times of each layer
    f, b, W     F, the B that a gradient passes through, all of a backward, of x samples or more: where fewer take
                longer than more, the time of more
    a           the sums of gradients over n ranks or more, bucket by bucket (each has its ring's latency), less what
                the last backward hides                                                              ``least_sums_s``
    u           the update

so that in T it does x_k(i, j; T) = max {x: A_k(i, j, x) <= T} samples on a device of kind k, and needs devices of

    N(i, j; T) = ceil(S / x) of one kind,    S min_k w_k / x_k  of several

together (d_k devices of each do at most sum d_k x_k samples, and these are S at least).  The fewest of a pipeline are

    G(i; T) = min over j of N(i, j; T) + G(j; T),    G(end) = 0

and no pipeline with G(0; T) > sum w_k D_k takes T or less: the bound is the largest such T, by bisection.  M times the
slowest stage behind h and before g is the bubble; a is what replicas cost.

Where there are many cuts stages begin and end between ``MOST_CUTS`` of them, and of each only what is surely inside
counts.  Equal to or below the step of every pipeline that ``Labels`` bounds, of any size of groups: it holds for what
coarser groups of ``DeviceStates`` leave out, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from planner.costs.layers.cost_table import Array
from planner.costs.stages.gradient_overlap import least_sums_s
from planner.costs.stages.stage_sums import LeastPasses
from planner.ir.errors import MissingMeasurementError
from planner.ir.problem import NEVER
from planner.solvers.best_first.graph_cuts import Flags, Numbers
from planner.solvers.best_first.priced_groups import GroupPrices
from planner.solvers.budget import MOST_BYTES, NUMBER_S, OutOfTimeError, check_time
from planner.solvers.candidates.feasibility import is_covered

MOST_CUTS = 256
"""Cuts that are told apart."""

_HALVINGS = 8
_ROUNDING = 1e-9
_ROUNDS = 40  # of the search for weights
_FEW_SAMPLES = 16  # up to this micro-batch every share of it is looked at on unlike devices
_MANY_TIMES = 1e6  # the work over capacity


@dataclass(frozen=True, slots=True, eq=False)
class Capacity:
    """What devices of unlike kinds can do together.

    Attributes:
        weights: by kind, of a device, 1 at most.
        devices: sum of the weights of all.
        work_s: all work of a step over all devices: no plan is faster.
    """

    weights: tuple[float, ...]
    devices: float
    work_s: float


def capacity(seconds: Array, counts: Sequence[int]) -> Capacity:
    """The least T in which layers, shared at will among devices, can be done.

    That is ``min T: sum_l t_kl y_kl <= D_k T, sum_k y_kl = 1``, by its dual: for any weights w >= 0,
    ``T >= sum_l min_k w_k t_kl / sum_k w_k D_k``, which is concave in w and equal at the best of them.

    Args:
        seconds: device time by kind and layer; infinite where a kind cannot be used.
        counts: devices by kind.
    """
    usable = np.isfinite(seconds).all(axis=1)
    devices = np.array(counts, dtype=np.float64)
    if not usable.any():
        return Capacity((1.0,) * len(counts), float(devices.sum()), 0.0)
    speeds = np.where(usable, 1 / np.maximum(np.where(usable, seconds.sum(axis=1), 1.0), 1e-300), 0.0)

    def at(weights: Array) -> float:
        least = (weights[usable, None] * seconds[usable]).min(axis=0)
        return float(least.sum() / (weights * devices).sum())

    weights = speeds / speeds.max()  # a kind that was measured nowhere does nothing
    best, step = at(weights), 1.5
    for _ in range(_ROUNDS if usable.sum() > 1 else 0):
        one = np.eye(len(weights))
        moved = [weights * step ** (sign * row) for row in one for sign in (1, -1)]
        bounds = [at(other) for other in moved]
        if max(bounds) > best:
            best, weights = max(bounds), moved[int(np.argmax(bounds))]
        else:
            step = 1 + (step - 1) / 2
    weights = weights / weights.max()
    return Capacity(tuple(weights.tolist()), float((weights * devices).sum()), best)


@dataclass(frozen=True, slots=True, eq=False)
class _Ends:
    """When stages end at the earliest, on one kind, by number of samples of the fullest member.

    Attributes:
        samples: ascending.
        end_s: by number of samples, first and last place; infinite where there is no stage.
    """

    samples: tuple[int, ...]
    end_s: Array


_PASSES = 20
"""Times that a number of a table is looked at before it is known, about."""


def least_step_s(prices: GroupPrices, capacity: Capacity, upper_s: float = float("inf")) -> float:
    """No pipeline of one way to cut the batch takes less; where this would exceed ``upper_s``, that."""
    places = _places(prices)
    if prices.throughout.any() or places is None or not capacity.work_s:  # members may share sites, not samples
        return capacity.work_s
    is_mixed = len({pool.kind for pool in prices.pools}) > 1
    ends = [_ends(prices, kind, places, is_mixed) for kind in dict.fromkeys(pool.kind for pool in prices.pools)]
    inside = np.logical_or.reduce([np.isfinite(of_kind.end_s).any(axis=0) for of_kind in ends])

    def is_enough(step_s: float) -> bool:
        check_time(NUMBER_S * sum(of_kind.end_s.size for of_kind in ends))
        needed = np.full(inside.shape, np.inf)
        for weight, of_kind in zip(capacity.weights, ends, strict=True):
            needed = np.minimum(needed, _devices(prices.micro_batches[0], of_kind, weight, step_s, is_mixed))
        fewest = np.zeros(len(inside))
        for first in reversed(range(len(inside) - 1)):
            fewest[first] = (needed[first] + fewest).min(where=inside[first], initial=np.inf)
        return bool(fewest[0] <= capacity.devices * (1 + _ROUNDING))

    low_s, high_s = capacity.work_s, upper_s
    if not np.isfinite(high_s):
        high_s = low_s
        while not is_enough(high_s := 2 * high_s):
            low_s = high_s
            if high_s > _MANY_TIMES * capacity.work_s:
                return low_s
    elif low_s >= high_s or not is_enough(high_s):
        return max(low_s, high_s)
    for _ in range(_HALVINGS):
        step_s = (low_s * high_s) ** 0.5
        low_s, high_s = (low_s, step_s) if is_enough(step_s) else (step_s, high_s)
    return max(capacity.work_s, low_s * (1 - _ROUNDING))


def _devices(size: int, ends: _Ends, weight: float, step_s: float, is_mixed: bool) -> Array:
    """The devices, by weight, that a stage needs to end in time; by first and last place."""
    needed = np.full(ends.end_s.shape[1:], np.inf)
    for number, end_s in enumerate(ends.end_s):
        if is_mixed:  # in a group of several kinds, of which this one does more than any
            most = ends.samples[number + 1] - 1 if number + 1 < len(ends.samples) else ends.samples[number]
            devices = size / most
        else:
            devices = float(-(-size // ends.samples[number]))
        needed = np.where(end_s <= step_s, weight * devices, needed)
    return needed


@dataclass(frozen=True, slots=True, eq=False)
class _CutPlaces:
    """Cuts that are told apart.

    Attributes:
        cuts: all of them, or some of a chain.
        first, last: the cuts between which a stage surely has all layers that begins and ends at two places or behind.
        outer: the cut that no stage goes beyond that ends there.
    """

    cuts: Numbers
    first: Numbers
    last: Numbers
    outer: Numbers


def _places(prices: GroupPrices) -> _CutPlaces | None:
    """None where there are too many cuts that are no chain."""
    cuts, count = prices.cuts, len(prices.cuts.members)
    every = np.arange(count)
    if count <= MOST_CUTS:
        return _CutPlaces(every, every, every, every)
    if not np.array_equal(cuts.inside, np.triu(np.ones((count, count), dtype=bool), 1)):
        return None
    weight = cuts.sums(np.where(np.isfinite(least := prices.capacity_s().min(axis=0)), least, 0.0))
    wanted = np.searchsorted(weight, np.linspace(0.0, weight[-1], MOST_CUTS))
    places = np.unique(np.concatenate(([0], np.minimum(wanted, count - 1), [count - 1])))
    behind = np.append(places[1:], count - 1)
    return _CutPlaces(places, behind, places, behind)


def _ends(prices: GroupPrices, kind: str, places: _CutPlaces, is_mixed: bool) -> _Ends:
    """The earliest ends of stages on devices of a kind."""
    cuts, cost_model, size = prices.cuts, prices.cost_model, prices.micro_batches[0]
    trains, count = prices.freedom.trains, len(prices.micro_batches)
    full = count - (prices.micro_batches[-1] != size)
    counts = range(1, len(prices.problem.ranks) + 1)
    samples = tuple(
        sorted(set(range(1, size + 1) if is_mixed and size <= _FEW_SAMPLES else {-(-size // n) for n in counts}))
    )
    first, last = np.meshgrid(places.first, places.last, indexing="ij")
    last = np.maximum(first, last)
    possible = cuts.inside[np.ix_(places.cuts, places.cuts)]
    before, behind = _around(prices, places, is_mixed)
    update = cuts.sums(trains * np.diff(cost_model.tables.parameters(kind).update_s))
    update_s = (update[last] - update[first]) / (len(counts) if prices.problem.shard != NEVER else 1)
    of_sums_s = _least_sums_s(prices)
    if 8 * len(samples) * possible.size > MOST_BYTES // 4:
        raise OutOfTimeError
    earliest_s = np.full((len(samples), *possible.shape), np.inf)
    for number, rows in enumerate(samples):
        check_time(_PASSES * NUMBER_S * possible.size)
        least = _least_s(prices, kind, rows, size)
        if least is None:
            continue
        works = map(cuts.sums, least.works_s(full))
        work_s, all_work_s = ((sums[last] - sums[first]) for sums in works)
        ranks = -(-size // rows)
        if ranks > len(prices.problem.ranks) and not is_mixed:  # others of unlike members may have more
            continue
        sums_s = np.zeros_like(work_s)
        if of_sums_s is not None and ranks > 1 and trains:
            fewest, most = (2, size) if is_mixed else (ranks, rows)
            summed, hidden = (cuts.sums(each) for each in (of_sums_s[fewest], _longest_back_s(prices, most)))
            hides_s = hidden[np.maximum(places.outer, places.cuts)][None, :] - hidden[places.cuts][:, None]
            sums_s = np.maximum(0.0, summed[last] - summed[first] - hides_s)
        end_s = np.maximum(work_s + behind[:, None], all_work_s + sums_s + update_s)
        fits = possible & _fits(prices, kind, ranks, first, last)
        earliest_s[number] = np.where(fits, before[:, None] + end_s, np.inf)
    return _Ends(samples, earliest_s)


def _fits(prices: GroupPrices, kind: str, num_ranks: int, first: Numbers, last: Numbers) -> Flags:
    """Whether so many devices of a kind may hold a stage, if the fullest has a share as large as where all are equal.

    Yes where devices of the kind have unlike memories, or divide what they hold among them.
    """
    left, counts = num_ranks, []
    for pool in prices.pools:
        counts.append(min(left, len(pool.ranks)) if pool.kind == kind else 0)
        left -= counts[-1]
    memories = {pool.memory_limit_bytes for pool in prices.pools if pool.kind == kind}
    groups = prices.versions(tuple(counts)) if not left else ()
    plain = len(memories) == 1 and prices.problem.shard == NEVER
    if not groups or not plain or any(group.allowed is not None for group in groups):
        return np.ones(first.shape, dtype=bool)
    return np.asarray(np.maximum.reduce([group.stage(first, last).window for group in groups]) > 0)


def _sizes(prices: GroupPrices, kind: str, least: int, most: int) -> list[int]:
    """Numbers of samples between which times rise or fall: the ends, and what was measured between."""
    measured = {m.samples for m in prices.problem.profile.measurements.get(kind, ()) if least < m.samples < most}
    return sorted({least, most} | measured)


def _least_s(prices: GroupPrices, kind: str, least: int, most: int) -> LeastPasses | None:
    """What passes take at least, by layer, of a number of samples between two."""
    cost_model, splits, trains = prices.cost_model, prices.freedom.splits, prices.freedom.trains
    if not is_covered(prices.problem, cost_model, kind, least):
        return None
    by_size = []
    for samples in _sizes(prices, kind, least, most):
        for shared in (False, True):
            with suppress(MissingMeasurementError):
                by_size.append(np.diff(cost_model.sums(kind, samples, shared, recompute=False).least(trains, splits)))
    return LeastPasses(*np.minimum.reduce(by_size)) if by_size else None


def _longest_back_s(prices: GroupPrices, most: int) -> Array:
    """The longest B of each layer, of so many samples at most, on any kind."""
    longest = np.zeros(len(prices.problem.profile.graph.layers))
    for kind in {pool.kind for pool in prices.pools}:
        for samples in _sizes(prices, kind, 1, most):
            for shared in (False, True):
                with suppress(MissingMeasurementError):
                    longest = np.maximum(longest, np.diff(prices.cost_model.at(kind, samples, shared).backward_s))
    return longest


def _around(prices: GroupPrices, places: _CutPlaces, is_mixed: bool) -> tuple[Array, Array]:
    """F before a stage that begins at each place or up to the next, and B behind it, at least."""
    cuts, smallest = prices.cuts, min(prices.micro_batches)
    fewest = 1 if is_mixed else max(1, smallest // len(prices.problem.ranks))
    sized = [_least_s(prices, kind, fewest, prices.micro_batches[0]) for kind in {pool.kind for pool in prices.pools}]
    of_kinds = [of_kind[:2] for of_kind in sized if of_kind is not None]
    if not of_kinds:
        return np.zeros(len(places.cuts)), np.zeros(len(places.cuts))
    layer_s = np.minimum.reduce(of_kinds)
    count = layer_s.shape[1]
    longest = np.zeros((2, count))  # F, B: of the layers on the longest path to each layer, without its own
    reads: list[list[tuple[int, bool]]] = [[] for _ in range(count)]
    for value in cuts.values:
        for reader, _ in value.readers:
            reads[reader].append((value.maker, value.has_gradient))
    first = np.zeros((2, len(cuts.members)))
    for layer in range(count):
        for maker, has_gradient in reads[layer]:
            longest[0, layer] = max(longest[0, layer], longest[0, maker] + layer_s[0, maker])
            if has_gradient:
                longest[1, layer] = max(longest[1, layer], longest[1, maker] + layer_s[1, maker])
    check_time(NUMBER_S * count * len(cuts.members))
    outside = np.array(cuts.members, dtype=np.float64) == 0
    begins = outside.copy()
    for layer in range(count):
        for maker, _ in reads[layer]:
            begins[:, layer] &= ~outside[:, maker]
    first[:, :-1] = np.where(begins[:-1], longest[:, None], np.inf).min(axis=2)
    if len(places.cuts) < len(cuts.members):  # the least up to the next place
        first = np.minimum.reduceat(first, places.cuts, axis=1)
    return first[0], first[1]


def _least_sums_s(prices: GroupPrices) -> Array | None:
    """By number of ranks and layer, what so many or more take at least to sum its gradients; None: not known."""
    cost_model = prices.cost_model
    ranks = prices.problem.ranks
    exchanges = any(sums.any() for sums in cost_model.exchanges_s(ranks[:2], prices.micro_batches[0]))
    if prices.problem.shard != NEVER or exchanges:  # sums may take less, or hide behind more
        return None
    return least_sums_s(cost_model.profile, lambda sizes: cost_model.network.least_sums_s(tuple(sizes.tolist())))
