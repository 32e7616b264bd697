"""A decision in indices: what the search looks at, and what is priced, of a candidate and of a plan's file alike.

Candidate        where the graph is cut, on which ranks, in which micro-batches and which order
candidate_of     a plan's decision, whose names and rows of text are read here and nowhere else
boundaries_of    who owns, needs and sends what
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise

from planner.costs.layers.cost_table import IndexSpans
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.stage_sums import RecomputeMask
from planner.ir.cluster import RankIds
from planner.ir.graph import SAMPLE, Graph
from planner.ir.layout import Layout, Shares, cut_points
from planner.ir.plan import BatchSizes, Block, Decision, Placement, Size, sizes_of
from planner.ir.schedule import FORWARD_PASS, Action, Windows
from planner.layers.boundary import Boundaries
from planner.schedules import traits


class Recomputes(IntEnum):
    """What a stage computes again before a backward, or in it: nothing, all activations, or attention's cores alone."""

    NOTHING = 0
    ALL = 1
    CORES = 2


def recompute_mask(recompute: Recomputes, cores: tuple[int, ...]) -> RecomputeMask:
    """Which layers of a stage that is asked to are computed again; ``cores``: the layers of all, by index."""
    return cores if recompute == Recomputes.CORES else recompute == Recomputes.ALL


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decision in indices: a point of the searched space, or what a plan's file says.

    Attributes:
        stage_of: the stage of each layer, in the graph's order; stages are in topological order.
        groups: ranks of each stage; stages on the same ranks, in any order, are virtual stages of one position.
        shares: samples of each rank of each stage, in a full micro-batch.
        micro_batches: samples of each.
        schedule: its name.
        windows: most forwards before the first backward, by stage; empty: the schedule's own.
        recompute: by stage, which activations are computed again for the backward; empty: none anywhere.
        options: by layer: how it is divided where its stage is not cut along samples alone, else None; empty: nowhere.
        prepares_ahead: whether hosts prepare inputs one micro-batch ahead (``passes.lower``).
        prepares_next_step: whether threads prepare the next step's inputs during this one; whoever evaluates the
            candidate decides (:meth:`planner.solvers.candidates.evaluate.Evaluator.evaluate`).
        blocks: by stage, layers that are run in blocks; empty: nowhere.
        axis_parts: lengths of the parts that micro-batches are cut into along an axis with an order; empty: none.
        zero: by stage, what its ranks divide among them (``planner.ir.plan.Stage.level``); empty: nothing.
        spans: by stage, layers that are computed again span by span; empty: as ``recompute`` says.
        rows: actions by rank; empty: what the schedule gives.
    """

    stage_of: tuple[int, ...]
    groups: tuple[RankIds, ...]
    shares: tuple[Shares, ...]
    micro_batches: BatchSizes
    schedule: str
    windows: Windows = ()
    recompute: tuple[Recomputes, ...] = ()
    options: tuple[ShardingSpec | None, ...] = ()
    prepares_ahead: bool = True
    blocks: tuple[tuple[Block, ...], ...] = ()
    axis_parts: tuple[int, ...] = ()
    prepares_next_step: bool = False
    zero: tuple[int, ...] = ()
    spans: tuple[IndexSpans, ...] = ()
    rows: tuple[tuple[Action, ...], ...] = ()

    @classmethod
    def chain(
        cls,
        bounds: tuple[int, ...],
        groups: tuple[RankIds, ...],
        shares: tuple[Shares, ...],
        micro_batches: BatchSizes,
        schedule: str,
    ) -> Candidate:
        """Stage ``s`` has layers ``bounds[s]`` to ``bounds[s + 1]`` of the graph."""
        stage_of = tuple(stage for stage, (first, last) in enumerate(pairwise(bounds)) for _ in range(first, last))
        return cls(stage_of, groups, shares, micro_batches, schedule)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.groups)

    @property
    def used_ranks(self) -> tuple[int, ...]:
        """The ranks that have a stage."""
        return tuple(sorted({rank for group in self.groups for rank in group}))

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Of each of the program's micro-batches, or their parts."""
        return sizes_of(self.micro_batches, self.axis_parts)

    @property
    def trains(self) -> bool:
        """Whether its program is more than forward passes."""
        if self.rows:
            return any(action.op not in FORWARD_PASS for row in self.rows for action in row)
        return traits(self.schedule).trains

    @property
    def positions(self) -> tuple[int, ...]:
        """The position that runs each stage; empty if every stage has its own."""
        groups = [frozenset(group) for group in self.groups]
        numbers = {group: position for position, group in enumerate(dict.fromkeys(groups))}
        return () if len(numbers) == len(groups) else tuple(numbers[group] for group in groups)

    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each stage; nothing is cut on a stage of one rank."""
        return tuple(Layout({SAMPLE: cut_points(share)} if len(share) > 1 else {}) for share in self.shares)

    def option_of(self, layer: int) -> ShardingSpec | None:
        """How the layer is divided; None if it is as its stage's shares say."""
        return self.options[layer] if self.options else None

    def layers_of(self, stage: int) -> list[int]:
        """Its layers, by index."""
        return [index for index, number in enumerate(self.stage_of) if number == stage]

    def options_of(self, layers: Iterable[int]) -> dict[int, ShardingSpec]:
        """How layers are divided, those that are so each in their own way."""
        return {index: option for index in layers if (option := self.option_of(index)) is not None}

    def placement_of(self, layer: int) -> Placement:
        """How a plan writes down where the layer runs."""
        stage = self.stage_of[layer]
        option = self.option_of(layer)
        return Placement(stage, self.layouts()[stage].cuts) if option is None else option.placement(stage)

    def blocks_of(self, stage: int) -> tuple[Block, ...]:
        """What is run in blocks of a stage."""
        return self.blocks[stage] if self.blocks else ()

    def recomputes(self, stage: int) -> bool:
        """Whether ``stage`` computes all its activations again."""
        return bool(self.recompute) and self.recompute[stage] == Recomputes.ALL

    def recomputes_cores(self, stage: int) -> bool:
        """Whether ``stage`` computes attention's cores again, and nothing else."""
        return bool(self.recompute) and self.recompute[stage] == Recomputes.CORES and self.trains

    def has_own_options(self, stage: int) -> bool:
        """Whether the layers of ``stage`` are each divided in their own way."""
        return bool(self.options_of(self.layers_of(stage)))

    def repeated(self, times: int) -> Candidate:
        """The rows ``times`` times, one after another, on as many batches; each prepares its own inputs."""
        count = len(self.sizes)

        def later(action: Action, turn: int) -> Action:
            at = action.microbatch
            return action if at is None else replace(action, microbatch=at + turn * count)

        rows = tuple(tuple(later(action, turn) for turn in range(times) for action in row) for row in self.rows)
        return replace(self, micro_batches=self.micro_batches * times, rows=rows, prepares_next_step=False)


