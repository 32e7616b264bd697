"""Where layers that share a parameter may be in several stages, and where that is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.ir.constraints import parse_rule
from planner.ir.plan import UNCUT, Block
from planner.ir.problem import SAMPLE_DIMS, SPATIAL_DIMS, Problem
from planner.ir.profile import Profile
from planner.solvers import solver
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import cut_positions, may_part_ties
from tests.oracles.plans import check

APART = tuple(map(parse_rule, ("l1=stage:0", "l3=stage:1")))


def tied(*users: int, num_layers: int = 5, **costs: object) -> Profile:
    """A chain in which some layers use the parameter of the first of them."""
    profile = chain_profile(num_layers, 2, **costs)
    layers = list(profile.graph.layers)
    for index in users[1:]:
        layers[index] = replace(layers[index], parameters=layers[users[0]].parameters)
    used = {name for layer in layers for name in layer.parameters}
    parameters = {name: spec for name, spec in profile.graph.parameters.items() if name in used}
    return replace(profile, graph=replace(profile.graph, layers=tuple(layers), parameters=parameters))


def test_ties_are_named_by_the_layers_that_use_them() -> None:
    graph = tied(1, 3, 4).graph
    assert graph.tied_layers() == {"l1.weight": (1, 3, 4)}
    assert cut_positions(graph) == tuple(range(7))
    assert cut_positions(graph, parts_ties=False) == (0, 1, 5, 6)
    assert may_part_ties(Problem(tied(1, 3), 4, confidence=0.0))
    assert may_part_ties(Problem(tied(1, 3), 4, schedules=("pipedream", "1f1b"), confidence=0.0))
    assert not may_part_ties(Problem(tied(1, 3), 4, schedules=("pipedream", "pipedream-2bw"), confidence=0.0))


CUT = ShardingSpec((("feature", (0, 1, 2)),))
PARTED = Candidate.chain((0, 3, 6), ((0,), (1,)), ((2,), (2,)), (2, 2), "1f1b")
REFUSED: Mapping[str, Callable[[], Candidate]] = {
    "pipedream updates within a step": lambda: replace(PARTED, schedule="pipedream"),
    "pipedream-2bw updates within a step": lambda: replace(PARTED, schedule="pipedream-2bw"),
    "stage 1 divides each layer in its own way": lambda: replace(PARTED, options=(None,) * 3 + (CUT,) * 3),
    "stage 0 divides each layer in its own way": lambda: replace(PARTED, blocks=((Block(("l0", "l1"), {}),), ())),
}


@pytest.mark.every_case
@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_combined_with_parted_ties_is_refused_by_the_planner(why: str) -> None:
    schedules = ("1f1b", "pipedream", "pipedream-2bw")
    allow = (SAMPLE_DIMS, SPATIAL_DIMS, "channel")
    evaluators = [
        Evaluator(Problem(profile, 4, schedules=schedules, allow=allow, confidence=0.0), CostModel(profile))
        for profile in (tied(1, 3), tied(0, 1))
    ]
    unmet, elsewhere = (evaluator.unmet(REFUSED[why]()) for evaluator in evaluators)
    assert f"stages 0, 1 share l1.weight, and {why}" in unmet
    assert elsewhere == ""
    assert evaluators[0].unmet(PARTED) == ""


def test_the_checker_finds_a_tie_over_stages_that_are_updated_within_a_step() -> None:
    apart = tied()
    together = tied(1, 3)
    plan = solver("best-first")(Problem(apart, 4, schedules=("pipedream",), fix=APART, confidence=0.0))
    assert check(plan, apart) == ()
    assert any("pipedream updates within a step, and stages 0, 1 share l1.weight" in x for x in check(plan, together))


def test_where_layers_have_layouts_the_cuts_that_are_not_looked_at_are_named() -> None:
    profile = tied(1, 3, bandwidth_bytes_per_s=1e6)
    plan = solver("best-first")(Problem(profile, 4, allow=(SAMPLE_DIMS, SPATIAL_DIMS, "channel"), confidence=0.0))
    assert [each.what for each in plan.search.rejected if each.what.startswith(UNCUT)] == ["no cut between l1 and l3"]
    assert check(plan, profile) == ()


def test_layers_of_stages_for_answers_alone_may_share_parameters_under_any_forward_schedule() -> None:
    profile = tied(1, 3)
    plan = solver("best-first")(Problem(profile, 8, schedules=("forward",), fix=APART, confidence=0.0))
    assert check(plan, profile) == ()
    graph = profile.graph
    held = [graph.parameter_bytes(frozenset(plan.decision.layers_of(stage))) for stage in (0, 1)]
    assert sum(held) > graph.parameter_bytes()  # both have what they share
