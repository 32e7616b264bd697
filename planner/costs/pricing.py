"""What a decision costs: the one way from a candidate, or a plan's file, to the numbers that the simulator runs on.

    stages     its layers on their ranks                                             ``Pricing.stages``
    edges      what crosses from stage to stage, by pair of ranks                    ``Pricing.edges``
    rows       of the file, or those that the schedule gives                         ``program_of``
    program    rows as integers; those of a schedule are compiled once for all       ``Pricing.priced``
               candidates that differ in prices alone
    prices     of every action and message                                           ``PricedProgram.prices``
    memory     that each rank holds when it holds most                               ``PricedProgram.memories``

Of ranks that do the same at the same times one stands for the others (:mod:`planner.costs.simulator.symmetry`), unless
all are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add
from typing import NamedTuple

from planner.costs.candidate import Candidate, boundaries_of
from planner.costs.cost_model import CostModel
from planner.costs.layers.cost_table import IndexSpans, runs_of, span
from planner.costs.memory.lifetimes import RankMemory, rank_memories
from planner.costs.memory.messages import CoalescedMessage
from planner.costs.simulator.prices import SlotPrices, prices_of, resources
from planner.costs.simulator.program import CompiledProgram, compile_program
from planner.costs.simulator.symmetry import Symmetry, symmetry_of
from planner.costs.stages.action_costs import StageCosts
from planner.costs.stages.placement import LayoutCosts, StagePlacement, bytes_elsewhere, ties_between
from planner.costs.stages.stage_cost import StageCost
from planner.ir.cluster import RankIds
from planner.ir.errors import IllegalProgramError
from planner.ir.extras import extras, required
from planner.ir.graph import Graph, producer
from planner.ir.layout import Shares, parts_of, samples_of
from planner.ir.lazy import once
from planner.ir.plan import Size
from planner.ir.planner_extra import PartPrices, PlannerExtra
from planner.ir.profile import Profile
from planner.ir.program import Program
from planner.ir.schedule import Edge, Pipeline
from planner.layers import prepared_inputs, throughout_sites
from planner.layers.boundary import Boundaries
from planner.layers.recomputed import cores_by_index
from planner.passes import validate
from planner.passes.lowering import with_rows
from planner.schedules import schedule as schedule_named


class LoadOneWay(NamedTuple):
    """Bytes from a rank to another: in all, and how these are carried (:class:`CoalescedMessage`)."""

    num_bytes: int
    framed: int
    copied: int


class PairLoad(NamedTuple):
    """Bytes between two ranks, there and back."""

    forward: LoadOneWay
    backward: LoadOneWay


RankLoads = Mapping[tuple[int, int], PairLoad]
"""What crosses an edge, by (rank of the source, rank of the destination)."""
StageLoads = Mapping[tuple[int, int], Mapping[Size, RankLoads]]
"""By (source stage, destination stage), then by size of the micro-batch."""


@dataclass(frozen=True, slots=True, eq=False)
class PricedProgram:
    """A program with all that decides what it takes and holds.

    Attributes:
        compiled: of a symmetric one the first slice.
        transfer_bytes: by transfer slot.
        carried: by transfer slot, how these are carried.
        wires: by channel.
        symmetry: which ranks stand for which; None: each for itself.
    """

    costs: StageCosts
    compiled: CompiledProgram
    transfer_bytes: Sequence[int]
    carried: Sequence[CoalescedMessage]
    wires: Sequence[int]
    symmetry: Symmetry | None = None

    def prices(self) -> SlotPrices:
        """Of every action and message."""
        return prices_of(self.compiled, self.costs, self.transfer_bytes, self.wires)

    def memories(self) -> tuple[RankMemory, ...]:
        """What each rank holds when it holds most; ranks that are not used hold nothing."""
        memories = rank_memories(self.costs, self.compiled, self.transfer_bytes, self.carried)
        return memories if self.symmetry is None else self.symmetry.spread(memories)


@dataclass(eq=False)
class Pricing:
    """Prices of decisions on one profile; what several of them have in common is worked out once.

    Attributes:
        layouts: prices of layouts of layers; None: those of each decision's own.
    """

    cost_model: CostModel
    layouts: LayoutCosts | None = None
    _shapes: dict[object, tuple[CompiledProgram, list[int]]] = field(init=False, default_factory=dict, repr=False)
    _pieces: dict[object, RankLoads] = field(init=False, default_factory=dict, repr=False)

    @classmethod
    def of(cls, profile: Profile) -> Pricing:
        """On a profile of which no price was looked up before."""
        return cls(CostModel(profile))

    @cached_property
    def graph(self) -> Graph:
        """The profile's."""
        return self.cost_model.graph

    def priced(self, candidate: Candidate, *, each_rank: bool = False) -> PricedProgram:
        """The candidate's program with its prices.

        Args:
            each_rank: whether no rank stands for others.

        Raises:
            IllegalProgramError: the rows that it has are no legal program.
            MissingMeasurementError: the profile does not say what a layer costs at a size the candidate uses.
        """
        sizes = candidate.sizes
        costs = self._costs(candidate)
        edges = self.edges(candidate)
        symmetry = None if each_rank else symmetry_of(costs)
        if candidate.rows:  # whatever they are
            program = program_of(self.graph, candidate)
            symmetry = symmetry if symmetry is not None and symmetry.holds(program) else None
            _validate(program, symmetry)
            program = program if symmetry is None else symmetry.first(program)
            compiled, wires = self._with_wires(program, candidate, costs.tied_ranks, symmetry)
        else:
            compiled, wires = self._shape(candidate, edges, costs.tied_ranks, symmetry)
        return PricedProgram(costs, compiled, *_transfers(compiled, edges, sizes), wires, symmetry)

    def with_rows(self, candidate: Candidate) -> Candidate:
        """The candidate with the rows that its schedule gives."""
        if candidate.rows:
            return candidate
        symmetry = symmetry_of(self._costs(candidate))
        rows = program_of(self.graph, candidate, symmetry).rows
        return replace(candidate, rows=rows if symmetry is None else symmetry.spread(rows))

    def _costs(self, candidate: Candidate) -> StageCosts:
        return StageCosts(
            self.cost_model,
            self.stages(candidate),
            candidate.sizes,
            candidate.trains,
            prepares_next_step=candidate.prepares_next_step,
        )

    def stages(self, candidate: Candidate) -> tuple[StagePlacement, ...]:
        """The stages as the prices see them; raises as :meth:`priced`."""
        table = self.cost_model.tables.graph
        full = max(candidate.micro_batches)
        layouts = self.layouts or LayoutCosts(self.cost_model, evaluates=not candidate.trains)
        ties, tied = ties_between(table.tied, candidate.stage_of, candidate.groups)
        layers: list[list[int]] = [[] for _ in candidate.groups]
        for index, stage in enumerate(candidate.stage_of):
            layers[stage].append(index)
        stages = []
        for stage, (group, shares) in enumerate(zip(candidate.groups, candidate.shares, strict=True)):
            runs = runs_of(layers[stage])
            spans = self._spans(candidate, stage, layers[stage])
            costs = self._laid_out(candidate, stage, layers[stage], spans, layouts)
            divides = candidate.zero and not costs and len(group) > 1
            stages.append(
                StagePlacement(
                    runs,
                    group,
                    {} if costs else self._samples_by_size(shares, full, candidate.micro_batches, layers[stage]),
                    round(span(table.parameter_bytes, runs)) + bytes_elsewhere(table.tied, candidate.stage_of, stage),
                    candidate.recomputes(stage),
                    candidate.zero[stage] if divides else 0,
                    ties[stage],
                    tied,
                    laid_out=costs,
                    recomputed=spans,
                )
            )
        return tuple(stages)

    def _spans(self, candidate: Candidate, stage: int, layers: Sequence[int]) -> IndexSpans:
        """Layers of the stage that are computed again by themselves: a file's own spans, or attention's cores."""
        if candidate.spans:
            return candidate.spans[stage]
        if not candidate.recomputes_cores(stage):
            return ()
        own = frozenset(layers)
        inside = (tuple(index for index in core if index in own) for core in self._cores)
        return tuple(core for core in inside if core)

    def _laid_out(
        self, candidate: Candidate, stage: int, layers: Sequence[int], spans: IndexSpans, layouts: LayoutCosts
    ) -> Mapping[Size, StageCost]:
        """By size of micro-batch, what the stage costs with layouts of its layers; empty where all are cut alike."""
        group = candidate.groups[stage]
        recompute = candidate.recomputes(stage)
        if candidate.axis_parts:
            return self._part_prices().stages(self.cost_model.kind(group[0]), layers, candidate.sizes, recompute)
        in_spans = {index for span in spans for index in span}
        options = {
            index: replace(option, recompute=recompute or index in in_spans)
            for index, option in candidate.options_of(layers).items()
        }
        if not options:
            return {}
        return layouts.costs(group, options, set(candidate.micro_batches), candidate.blocks_of(stage))

    @once
    def samples(self, shares: Shares, size: int) -> tuple[int, ...]:
        """Samples of each member of a group with ``shares``, of a micro-batch of ``size``."""
        return samples_of(shares, size)

    def _part_prices(self) -> PartPrices:
        prices = (extra.part_prices(self.cost_model) for extra in extras(PlannerExtra))
        return required(prices, "planner", "prices of parts of micro-batches")

    def _samples_by_size(
        self, shares: Shares, full: int, micro_batches: Sequence[int], layers: Sequence[int]
    ) -> dict[int, tuple[float, ...]]:
        """Samples of each member, by samples of the micro-batch: where shares do not sum to a full one, parts of sites.

        Parts are of layers that lie along sites alone (``planner.layers.throughout_sites``), and are fractions.
        """
        along = throughout_sites(self.graph) if len(shares) > 1 and sum(shares) != full else frozenset()
        if not along or not all(self.graph.layers[index].name in along for index in layers):
            return {size: self.samples(shares, size) for size in set(micro_batches)}
        return {size: parts_of(shares, size) for size in set(micro_batches)}

    @cached_property
    def _cores(self) -> IndexSpans:
        return cores_by_index(self.graph)

    @cached_property
    def _preparing(self) -> tuple[int, ...]:
        """Layers that read what a host prepares."""
        prepared = frozenset(prepared_inputs(self.graph))
        return tuple(i for i, layer in enumerate(self.graph.layers) if prepared.intersection(layer.inputs))

    @cached_property
    def _readers(self) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
        """(value, layer that makes it, layers that read it) for every value that is read, layers by index."""
        made_by = {layer.name: index for index, layer in enumerate(self.graph.layers)}
        read_by: dict[str, list[int]] = {}
        for index, layer in enumerate(self.graph.layers):
            for value in dict.fromkeys(layer.inputs):
                if producer(value) in made_by:
                    read_by.setdefault(value, []).append(index)
        return tuple((value, made_by[producer(value)], tuple(readers)) for value, readers in read_by.items())

    def edges(self, candidate: Candidate) -> StageLoads:
        """What crosses from stage to stage."""
        stage_of = candidate.stage_of
        sizes = set(candidate.sizes)
        boundaries: Boundaries | None = None
        edges: dict[tuple[int, int], dict[Size, dict[tuple[int, int], PairLoad]]] = {}
        for value, made_by, readers in self._readers:
            src = stage_of[made_by]
            by_stage: dict[int, list[int]] = {}
            for reader in readers:
                if stage_of[reader] != src:
                    by_stage.setdefault(stage_of[reader], []).append(reader)
            for dst, read_by in by_stage.items():
                ends = (candidate.groups[src], candidate.shares[src], candidate.groups[dst], candidate.shares[dst])
                options = tuple(map(candidate.option_of, (made_by, *read_by)))
                for size in sizes:
                    key = (value, tuple(read_by), size, ends, options, str(candidate.blocks_of(dst)))
                    if key not in self._pieces:
                        boundaries = boundaries or boundaries_of(self.graph, candidate)
                        self._pieces[key] = _pieces(boundaries, Edge(src, dst, (value,)), size)
                    total = edges.setdefault((src, dst), {}).setdefault(size, {})
                    for pair, more in self._pieces[key].items():
                        total[pair] = _together(total[pair], more) if pair in total else more
        return edges

    def _shape(
        self, candidate: Candidate, edges: StageLoads, ties: tuple[RankIds, ...], symmetry: Symmetry | None
    ) -> tuple[CompiledProgram, list[int]]:
        """The compiled program of all candidates that differ in prices alone, and the wires of its channels."""
        crossing = frozenset(
            (edge, size, pair, load.forward.num_bytes > 0, load.backward.num_bytes > 0)
            for edge, by_size in edges.items()
            for size, pieces in by_size.items()
            for pair, load in pieces.items()
        )
        prepares = frozenset(candidate.stage_of[index] for index in self._preparing)
        of_rows = (candidate.schedule, candidate.windows, candidate.sizes, candidate.groups, candidate.prepares_ahead)
        key = (*of_rows, crossing, prepares, ties, None if symmetry is None else symmetry.kept)
        if key not in self._shapes:
            program = program_of(self.graph, candidate, symmetry)
            self._shapes[key] = self._with_wires(program, candidate, ties, symmetry)
        return self._shapes[key]

    def _with_wires(
        self, program: Program, candidate: Candidate, ties: tuple[RankIds, ...], symmetry: Symmetry | None
    ) -> tuple[CompiledProgram, list[int]]:
        """A program compiled, and the wires of its channels."""
        compiled = compile_program(program, candidate.sizes, ties, 1 if symmetry is None else symmetry.copies)
        return compiled, resources(compiled, self.cost_model.network)