def candidate_of(graph: Graph, decision: Decision) -> Candidate:
    """A plan's decision in indices.

    Raises:
        ValueError: an entry of its program is not an action.
    """
    index = {layer.name: place for place, layer in enumerate(graph.layers)}
    options: list[ShardingSpec | None] = [None] * len(graph.layers)
    shares: list[tuple[int, ...]] = []
    for number, stage in enumerate(decision.stages):
        placed = {index[name]: ShardingSpec.placed(decision.layers[name]) for name in decision.layers_of(number)}
        if not stage.blocks and cut_alike([option.cuts for option in placed.values()]):
            points = decision.layout_of(number).cuts.get(SAMPLE, (0, 1))
            shares.append(tuple(b - a for a, b in pairwise(points)))
            continue
        shares.append(())
        for place, option in placed.items():
            options[place] = option
    own = Candidate(
        tuple(decision.layers[layer.name].stage for layer in graph.layers),
        tuple(stage.ranks for stage in decision.stages),
        tuple(shares),
        decision.micro_batches,
        decision.schedule,
        recompute=tuple(Recomputes(stage.recompute) for stage in decision.stages),
        options=tuple(options) if any(option is not None for option in options) else (),
        blocks=tuple(stage.blocks for stage in decision.stages),
        axis_parts=decision.token_slices,
        prepares_next_step=decision.prepares_next_step,
        zero=tuple(stage.level for stage in decision.stages),
        rows=decision.rows(),
    )
    spans = (tuple(tuple(index[name] for name in span) for span in stage.recomputed) for stage in decision.stages)
    return replace(own, spans=tuple(spans)) if own.trains else own


def cut_alike(cuts: Collection[object]) -> bool:
    """Whether layers are all cut in the same way, along samples at most (cuts as in :class:`ShardingSpec`)."""
    kinds = set(cuts)
    return len(kinds) <= 1 and all(dim == SAMPLE for each in kinds if isinstance(each, tuple) for dim, _ in each)


def boundaries_of(graph: Graph, candidate: Candidate) -> Boundaries:
    """Who owns, needs and sends what."""
    layers = graph.layers
    divided = candidate.options_of(range(len(layers)))
    return Boundaries.of(
        graph,
        {layer.name: stage for layer, stage in zip(layers, candidate.stage_of, strict=True)},
        candidate.layouts(),
        candidate.groups,
        {layers[index].name: option.layout for index, option in divided.items()},
        {
            layers[index].name: option.placement(candidate.stage_of[index])
            for index, option in divided.items()
            if option.ways > 1 or option.margin
        },
        dict(enumerate(candidate.blocks)),
    ).in_parts(candidate.axis_parts)
