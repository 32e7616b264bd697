"""What layers that are computed again save, predicted and counted: every allocation of a rank that runs the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks.accuracy.cases import Network
from benchmarks.accuracy.plans import case, case_of
from benchmarks.devices.metered import steps_within
from benchmarks.memory import cluster_of, profile_of
from cuda_ops.memory import available
from halopipe.run_spec.options import GLOO
from planner.costs.cost_model import CostModel
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import ModelSource, Profile
from planner.layers.recomputed import cores_among
from tests.oracles.evaluation import evaluate

pytestmark = pytest.mark.skipif(bool(available()), reason="no compiler for the counting allocator")

GPT = {"vocabulary": "100", "width": "32", "layers": "4", "heads": "4", "context": "96", "fused": "false"}
SAMPLES = 4


@cache
def watched(dropout: str) -> Profile:
    torch.set_num_threads(1)
    source = ModelSource("profiler.models.gpt:gpt", {**GPT, "dropout": dropout}, (SAMPLES, 96))
    return profile_of(Network(source, SAMPLES, (1, 2, 4)))


def counted(plan: Plan) -> list[int]:
    no_limit = [None] * plan.decision.num_ranks
    return list(steps_within(plan, GLOO, [no_limit, no_limit]).peak_bytes(2))


@pytest.mark.parametrize(
    ("dropout", "plan", "ranks"),
    [
        ("0.1", "one device", 1),
        ("0.1", "gpipe/2", 2),
        pytest.param("0.1", "1f1b/1", 2, marks=pytest.mark.exhaustive("each rank captures the network")),
        ("0.1", "zb-h1/1", 2),
        ("0.0", "one device", 1),
        ("0.0", "1f1b/1", 2),
    ],
)
def test_what_selective_recomputation_holds_is_predicted_within_three_per_cent(
    dropout: str, plan: str, ranks: int
) -> None:
    profile = watched(dropout)
    problem = Problem(replace(profile, cluster=cluster_of(ranks)), SAMPLES)
    plain = case(problem, plan, pads=False).decision
    spans = [cores_among(profile.graph, plain.layers_of(number)) for number in range(len(plain.stages))]
    stages = tuple(replace(each, recomputed=own) for each, own in zip(plain.stages, spans, strict=True))
    again, cost_model = replace(plain, stages=stages), CostModel(problem.profile)
    said, before = (
        [rank.peak_bytes for rank in forecast(Pricing(cost_model), each, 0.0).memories] for each in (again, plain)
    )
    assert said == pytest.approx(counted(case_of(problem, plan, again, pads=False).plan), rel=0.03)
    assert max(said) < 0.9 * max(before), "the scores are most of what is held"
    found = evaluate(cost_model, again)
    assert list(found.peak_bytes) == pytest.approx(said, abs=8)