def _validate(program: Program, symmetry: Symmetry | None) -> None:
    """Of slices that do the same two are looked at; an error shows the whole."""
    try:
        validate(program if symmetry is None else symmetry.legal_as(program))
    except IllegalProgramError:
        validate(program)
        raise


def program_of(graph: Graph, candidate: Candidate, symmetry: Symmetry | None = None) -> Program:
    """The candidate's program, whether it is legal or not.

    Args:
        symmetry: of the order that the schedule gives; the program is then its first slice.  None: rows of all ranks.
    """
    boundaries = boundaries_of(graph, candidate)
    edges = boundaries.edges()
    sizes = candidate.sizes
    stages = boundaries.stages(edges, sizes)
    routes = boundaries.routes(edges, sizes)
    if candidate.rows:
        return Program(candidate.rows, stages, candidate.groups, routes)
    order = schedule_named(candidate.schedule)(Pipeline(stages, candidate.positions, candidate.windows))
    num_ranks = 1 + max(candidate.used_ranks)
    kept, messages = (range(num_ranks), routes) if symmetry is None else (symmetry.kept, symmetry.routes(routes))
    draft = Program(((),) * num_ranks, stages, candidate.groups, messages)
    return with_rows(draft, order, kept, candidate.prepares_ahead)


def _pieces(boundaries: Boundaries, edge: Edge, size: Size) -> RankLoads:
    return {
        (m.src, m.dst): PairLoad(
            LoadOneWay(m.forward_bytes, *CoalescedMessage.of(m.parts)),
            LoadOneWay(m.backward_bytes, *CoalescedMessage.of(m.gradient_parts)),
        )
        for m in boundaries.messages(edge, size)
    }


def _together(one: PairLoad, other: PairLoad) -> PairLoad:
    return PairLoad(*(LoadOneWay(*map(add, *ways)) for ways in zip(one, other, strict=True)))


def _transfers(
    compiled: CompiledProgram, edges: StageLoads, sizes: Sequence[Size]
) -> tuple[list[int], list[CoalescedMessage]]:
    """By transfer slot: all bytes, and how they are carried."""
    num_bytes = []
    carried = []
    for slot in compiled.transfers:
        src, dst, microbatch = slot.route
        pieces = edges[src, dst][sizes[microbatch]]
        load = pieces[slot.src, slot.dst].forward if slot.forward else pieces[slot.dst, slot.src].backward
        num_bytes.append(load.num_bytes)
        carried.append(CoalescedMessage(load.framed, load.copied))
    return num_bytes, carried
