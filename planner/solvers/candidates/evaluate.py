"""Prices candidates by the true simulator, quickly: programs of the same shape are lowered and compiled once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from operator import add
from typing import NamedTuple

from planner import schedules
from planner.costs.cost_model import PriceBook
from planner.costs.layers.cost_table import runs_of, span
from planner.costs.memory.lifetimes import RankMemory, rank_memories
from planner.costs.memory.messages import Carried
from planner.costs.predict import FURTHER, filling
from planner.costs.simulator.events import least_s, run
from planner.costs.simulator.prices import Prices, prices_of, resources
from planner.costs.simulator.program import CompiledProgram, compile_program
from planner.costs.simulator.symmetry import Symmetry, slices, symmetry_of
from planner.costs.stages.action_costs import StageCosts
from planner.costs.stages.input_pipeline import is_core
from planner.costs.stages.placement import LayoutBook, StagePlacement, bytes_elsewhere, ties_between
from planner.costs.ties import Ties
from planner.ir.graph import Graph, producer
from planner.ir.layout import parts_of, samples_of
from planner.ir.problem import Problem
from planner.ir.schedule import Edge
from planner.layers import prepared_inputs, throughout_sites
from planner.layers.boundary import Boundaries
from planner.layers.recomputed import cores_by_index
from planner.schedules import traits
from planner.solvers.budget import ACTION_S, Budget, part_of_current
from planner.solvers.candidates.candidate import Candidate, boundaries_of, program_of
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.feasibility import schedule_names, unmet


class Load(NamedTuple):
    """Bytes between two ranks, there and back: in all, and how these are carried."""

    forward: int
    backward: int
    forward_framed: int
    forward_copied: int
    backward_framed: int
    backward_copied: int


Pieces = Mapping[tuple[int, int], Load]
"""What crosses an edge, by (rank of the source, rank of the destination)."""
Edges = Mapping[tuple[int, int], Mapping[int, Pieces]]
"""By (source stage, destination stage), then by samples of the micro-batch."""

_ROUNDING = 1e-9

_FORECAST_TAKES, _WRITTEN_TAKES = 1.5, 0.5
"""What it takes to forecast a plan (``costs.predict``), in times of one evaluation, and of one of all its ranks."""

_LAYER_S, _PART_S = 6e-4, 5e-7

_WORTH = 0.005
"""Of a step: for less no thread prepares the next one, as two threads of a process take turns with the interpreter."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What the simulator says of a candidate.

    Attributes:
        step_s: infinity if it does not fit; no more than a lower bound where that alone was asked for.
        memories: by rank; ranks that are not used hold nothing.  Empty where the step alone says that it is not wanted.
        excess_rank: the rank that is furthest over its limit, None if all fit.
        too_slow_per_s: samples a second that a stream of it sustains, where that is less than was asked for; else 0.
    """

    candidate: Candidate
    step_s: float
    memories: tuple[RankMemory, ...]
    excess_rank: int | None
    too_slow_per_s: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether every rank is known to stay within its limit, and a stream is as fast as was asked for."""
        return bool(self.memories) and self.excess_rank is None and not self.too_slow_per_s

    @property
    def peak_bytes(self) -> int:
        """The most that any rank holds."""
        return max(memory.peak_bytes for memory in self.memories)


