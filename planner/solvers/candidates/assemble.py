"""From what a solver chooses (where to cut, on which ranks, which micro-batches and schedule) to a whole plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from planner.ir.fingerprint import fingerprint
from planner.ir.graph import SAMPLE, Graph
from planner.ir.layout import Layout, cut_points
from planner.ir.plan import Alternative, Decision, Placement, Plan, PlanInputs, Prediction, Search, Stage
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.ir.program import Program
from planner.ir.schedule import Pipeline, StageGraph
from planner.layers.boundary import Boundaries
from planner.passes import lower
from planner.schedules import schedule as schedule_named


@dataclass(frozen=True, slots=True)
class Candidate:
    """A point of the searched space.

    Attributes:
        bounds: stage ``s`` has layers ``bounds[s]`` to ``bounds[s + 1]`` of the graph.
        groups: ranks of each stage.
        shares: samples of each rank of each stage, in a full micro-batch.
        micro_batches: samples of each.
        schedule: its name.
    """

    bounds: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    shares: tuple[tuple[int, ...], ...]
    micro_batches: tuple[int, ...]
    schedule: str

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.groups)

    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each stage; nothing is cut on a stage of one rank."""
        return tuple(Layout({SAMPLE: cut_points(share)} if len(share) > 1 else {}) for share in self.shares)


def split_batch(global_batch: int, size: int) -> tuple[int, ...]:
    """Micro-batches of ``size`` samples, the last one of what remains."""
    full, rest = divmod(global_batch, size)
    return (size,) * full + ((rest,) if rest else ())


def boundaries_of(graph: Graph, candidate: Candidate) -> Boundaries:
    """Who owns, needs and sends what."""
    return Boundaries.of(graph, _stage_of(graph, candidate.bounds), candidate.layouts(), candidate.groups)


def program_of(graph: Graph, candidate: Candidate) -> Program:
    """The candidate's program, validated by whoever predicts it."""
    boundaries = boundaries_of(graph, candidate)
    edges = boundaries.edges()
    stages = StageGraph(candidate.num_stages, len(candidate.micro_batches), edges)
    routes = boundaries.routes(edges, candidate.micro_batches)
    num_ranks = 1 + max(rank for group in candidate.groups for rank in group)
    return lower(schedule_named(candidate.schedule)(Pipeline(stages)), stages, candidate.groups, routes, num_ranks)


def decision_of(profile: Profile, candidate: Candidate) -> Decision:
    """The candidate as a plan writes it down."""
    devices = profile.cluster.devices
    cuts: list[Mapping[str, tuple[int, ...]]] = [layout.cuts for layout in candidate.layouts()]
    program = program_of(profile.graph, candidate)
    return Decision(
        schedule=candidate.schedule,
        micro_batches=candidate.micro_batches,
        stages=tuple(Stage(group, tuple(devices[rank].name for rank in group)) for group in candidate.groups),
        layers={
            name: Placement(stage, cuts[stage]) for name, stage in _stage_of(profile.graph, candidate.bounds).items()
        },
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
        profile_fingerprint=fingerprint(profile),
        cluster_fingerprint=fingerprint(profile.cluster),
    )
    return Plan(inputs, decision, prediction, search, tuple(alternatives))


def _stage_of(graph: Graph, bounds: tuple[int, ...]) -> dict[str, int]:
    return {
        layer.name: stage for stage, (first, last) in enumerate(pairwise(bounds)) for layer in graph.layers[first:last]
    }
