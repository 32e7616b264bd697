"""Forward plans in blocks: halos fused over several layers, and tiles, so that an image fits that is too large.

A stage of all layers on a group of ranks, which cut every layer along one grid of space.  Its layers are parted into
blocks (:class:`planner.ir.plan.Block`); what crosses from one to the next is held whole, what is inside is computed
tile by tile from what the block fetched at its begin.  For each group and grid

    T(j) = min over i < j and grids of tiles of  T(i) + c(i, j, tiles)        subject to  m(i, j, tiles) <= memory

    c    tiles x (the layers' seconds x the share of their work that a tile in the middle does, overlap included)
         + the exchange before the block, which on one layer alone overlaps with what it computes
    m    what earlier blocks handed on and is still read + what this one hands on + the most inside a tile

by dynamic programming over block ends, which are before or after a layer that reads more than one place: all else
stays with the layer before.  Of the tiles of a block the fewest that fit are looked at, and the next finer ones, since
overlap only grows.  The best parting is simulated exactly; where the simulator finds it too large (tiles at the edges
are priced by the one in the middle), the search is repeated with less memory.  Nothing here is proven: the bound is all
work over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod

import numpy as np

from planner.costs.candidate import Candidate
from planner.costs.communication.resharding import exchange_s
from planner.costs.layers.shards import part_of
from planner.costs.memory.table import What
from planner.costs.shards.device_mesh import factorisations, layout_on
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import LayoutPrices
from planner.extras.tiles.division import BlockReader, made_box
from planner.extras.tiles.prices import most_live_bytes
from planner.extras.tiles.refusals import block_faults
from planner.extras.tiles.workspace import box_bytes, transient_bytes
from planner.ir.box import Box, intersect, volume, whole
from planner.ir.constraints import CutDegrees
from planner.ir.errors import MissingMeasurementError
from planner.ir.graph import BYTES_PER_ELEMENT, Graph, Layer, output_of, producer, value_name
from planner.ir.lazy import once
from planner.ir.plan import Block, status_of
from planner.ir.problem import SPATIAL_DIMS, Problem
from planner.layers import kind, over_sites
from planner.layers.division import Division, LayerDivision
from planner.layers.sized import REPLICA, SPACE
from planner.schedules import traits
from planner.solvers.best_first.capacity import least_work_s
from planner.solvers.best_first.continued import HALO_ROWS, ContinuedSearch
from planner.solvers.best_first.search import Outcome
from planner.solvers.budget import Budget
from planner.solvers.candidates.candidate import group_shares, micro_batches, pools
from planner.solvers.candidates.choose import better
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import micro_batch_sizes, schedule_names
from planner.solvers.layouts.stage import NONE

MOST_TILES = 4096
"""Of one rank and block."""

_ATTEMPTS = 5
"""Searches with less and less memory, until the simulator agrees that a plan fits."""

_STAY = ("pointwise", "batch_norm")
"""Kinds that read the same place: no block begins at one of them."""

TileCounts = dict[str, int]
"""Parts by dim of space."""

BlockRange = tuple[int, int, TileCounts]
"""First layer, the one after the last, tiles."""


def runs_in_blocks(problem: Problem) -> bool:
    """Whether blocks may be used: in forward plans whose layers may be cut along space."""
    if SPATIAL_DIMS not in problem.allow or over_sites(problem.graph):
        return False
    return not any(traits(name).trains for name in schedule_names(problem))


def with_blocks(evaluator: Evaluator, outcome: Outcome, within: Budget) -> Outcome:
    """``outcome`` of the search without blocks, continued."""
    problem = evaluator.problem
    best = outcome.best
    num = 0
    bounds = [outcome.bound_s]
    for size in micro_batch_sizes(problem, evaluator.cost_model):
        bounds.append(float(least_work_s(evaluator, size, NONE).sum()) / len(problem.ranks))
        for ranks in _groups(problem):
            for cuts in _grids(len(ranks), _space_of(problem)):
                if within.is_over and best is not None:
                    break
                num += 1
                evaluation = _Parting(evaluator, ranks, cuts, size).best()
                if evaluation is not None:
                    best = better(best, evaluation)
    outcome = replace(outcome, bound_s=min(bounds))
    if best is not None:
        outcome = replace(outcome, status=status_of(outcome.status, best.step_s, min(bounds), problem.gap))
    if best is None or best is outcome.best:
        return outcome
    num_candidates = outcome.num_candidates + num
    by_num_stages = {**outcome.by_num_stages, 1: best}
    return replace(outcome, best=best, num_candidates=num_candidates, by_num_stages=by_num_stages)


SEARCH = ContinuedSearch(runs_in_blocks, outcome=with_blocks, covers=(HALO_ROWS,))


def _groups(problem: Problem) -> list[tuple[int, ...]]:
    """One rank of each pool, each pool, all ranks."""
    groups = [group for pool in pools(problem) for group in (pool.ranks[:1], pool.ranks)]
    return list(dict.fromkeys((*groups, problem.ranks)))


def _grids(count: int, dims: Sequence[str]) -> Iterator[TileCounts]:
    """How many parts along each of ``dims``, ``count`` in all; none where there are no dims."""
    return (dict(zip(dims, parts, strict=True)) for parts in (factorisations(count, len(dims)) if dims else ()))


def _space_of(problem: Problem) -> list[str]:
    dims = {dim for layer in problem.graph.layers for spec in layer.outputs for dim in spec.dims}
    return [dim for dim in SPACE if dim in dims]


@dataclass(frozen=True, slots=True)
class _BlockPart:
    """A block from layer ``first`` on, in ``tiles``; what it takes and holds."""

    first: int
    tiles: TileCounts
    seconds: float


@dataclass(eq=False)
class _Parting:
    """The best blocks on one group of ranks, for one grid of them and one size of the micro-batch."""

    evaluator: Evaluator
    ranks: tuple[int, ...]
    cuts: TileCounts
    size: int

    @once
    def stretch(self, first: int, stop: int) -> _Stretch:
        """The layers from ``first`` up to ``stop``."""
        return _Stretch(self, first, stop)

    def best(self) -> Evaluation | None:
        """The best that fits, as the simulator says; None if there is none."""
        problem = self.evaluator.problem
        if not self._options or not self._is_allowed():
            return None
        limit = min(problem.memory_limit_bytes(rank) for rank in self.ranks)
        free = float(limit)
        evaluation = None
        for _ in range(_ATTEMPTS):
            parts = self._parts(free)
            if parts is None:
                return None
            try:
                evaluation = self._evaluated(parts)
            except MissingMeasurementError:
                return None
            if evaluation is None or evaluation.fits:
                return evaluation
            over = max(evaluation.memories[rank].peak_bytes - problem.memory_limit_bytes(rank) for rank in self.ranks)
            held = (evaluation.memories[rank].held for rank in self.ranks)
            values = max(one[What.ACTIVATIONS] + one[What.WORKSPACE] for one in held)
            free = min(free * 0.98, max(values, 1) - over)
            if free <= 0:
                return None
        return None

    @cached_property
    def graph(self) -> Graph:
        """Of all layers."""
        return self.evaluator.problem.graph

    @cached_property
    def prices(self) -> LayoutPrices:
        """Of the layers on these ranks."""
        return self.evaluator.layouts.prices(self.ranks, self.size)

    @cached_property
    def _options(self) -> list[ShardingSpec]:
        """Of each layer; none where one cannot be cut along the grid."""
        grid = {**self.cuts, REPLICA: 1}
        speeds = self.prices.speeds()
        layouts = [layout_on(self.prices.sized(index), speeds, grid) for index in range(len(self.graph.layers))]
        return [] if None in layouts else [ShardingSpec.of(layout) for layout in layouts if layout is not None]

    def _is_allowed(self) -> bool:
        constraints = Constraints.of(self.evaluator.problem)
        ways = [CutDegrees.of(dict(option.cuts)) for option in self._options]
        return all(constraints.allows_layer(index, way) for index, way in enumerate(ways))

    @cached_property
    def plain(self) -> Mapping[str, LayerDivision]:
        """Every layer as the grid divides it."""
        pairs = zip(self.graph.layers, self._options, strict=True)
        placed = {layer.name: option.placement(0) for layer, option in pairs}
        return Division.placed(self.graph, placed, len(self.ranks), self.size).layers

    @cached_property
    def _ends(self) -> list[int]:
        """Where blocks may begin and end."""
        layers = self.graph.layers
        faulty = set().union(*self.faults.values())
        ends = {0, len(layers)}
        for index, layer in enumerate(layers):
            if layer.kind not in _STAY:
                ends.add(index)
            if layer.name in faulty:
                ends.update((index, index + 1))
        return sorted(ends)

    @cached_property
    def faults(self) -> dict[str, set[str]]:
        """By dim, layers that no tile along it may have; under "" those of no block at all."""
        names = [layer.name for layer in self.graph.layers]
        tiles: dict[str, TileCounts] = {"": {}, **{dim: {dim: 2} for dim in _space_of(self.evaluator.problem)}}
        return {
            dim: {name for name in names if any(block_faults(self.graph, [name], grid))} for dim, grid in tiles.items()
        }

    def _parts(self, free: float) -> list[BlockRange] | None:
        """The blocks of least time within ``free`` bytes of values; None if nothing fits."""
        ends = self._ends
        least: dict[int, float] = {0: 0.0}
        last_part: dict[int, _BlockPart] = {}
        for stop in ends[1:]:
            for first in ends:
                if first >= stop or first not in least:
                    continue
                part = self.stretch(first, stop).cheapest(free)
                if part is None:
                    continue
                total = least[first] + part.seconds
                if total < least.get(stop, inf) * (1 - 1e-9):
                    least[stop] = total
                    last_part[stop] = part
        if ends[-1] not in last_part:
            return None
        stretches = []
        stop = ends[-1]
        while stop:
            part = last_part[stop]
            stretches.append((part.first, stop, part.tiles))
            stop = part.first
        return stretches[::-1]

    @once
    def part_s(self, index: int, extents: tuple[int, ...]) -> float:
        """Seconds of a part of a layer: as measured, modelled, or its share of the whole."""
        cost_model = self.evaluator.cost_model
        device = self.evaluator.cost_model.kind(self.ranks[len(self.ranks) // 2])
        sized = self.prices.sized(index)
        whole = cost_model.tables.columns(device, self.size)[:, index]
        share = whole * (prod(extents) / max(1, prod(sized.work.shape)))
        name = sized.layer.name
        part = part_of(sized, extents)
        all_of_it = part_of(sized, sized.work.shape)
        return float(self.prices.parts.estimate(device, name, (self.size, part), all_of_it, share)[0])

    def _evaluated(self, parts: list[BlockRange]) -> Evaluation | None:
        problem = self.evaluator.problem
        names = [layer.name for layer in self.graph.layers]
        chosen = [part for part in parts if self.stretch(*part[:2]).is_block(part[2])]
        if not chosen:  # what blocks hold is known layer by layer: a plan may fit as blocks that did not without
            chosen = [part for part in parts if self.stretch(*part[:2]).may_be_block]
        blocks = tuple(
            Block(tuple(names[first:stop]), {dim: count for dim, count in tiles.items() if count > 1})
            for first, stop, tiles in chosen
        )
        if not blocks:
            return None
        for name in schedule_names(problem):
            shares = group_shares(problem, self.evaluator.cost_model, self.ranks, self.size)
            plain = Candidate.chain((0, len(names)), (self.ranks,), (shares,), micro_batches(problem, self.size), name)
            candidate = replace(plain, options=tuple(self._options), blocks=(blocks,))
            if not self.evaluator.unmet(candidate):
                return self.evaluator.evaluate(candidate)
        return None


class _Stretch:
    """The layers from one end to another as a block: time and memory by grid of tiles."""

    def __init__(self, parting: _Parting, first: int, stop: int) -> None:
        self._parting = parting
        self._first = first
        self._stop = stop
        self._names = [layer.name for layer in parting.graph.layers[first:stop]]
        self._reader = BlockReader(parting.graph, self._names, parting.plain, parting.size)
        self._member = len(parting.ranks) // 2
        inside = frozenset(self._names)
        reduces = [each.layer.name for each in self._reader.layers if kind(each.layer.kind).REDUCTION == "sum"]
        read = {producer(value) for each in self._reader.layers for value in each.layer.inputs}
        self._is_open = read.isdisjoint(reduces) or len(self._names) == 1
        self._is_alone = not parting.faults[""].isdisjoint(inside)
        self._uncut = {dim for dim, names in parting.faults.items() if dim and not names.isdisjoint(inside)}
        self._kept_bytes = self._kept()

    def cheapest(self, free: float) -> _BlockPart | None:
        """The fewest tiles that fit, or the next finer ones, whichever takes less time."""
        if not self._is_open or (self._is_alone and len(self._names) > 1) or self._kept_bytes > free:
            return None
        whole_s, whole_bytes = self._cost(tuple(self._untiled.items()))
        if whole_bytes <= free:
            return _BlockPart(self._first, self._untiled, whole_s)
        levels = self._levels
        if not levels or self._kept_bytes + self._all_ends > free:
            return None

        def fitting(level: int) -> list[tuple[float, TileCounts]]:
            costs = [(*self._cost(tuple(grid.items())), grid) for grid in levels[level]]
            return [(seconds, grid) for seconds, size, grid in costs if size <= free]

        low = 0  # the first level that fits: what a tile holds shrinks as there are more of them
        high = len(levels)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if fitting(middle) else (middle + 1, high)
        costs_that_fit = [each for level in (low, low + 1) if level < len(levels) for each in fitting(level)]
        if not costs_that_fit:
            return None
        seconds, grid = min(costs_that_fit, key=lambda each: each[0])
        return _BlockPart(self._first, grid, seconds)

    @property
    def may_be_block(self) -> bool:
        """Whether its layers may be in a block."""
        return self._is_open and not self._is_alone

    def is_block(self, grid: TileCounts) -> bool:
        """Whether something is computed twice, or in tiles: other layers run as they are, and hide their halos."""
        if prod(grid.values()) > 1:
            return True
        if len(self._parting.ranks) == 1 or self._is_alone:
            return False
        return self._overlaps

    @cached_property
    def _overlaps(self) -> bool:
        """Whether a rank computes rows of its neighbours."""
        done = self._done
        at = self._member
        return any(done.get(each.layer.name, each.own[at]) != each.own[at] for each in self._reader.layers)

    @cached_property
    def _done(self) -> Mapping[str, Box]:
        """What the rank does for all its tiles."""
        return self._reader.done(self._member, {}, {})

    @cached_property
    def _untiled(self) -> TileCounts:
        return dict.fromkeys(self._dims, 1)

    @cached_property
    def _dims(self) -> list[str]:
        return [dim for dim in _space_of(self._parting.evaluator.problem) if dim not in self._uncut]

    @cached_property
    def _levels(self) -> list[list[TileCounts]]:
        """Grids of 2, 4, 8, ... tiles: strips along the first dim, and what is nearest to squares."""
        most = {dim: self._most(dim) for dim in self._dims}
        levels: list[list[TileCounts]] = []
        count = 2
        while not self._is_alone and count <= min(MOST_TILES, prod(most.values()) if most else 1):
            grids = [grid for grid in _grids(count, self._dims) if all(grid[dim] <= most[dim] for dim in grid)]
            if not grids:
                break
            squarest = min(
                grids, key=lambda grid: sum(most[dim] / grid[dim] for dim in grid) - grid[self._dims[0]] * 1e-9
            )
            strips = [grid for grid in grids if grid[self._dims[0]] == count]
            levels.append([squarest, *(grid for grid in strips if grid != squarest)])
            count *= 2
        return levels

    @cached_property
    def _all_ends(self) -> int:
        return sum(self._end_bytes(value) for value in self._reader.ends)

    def _most(self, dim: str) -> int:
        """The rows of the smallest end that has the dim."""
        lengths = []
        for value in self._reader.ends:
            each = self._parting.plain[producer(value)]
            spec = each.work if value in self._reader.summed else each.layer.outputs[0]
            if dim in spec.dims:
                lengths.append(len(each.own[self._member][spec.dims.index(dim)]))
        return max(1, min(lengths, default=1))

    @once
    def _cost(self, parts: tuple[tuple[str, int], ...]) -> tuple[float, float]:
        """(seconds, bytes of values), of the rank and the tile in the middle, by parts of each dim."""
        grid = dict(parts)
        done = self._reader.done(self._member, grid, {dim: count // 2 for dim, count in parts})
        tiles = prod(grid.values())
        compute_s = tiles * sum(self._seconds(each, done) for each in self._reader.layers)
        moving_s, fetched = self._fetching
        is_alone = len(self._names) == 1 or not self._overlaps
        exchanged_s = max(0.0, moving_s - compute_s) if is_alone else moving_s
        ends = self._all_ends if tiles > 1 else 0
        return compute_s + exchanged_s, self._kept_bytes + ends + fetched + self._inside(done)

    def _seconds(self, each: LayerDivision, done: Mapping[str, Box]) -> float:
        box = done.get(each.layer.name)
        if box is None:
            return 0.0
        return self._parting.part_s(self._index[each.layer.name], tuple(map(len, box)))

    @cached_property
    def _index(self) -> dict[str, int]:
        return {layer.name: number for number, layer in enumerate(self._parting.prices.layers)}

    @cached_property
    def _fetching(self) -> tuple[float, int]:
        """Seconds and bytes of what a rank gets of others."""
        if len(self._parting.ranks) == 1:
            return 0.0, 0
        done = self._done
        missing_bytes = 0
        total = 0
        for each in self._reader.layers:
            box = done.get(each.layer.name)
            if box is None:
                continue
            read = kind(each.layer.kind).input_boxes(each.layer, each.inputs, box)
            for value, spec, part in zip(each.layer.inputs, each.inputs, read, strict=True):
                own = self._owned(value)
                if own is None or value not in self._reader.outside:
                    continue
                shared = intersect(part, own)
                inside = intersect(part, whole(spec.shape))
                missing = (volume(inside) if inside else 0) - (volume(shared) if shared else 0)
                size = BYTES_PER_ELEMENT[spec.dtype]
                missing_bytes = missing_bytes + max(0, missing) * size
                total = total + (volume(part) * size if missing > 0 else 0)
        if not missing_bytes:
            return 0.0, 0
        moving = np.zeros((len(self._parting.ranks),) * 2)
        moving[self._member - 1, self._member] = moving[self._member, self._member - 1] = missing_bytes
        seconds = float(exchange_s(moving, self._parting.ranks, self._parting.prices.cost_model.network))
        return seconds, missing_bytes + total

    def _kept(self) -> int:
        """What earlier blocks handed on and is read from here on, or judged by."""
        graph = self._parting.graph
        later = {value for layer in graph.layers[self._first :] for value in layer.inputs}
        loss = producer(graph.loss)
        judged = {v for layer in graph.layers if layer.kind == "loss" or layer.name == loss for v in layer.inputs}
        made = [
            value_name(layer.name, number)
            for layer in graph.layers[: self._first]
            for number in range(len(layer.outputs))
        ]
        return sum(self._end_bytes(value) for value in made if value in later | judged)

    def _end_bytes(self, value: str) -> int:
        name, output = output_of(value)
        each = self._parting.plain[name]
        return box_bytes(each.owned[output][self._member], each.layer.outputs[output].dtype)

    def _owned(self, value: str) -> Box | None:
        """What the rank owns of a layer's output; None for an input of the graph."""
        name, output = output_of(value)
        maker = self._parting.plain.get(name)
        return None if maker is None else maker.owned[output][self._member]

    def _inside(self, done: Mapping[str, Box]) -> int:
        """The most inside a tile."""
        boxes: dict[str, Box] = {}
        steps: list[tuple[Layer, dict[str, int], int]] = []
        for each in self._reader.layers:
            box = done.get(each.layer.name)
            made = dict[str, int]()
            needs = 0
            if box is not None:
                read = kind(each.layer.kind).input_boxes(each.layer, each.inputs, box)
                for number, spec in enumerate(each.layer.outputs):
                    value = value_name(each.layer.name, number)
                    boxes[value] = made_box(box, each.work, spec)
                    made[value] = box_bytes(boxes[value], spec.dtype)
                there = [
                    boxes.get(value) or self._owned(value) or whole(spec.shape)
                    for value, spec in zip(each.layer.inputs, each.inputs, strict=True)
                ]
                needs = transient_bytes(self._parting.prices.sized(self._index[each.layer.name]), read, box, there)
            steps.append((each.layer, made, needs))
        return most_live_bytes(steps, self._reader.ends)