@dataclass(eq=False)
class Evaluator:
    """Simulates candidates of one problem, and counts them.

    Attributes:
        budget: what the search may spend, by default the problem's time limit from now on; simulations are noted in it.
    """

    problem: Problem
    book: PriceBook
    num_simulated: int = 0
    within: InitVar[Budget | None] = None
    budget: Budget = field(init=False)
    _shapes: dict[object, tuple[CompiledProgram, list[int]]] = field(init=False, default_factory=dict, repr=False)
    _slices: dict[object, int] = field(init=False, default_factory=dict, repr=False)
    _pieces: dict[object, Pieces] = field(init=False, default_factory=dict, repr=False)
    _samples: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = field(init=False, default_factory=dict, repr=False)
    _readers: tuple[tuple[str, int, tuple[int, ...]], ...] = field(init=False, repr=False)
    _preparing: tuple[int, ...] = field(init=False, repr=False)
    _throughout: frozenset[int] = field(init=False, repr=False)
    layouts: LayoutBook = field(init=False, repr=False)

    def __post_init__(self, within: Budget | None) -> None:
        self.budget = within or part_of_current(self.problem.time_limit_s)
        graph = self.problem.profile.graph
        self._readers = _readers(graph)
        along = throughout_sites(graph)
        self._throughout = frozenset(i for i, layer in enumerate(graph.layers) if layer.name in along)
        prepared = frozenset(prepared_inputs(graph))
        self._preparing = tuple(i for i, layer in enumerate(graph.layers) if prepared.intersection(layer.inputs))
        self.layouts = LayoutBook(self.book, self.problem.allow, self.problem.halo_depth, self._evaluates)

    @property
    def _evaluates(self) -> bool:
        """Whether only forward passes are asked for."""
        return not any(traits(name).trains for name in self.schedules)

    @property
    def schedules(self) -> tuple[str, ...]:
        """Names of the schedules that may be used."""
        return schedule_names(self.problem)

    @cached_property
    def ties(self) -> Ties:
        """Plans held against one another."""
        return Ties(self.book)

    @cached_property
    def constraints(self) -> Constraints:
        """The problem's rules; raises as ``Constraints.of``."""
        return Constraints.of(self.problem)

    def unmet(self, candidate: Candidate) -> str:
        """What was asked for and is not met (``candidates.feasibility``); empty if the candidate may be an answer."""
        return unmet(self.constraints, candidate)

    def takes_s(self, candidate: Candidate) -> float:
        """The work of :meth:`evaluate`, about: it grows with ranks and micro-batches."""
        return ACTION_S * self.num_actions(candidate)

    def forecast_s(self, candidate: Candidate) -> float:
        """The work of a forecast, about; the rows of all ranks are written down."""
        return _FORECAST_TAKES * self.takes_s(candidate) + _WRITTEN_TAKES * ACTION_S * num_actions(candidate)

    def num_actions(self, candidate: Candidate) -> int:
        """About how many actions are simulated of it: those of ranks that nobody stands for."""
        key = (candidate.groups, candidate.shares, frozenset(candidate.micro_batches))
        if key not in self._slices:
            samples = [[self.samples(own, rows) for rows in key[2]] for own in candidate.shares]
            symmetry = slices(self.problem.profile.cluster, candidate.groups, samples)
            self._slices[key] = 1 if symmetry is None else len(symmetry.stands_for) // len(symmetry.kept)
        return num_actions(candidate) // (1 if any(candidate.options) else self._slices[key])

    @property
    def writing_s(self) -> float:
        """The work of writing a plan down, about: it has fingerprints of all layers, and their parts."""
        return (_LAYER_S + _PART_S * len(self.problem.ranks)) * len(self.problem.profile.graph.layers)

    def has_time_for(self, candidate: Candidate, within: Budget | None = None) -> bool:
        """Whether it can be evaluated within a part of the budget, or the whole, and said at last what it does."""
        takes_s, within = self.takes_s(candidate), within or self.budget
        return within.allows(takes_s + max(0.0, self.forecast_s(candidate) - within.reserve_s))

    def evaluate(self, candidate: Candidate, known_s: float = float("inf")) -> Evaluation:
        """The candidate's step and memory, as ``predict`` would find them.

        Where its ranks prepare inputs on their own cores, it is looked at both ways: each step prepared in itself, or
        in the waits of the one before.  The latter is taken where it fits and is shorter by ``_WORTH``; in the
        evaluation the candidate says which.  Of graphs there is but the latter.

        Args:
            known_s: a step that is had already: of a candidate that is not as short the memory is not asked, and where
                messages share anything it keeps a lower bound of its step (above ``known_s``), a tenth of the work.

        Raises:
            MissingMeasurementError: the profile does not say what a layer costs at a size the candidate uses.
        """
        self.budget.spend(self.takes_s(candidate))
        always = self.book.preparations.look_ahead
        if candidate.prepares_next_step is not always:
            candidate = replace(candidate, prepares_next_step=always)
        trains = schedules.traits(candidate.schedule).trains
        costs = StageCosts(self.book, self._placed(candidate), candidate.micro_batches, trains)
        edges, symmetry = self._edges(candidate), symmetry_of(costs)
        compiled, wires = self._shape(candidate, edges, costs.tied_ranks, symmetry)
        sizes, carried = _transfer_bytes(compiled, edges, candidate.micro_batches)
        may_prepare = trains and not always and candidate.prepares_ahead and self._may_prepare(compiled)
        prices = prices_of(compiled, costs, sizes, wires)
        step_s = least_s(compiled, prices) if prices.traffic is not None and known_s < float("inf") else 0.0
        is_cheap = prices.traffic is None and not may_prepare  # to simulate: cheaper than to ask what ranks hold
        if is_cheap:
            self.num_simulated += 1
            step_s = run(compiled, prices).step_s
        if step_s > known_s * (1 + _ROUNDING) and not may_prepare:
            return Evaluation(candidate, step_s, (), None)
        memories = rank_memories(costs, compiled, sizes, carried)
        if symmetry is not None:
            memories = symmetry.spread(memories)
        excess = self._excess_rank(memories)
        if excess is not None:
            step_s = float("inf")
        elif not is_cheap:
            self.num_simulated += 1
            step_s = run(compiled, prices).step_s
        if may_prepare:
            ahead = replace(costs, prepares_next_step=True)
            held = rank_memories(ahead, compiled, sizes, carried)
            if self._excess_rank(held) is None:
                sooner_s = self._step_s(compiled, prices_of(compiled, ahead, sizes, wires), known_s)
                if sooner_s < step_s * (1 - _WORTH):
                    candidate = replace(candidate, prepares_next_step=True)
                    step_s, memories = sooner_s, held
        if self.problem.rate_per_s and excess is None and step_s <= known_s:
            found_per_s = self.sustained_per_s(candidate)
            if found_per_s < self.problem.rate_per_s * (1 - _ROUNDING):
                return Evaluation(candidate, float("inf"), memories, None, found_per_s)
        return Evaluation(candidate, step_s, memories, excess)

    def _may_prepare(self, compiled: CompiledProgram) -> bool:
        """Whether ranks prepare inputs on the cores that they compute on."""
        if not compiled.num_prepared:
            return False
        devices = self.problem.profile.cluster.devices
        return all(is_core(devices[rank]) for rank, row in enumerate(compiled.grid) if row)

    def sustained_per_s(self, candidate: Candidate) -> float:
        """Samples a second of a stream of forward passes, as ``predict`` would find them."""

        def seconds(times: int) -> float:
            longer = replace(candidate, micro_batches=candidate.micro_batches * times)
            costs = StageCosts(self.book, self._placed(longer), longer.micro_batches, False)
            edges = self._edges(longer)
            compiled, wires = self._shape(longer, edges, (), None)
            sizes, _ = _transfer_bytes(compiled, edges, longer.micro_batches)
            return run(compiled, prices_of(compiled, costs, sizes, wires)).step_s

        first = filling(candidate.num_stages)
        period_s = (seconds(first + FURTHER) - seconds(first)) / FURTHER
        return sum(candidate.micro_batches) / period_s if period_s > 0 else float("inf")

    def _step_s(self, compiled: CompiledProgram, prices: Prices, known_s: float) -> float:
        if prices.traffic is not None and known_s < float("inf"):
            bound_s = least_s(compiled, prices)
            if bound_s > known_s * (1 + _ROUNDING):
                return bound_s
        return run(compiled, prices).step_s

    def samples(self, shares: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """Samples of each member of a group with ``shares``, of a micro-batch of ``rows``."""
        found = self._samples.get((shares, rows))
        if found is None:
            found = self._samples[shares, rows] = samples_of(shares, rows)
        return found

    def _loads(
        self, shares: tuple[int, ...], micro_batches: tuple[int, ...], layers: Sequence[int]
    ) -> dict[int, tuple[float, ...]]:
        """Samples of each member, by samples of the micro-batch."""
        if sum(shares) == max(micro_batches) or not self._throughout.issuperset(layers):
            return {rows: self.samples(shares, rows) for rows in set(micro_batches)}
        return {rows: parts_of(shares, rows) for rows in set(micro_batches)}

    def excess(self, found: Evaluation) -> float:
        """How many times its limit the fullest rank holds."""
        return max(self._fullness(found.memories))

    def _fullness(self, memories: Sequence[RankMemory]) -> list[float]:
        limits = [self.problem.memory_limit_bytes(rank) for rank in range(len(memories))]
        return [memory.peak_bytes / max(1, limit) for memory, limit in zip(memories, limits, strict=True)]

    def _excess_rank(self, memories: Sequence[RankMemory]) -> int | None:
        """The rank that is furthest over its limit, by ratio; None if all fit."""
        fullness = self._fullness(memories)
        worst = max(range(len(fullness)), key=fullness.__getitem__)
        return worst if memories[worst].peak_bytes > self.problem.memory_limit_bytes(worst) else None

    def _placed(self, candidate: Candidate) -> tuple[StagePlacement, ...]:
        sizes = set(candidate.micro_batches)
        layers: list[list[int]] = [[] for _ in candidate.groups]
        for index, stage in enumerate(candidate.stage_of):
            layers[stage].append(index)
        graph = self.book.tables.graph
        ties, tied = ties_between(graph.tied, candidate.stage_of, candidate.groups)
        found = []
        for stage, (group, shares) in enumerate(zip(candidate.groups, candidate.shares, strict=True)):
            runs, spans = runs_of(layers[stage]), self._spans(candidate, stage, layers[stage])
            again = {index for span in spans for index in span}
            own = {
                index: replace(option, recompute=candidate.recomputes(stage) or index in again)
                for index in layers[stage]
                if (option := candidate.option_of(index)) is not None
            }
            found.append(
                StagePlacement(
                    runs,
                    group,
                    {} if own else self._loads(shares, candidate.micro_batches, layers[stage]),
                    round(span(graph.parameter_bytes, runs)) + bytes_elsewhere(graph.tied, candidate.stage_of, stage),
                    candidate.recomputes(stage),
                    0 if own else self.problem.zero_over(len(group)),
                    ties[stage],
                    tied,
                    laid_out=self.layouts.costs(group, own, sizes, candidate.blocks_of(stage)) if own else {},
                    recomputed=spans,
                )
            )
        return tuple(found)

    def _spans(self, candidate: Candidate, stage: int, layers: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Of attention's cores in a stage, by index, those that it computes again."""
        if not candidate.recomputes_cores(stage):
            return ()
        own = frozenset(layers)
        found = (tuple(index for index in core if index in own) for core in self._cores)
        return tuple(core for core in found if core)

    @cached_property
    def _cores(self) -> tuple[tuple[int, ...], ...]:
        return cores_by_index(self.problem.profile.graph)

    def _edges(self, candidate: Candidate) -> Edges:
        stage_of = candidate.stage_of
        boundaries: Boundaries | None = None
        found: dict[tuple[int, int], dict[int, dict[tuple[int, int], Load]]] = {}
        for value, made_by, readers in self._readers:
            src = stage_of[made_by]
            by_stage: dict[int, list[int]] = {}
            for reader in readers:
                if stage_of[reader] != src:
                    by_stage.setdefault(stage_of[reader], []).append(reader)
            for dst, read_by in by_stage.items():
                for rows in set(candidate.micro_batches):
                    ends = (candidate.groups[src], candidate.shares[src], candidate.groups[dst], candidate.shares[dst])
                    own = tuple(map(candidate.option_of, (made_by, *read_by)))
                    key = (value, tuple(read_by), rows, ends, own)
                    if key not in self._pieces:
                        boundaries = boundaries or boundaries_of(self.problem.profile.graph, candidate)
                        self._pieces[key] = _pieces(boundaries, Edge(src, dst, (value,)), rows)
                    total = found.setdefault((src, dst), {}).setdefault(rows, {})
                    for pair, more in self._pieces[key].items():
                        total[pair] = Load(*map(add, total[pair], more)) if pair in total else more
        return found

    def _shape(
        self, candidate: Candidate, edges: Edges, ties: tuple[tuple[int, ...], ...], symmetry: Symmetry | None
    ) -> tuple[CompiledProgram, list[int]]:
        """The compiled program of all candidates that differ in prices alone, and the wires of its channels."""
        crossing = frozenset(
            (edge, rows, pair, load.forward > 0, load.backward > 0)
            for edge, by_rows in edges.items()
            for rows, pieces in by_rows.items()
            for pair, load in pieces.items()
        )
        prepares = frozenset(candidate.stage_of[index] for index in self._preparing)
        ways = (prepares, candidate.prepares_ahead, ties, None if symmetry is None else symmetry.kept)
        key = (candidate.schedule, candidate.windows, candidate.micro_batches, candidate.groups, crossing, ways)
        found = self._shapes.get(key)
        if found is None:
            program = program_of(self.problem.profile.graph, candidate, symmetry)
            copies = 1 if symmetry is None else symmetry.copies
            compiled = compile_program(program, candidate.micro_batches, ties, copies)
            found = self._shapes[key] = (compiled, resources(compiled, self.book.network))
        return found


def num_actions(candidate: Candidate) -> int:
    """About how many actions the candidate's program has: F and B, and their messages where there are stages."""
    each = 2 if candidate.num_stages == 1 else 6
    return each * len(candidate.micro_batches) * sum(map(len, candidate.groups))


def _readers(graph: Graph) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    """(value, layer that makes it, layers that read it) for every value that is read, layers by index."""
    made_by = {layer.name: index for index, layer in enumerate(graph.layers)}
    read_by: dict[str, list[int]] = {}
    for index, layer in enumerate(graph.layers):
        for value in dict.fromkeys(layer.inputs):
            if producer(value) in made_by:
                read_by.setdefault(value, []).append(index)
    return tuple((value, made_by[producer(value)], tuple(readers)) for value, readers in read_by.items())


def _pieces(boundaries: Boundaries, edge: Edge, rows: int) -> Pieces:
    return {
        (m.src, m.dst): Load(m.forward_bytes, m.backward_bytes, *Carried.of(m.parts), *Carried.of(m.gradient_parts))
        for m in boundaries.messages(edge, rows)
    }


def _transfer_bytes(
    compiled: CompiledProgram, edges: Edges, micro_batches: tuple[int, ...]
) -> tuple[list[int], list[Carried]]:
    """By transfer slot: all bytes, and how they are carried."""
    sizes, carried = [], []
    for slot in compiled.transfers:
        src, dst, microbatch = slot.route
        pieces = edges[src, dst][micro_batches[microbatch]]
        load = pieces[slot.src, slot.dst] if slot.forward else pieces[slot.dst, slot.src]
        sizes.append(load.forward if slot.forward else load.backward)
        there, back = (load.forward_framed, load.forward_copied), (load.backward_framed, load.backward_copied)
        carried.append(Carried(*(there if slot.forward else back)))
    return sizes, carried
