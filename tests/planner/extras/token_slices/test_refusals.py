"""What token slices cannot be combined with is refused, each row by its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.chains import chain_profile
from halopipe.planning.problem import make_problem
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.extras.token_slices.refusals import faults, of_request
from planner.ir.errors import UsageError
from planner.ir.plan import Decision, Placement, Stage
from planner.ir.problem import Problem
from planner.solvers import solver
from planner.solvers.candidates.evaluate import Evaluator
from tests.planner.causal import graph

ASKED: Mapping[str, Mapping[str, Any]] = {
    "--token-slices 2+0": {"token_slices": [2, 0]},
    "--token-slices with --objective latency": {"token_slices": [2, 2], "objective": "latency"},
    "--recompute selective beside token slices": {"recompute": "selective", "allow": ["time"]},
}
"""By the beginning of the title of what is said."""


@pytest.mark.every_case
@pytest.mark.parametrize("title", ASKED)
def test_a_request_is_refused_with_a_remedy_or_a_reason(title: str) -> None:
    with pytest.raises(UsageError) as caught:
        solver("best-first")(make_problem(chain_profile(3, 2), **{"global_batch": 4, **ASKED[title]}), None)
    assert caught.value.title.startswith(title)
    assert [*caught.value.details, *caught.value.remedies]
    assert (caught.value.code, caught.value.exit_code) == ("H200", 2)
    assert len(of_request(Problem(chain_profile(3, 2), 4))) == len(ASKED)


def test_a_plan_with_spans_or_stages_of_several_ranks_has_faults() -> None:
    layers = {layer.name: Placement(0) for layer in graph().layers}
    stage = Stage((0, 1), ("a", "b"), recomputed=(("p0",),))
    decision = Decision("1f1b", (2,), (stage,), layers, ((), ()), (8, 8))
    spans, ranks = faults(decision)
    assert spans == "decision.stages[0].recomputed: stage 0 has 1 spans and token slices; it can have one of the two"
    assert ranks.startswith("decision.token_slices: stage 0 is on several ranks")
    assert not list(faults(replace(decision, token_slices=())))


@pytest.mark.parametrize(("stage", "is_refused"), [(1, True), (0, False)])
def test_stages_that_share_a_parameter_are_refused(stage: int, is_refused: bool) -> None:
    profile = chain_profile(5, 2)
    first, *others = profile.graph.layers
    others[3] = replace(others[3], parameters=first.parameters)
    tied = replace(profile, graph=replace(profile.graph, layers=(first, *others)))
    candidate = Candidate((0, 0, 0, 0, stage, stage), ((0,), (1,)), ((2,), (2,)), (2, 2), "1f1b", axis_parts=(4, 4))
    evaluator = Evaluator(Problem(tied, 4), CostModel(tied))
    text = "and sequences are cut into token slices: what a second copy takes then is not known"
    assert (text in evaluator.unmet(candidate)) is is_refused
