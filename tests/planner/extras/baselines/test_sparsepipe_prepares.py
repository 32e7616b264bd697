"""SparsePipe prepares a micro-batch when its features have arrived; our search prepares ahead."""

from __future__ import annotations

from itertools import pairwise

from planner.costs.predict import predict
from planner.extras.baselines import sparsepipe
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers.best_first import solver as best_first
from tests.oracles.plans import check
from tests.planner.sparse_networks import classifier, sparse_profile


def late(plan: Plan) -> bool:
    """Whether all that is prepared stands directly before the forward that needs it."""
    rows = plan.decision.rows()
    after = [str(b) for row in rows for a, b in pairwise(row) if a.op == "PREP"]
    prepared = [str(a).replace("PREP", "F") for row in rows for a in row if a.op == "PREP"]
    return after == prepared


def test_sparsepipe_prepares_when_features_have_arrived() -> None:
    profile = sparse_profile(classifier(), (1.0, 1.0, 1.0), preparation_s=5e-3, device="gpu")
    problem = Problem(profile, 4, micro_batch_sizes=(4,))
    plan = sparsepipe.solve(problem)
    assert late(plan)
    assert check(plan, profile) == ()
    ours = best_first.solve(problem)
    assert not late(ours)
    assert ours.prediction.step_s < plan.prediction.step_s
    for number, stage in enumerate(plan.decision.stages):
        shares = plan.decision.layout_of(number).samples(4)
        assert len(stage.ranks) == 1 or max(shares) - min(shares) <= 1


def test_preparing_late_is_what_sparsepipe_loses_if_its_stages_are_ours() -> None:
    profile = sparse_profile(classifier(), (1.0,), preparation_s=5e-3, device="gpu")
    plan = sparsepipe.solve(Problem(profile, 4, micro_batch_sizes=(1,)))
    ahead = best_first.solve(Problem(profile, 4, ("1f1b",), micro_batch_sizes=(1,)))
    assert len(plan.decision.stages) == len(ahead.decision.stages) == 1
    assert predict(profile, ahead.decision)[0].step_s < predict(profile, plan.decision)[0].step_s
