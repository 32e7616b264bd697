"""From what a solver chooses (where to cut, on which ranks, which micro-batches and schedule) to a whole plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from planner.costs.shards import Option
from planner.ir.fingerprint import fingerprint
from planner.ir.graph import SAMPLE, Graph
from planner.ir.layout import Layout, cut_points
from planner.ir.plan import Alternative, Decision, Placement, Plan, PlanInputs, Prediction, Search, Stage
from planner.ir.problem import Problem
from planner.ir.program import Program
from planner.ir.schedule import Pipeline, StageGraph
from planner.layers.boundary import Boundaries
from planner.passes import lower
from planner.schedules import schedule as schedule_named


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point of the searched space.

    Attributes:
        stage_of: the stage of each layer, in the graph's order; stages are in topological order.
        groups: ranks of each stage; stages of equal groups are virtual stages of one position.
        shares: samples of each rank of each stage, in a full micro-batch.
        micro_batches: samples of each.
        schedule: its name.
        windows: most forwards before the first backward, by stage; empty: the schedule's own.
        recompute: by stage, whether activations are computed again before the backward; empty: nowhere.
        options: by layer: how it is divided where its stage is not cut along samples alone, else None; empty: nowhere.
        prepares_ahead: whether hosts prepare inputs one micro-batch ahead (``passes.lower``).
    """

    stage_of: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[int, ...], ...]
    micro_batches: tuple[int, ...]
    schedule: str
    windows: tuple[int, ...] = ()
    recompute: tuple[bool, ...] = ()
    options: tuple[Option | None, ...] = ()
    prepares_ahead: bool = True

    @classmethod
    def chain(
        cls,
        bounds: tuple[int, ...],
        groups: tuple[tuple[int, ...], ...],
        shares: tuple[tuple[int, ...], ...],
        micro_batches: tuple[int, ...],
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
    def positions(self) -> tuple[int, ...]:
        """The position that runs each stage; empty if every stage has its own."""
        first = {group: number for number, group in reversed(list(enumerate(self.groups)))}
        if len(first) == len(self.groups):
            return ()
        numbers = {group: position for position, group in enumerate(sorted(first, key=first.__getitem__))}
        return tuple(numbers[group] for group in self.groups)

    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each stage; nothing is cut on a stage of one rank."""
        return tuple(Layout({SAMPLE: cut_points(share)} if len(share) > 1 else {}) for share in self.shares)

    def option_of(self, layer: int) -> Option | None:
        """How the layer is divided; None if it is as its stage's shares say."""
        return self.options[layer] if self.options else None

    def placement_of(self, layer: int) -> Placement:
        """How a plan writes down where the layer runs."""
        stage, option = self.stage_of[layer], self.option_of(layer)
        return Placement(stage, self.layouts()[stage].cuts) if option is None else option.placement(stage)

    def stage_names(self, graph: Graph) -> dict[str, int]:
        """The stage of each layer by name."""
        return {layer.name: stage for layer, stage in zip(graph.layers, self.stage_of, strict=True)}

    def recomputes(self, stage: int) -> bool:
        """Whether ``stage`` computes its activations again."""
        return bool(self.recompute) and self.recompute[stage]


def has_own_options(candidate: Candidate, stage: int) -> bool:
    """Whether the layers of ``stage`` are each divided in their own way."""
    return any(own is not None for own, at in zip(candidate.options, candidate.stage_of, strict=False) if at == stage)


def split_batch(global_batch: int, size: int) -> tuple[int, ...]:
    """Micro-batches of ``size`` samples, the last one of what remains."""
    full, rest = divmod(global_batch, size)
    return (size,) * full + ((rest,) if rest else ())


def boundaries_of(graph: Graph, candidate: Candidate) -> Boundaries:
    """Who owns, needs and sends what."""
    own = {
        layer.name: option.layout
        for layer, option in zip(graph.layers, candidate.options, strict=False)
        if option is not None
    }
    placed = {
        layer.name: option.placement(candidate.stage_of[index])
        for index, layer in enumerate(graph.layers)
        if (option := candidate.option_of(index)) is not None and (option.ways > 1 or option.margin)
    }
    return Boundaries.of(graph, candidate.stage_names(graph), candidate.layouts(), candidate.groups, own, placed)


def program_of(graph: Graph, candidate: Candidate) -> Program:
    """The candidate's program, validated by whoever predicts it."""
    boundaries = boundaries_of(graph, candidate)
    edges = boundaries.edges()
    stages = StageGraph(candidate.num_stages, len(candidate.micro_batches), edges, boundaries.prepares())
    routes = boundaries.routes(edges, candidate.micro_batches)
    num_ranks = 1 + max(rank for group in candidate.groups for rank in group)
    order = schedule_named(candidate.schedule)(Pipeline(stages, candidate.positions, candidate.windows))
    return lower(order, stages, candidate.groups, routes, num_ranks, ahead=candidate.prepares_ahead)


def decision_of(problem: Problem, candidate: Candidate) -> Decision:
    """The candidate as a plan writes it down."""
    profile = problem.profile
    devices = profile.cluster.devices
    program = program_of(profile.graph, candidate)
    return Decision(
        schedule=candidate.schedule,
        micro_batches=candidate.micro_batches,
        stages=tuple(
            Stage(
                group,
                tuple(devices[rank].name for rank in group),
                candidate.recomputes(stage),
                problem.shards(len(group)) and not has_own_options(candidate, stage),
            )
            for stage, group in enumerate(candidate.groups)
        ),
        layers={layer.name: candidate.placement_of(index) for index, layer in enumerate(profile.graph.layers)},
        program=tuple(tuple(str(action) for action in row) for row in program.rows),
    )


def plan_of(
    problem: Problem,
    decision: Decision,
    prediction: Prediction,
    search: Search,
    alternatives: Iterable[Alternative] = (),
) -> Plan:
    """The plan, with the fingerprints of what it was made for."""
    profile = problem.profile
    inputs = PlanInputs(
        model=profile.model,
        optimizer=profile.optimizer,
        model_fingerprint=fingerprint(profile.graph),
        profile_fingerprint=fingerprint(profile.bare),
        cluster_fingerprint=fingerprint(profile.cluster),
        request=problem.request,
        corrections=profile.calibration.corrections,
    )
    return Plan(inputs, decision, prediction, search, tuple(alternatives))
