"""What layers that are computed again save, predicted and counted: every allocation of a rank that runs the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from benchmarks.accuracy.cases import Network
from benchmarks.accuracy.plans import case
from benchmarks.devices.ranks import on_ranks
from benchmarks.memory import _steps, cluster_of, memory_profile
from cuda_ops.memory import available
from planner.check.recompute import reckon
from planner.costs.cost_model import PriceBook
from planner.costs.predict import forecast
from planner.ir.plan import Decision
from planner.ir.problem import Problem
from planner.ir.profile import ModelSource, Profile
from planner.layers.boundary import Boundaries
from planner.layers.recomputed import cores_among
from profiler import load_model
from profiler.capture.graph import Captured, capture
from profiler.source.model import LoadedModel
from runtime.stage.builder import groups_of

pytestmark = pytest.mark.skipif(bool(available()), reason="no compiler for the counting allocator")

GPT = {"vocabulary": "100", "width": "32", "layers": "4", "heads": "4", "context": "96", "fused": "false"}
SAMPLES = 4


@cache
def watched(dropout: str) -> tuple[Profile, LoadedModel, Captured]:
    torch.set_num_threads(1)
    source = ModelSource("profiler.models.gpt:gpt", {**GPT, "dropout": dropout}, (SAMPLES, 96))
    model = load_model(source)
    captured = capture(model)
    return memory_profile(Network(source, SAMPLES, (1, 2, 4)), captured, model), model, captured


def counted(decision: Decision, model: LoadedModel, captured: Captured) -> list[int]:
    one, groups = SimpleNamespace(decision=decision), groups_of(decision, captured.graph)
    return on_ranks(decision.num_ranks, lambda end: _steps(one, model, captured, end, None), groups)  # type: ignore[arg-type]  # all that is asked of a case


@pytest.mark.parametrize(
    ("dropout", "plan", "ranks"),
    [
        ("0.1", "one device", 1),
        ("0.1", "gpipe/2", 2),
        ("0.1", "1f1b/1", 2),
        ("0.1", "zb-h1/1", 2),
        ("0.0", "one device", 1),
        ("0.0", "1f1b/1", 2),
    ],
)
def test_what_selective_recomputation_holds_is_predicted_within_three_per_cent(
    dropout: str, plan: str, ranks: int
) -> None:
    profile, model, captured = watched(dropout)
    problem = Problem(replace(profile, cluster=cluster_of(ranks)), SAMPLES)
    plain = case(problem, plan).decision
    spans = [cores_among(profile.graph, plain.layers_of(number)) for number in range(len(plain.stages))]
    stages = tuple(replace(each, recomputed=own) for each, own in zip(plain.stages, spans, strict=True))
    again, book = replace(plain, stages=stages), PriceBook(problem.profile)
    said, before = ([rank.peak_bytes for rank in forecast(book, each, 0.0).memories] for each in (again, plain))
    assert said == pytest.approx(counted(again, model, captured), rel=0.03)
    assert max(said) < 0.9 * max(before), "the scores are most of what is held"
    found = reckon(book, again, Boundaries.of_decision(profile.graph, again).program(again))
    assert list(found.peak_bytes) == pytest.approx(said, abs=8)
