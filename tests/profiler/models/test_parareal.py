"""Parareal networks: what the iteration computes, and that ranks compute it side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.layouts import profile_of
from benchmarks.seeds.parareal import beside, side_by_side
from planner.costs.predict import predict
from planner.ir.codec import fingerprint
from planner.ir.plan import Plan, PlanInputs
from planner.ir.profile import ModelSource, Optimizer
from planner.layers.boundary import Boundaries
from profiler.capture.graph import capture
from profiler.models.parareal import Parareal, parareal
from profiler.source.source import load_model
from tests.halopipe.ranks import run_job


@pytest.mark.parametrize("slices", [2, 3, 5])
def test_linear_fine_blocks_give_what_they_give_one_after_another_whatever_is_predicted(slices: int) -> None:
    torch.manual_seed(slices)
    fine = [nn.Linear(4, 4, bias=False, dtype=torch.float64) for _ in range(slices)]
    predict_ = [nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Tanh()) for _ in range(slices - 1)]
    u = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(Parareal(fine, predict_, fine[1:])(u), nn.Sequential(*fine)(u))
    other = Parareal(fine, predict_, predict_)(u)  # corrected by something else it misses
    assert (other - nn.Sequential(*fine)(u)).abs().max() > 1e-3


def test_fine_blocks_need_a_prediction_and_a_correction_between_them() -> None:
    with pytest.raises(ValueError, match="2 slices, 2 predictions, 1 corrections: there is one less of each"):
        Parareal([nn.Identity()] * 2, [nn.Identity()] * 2, [nn.Identity()])
    for wrong in ({"slices": 1}, {"steps": 0}, {"input_shape": (2, 3, 8)}):
        with pytest.raises(ValueError, match="parareal"):
            parareal(**wrong)


def planned(slices: int) -> Plan:
    arguments = {"slices": str(slices), "steps": "2", "width": "2"}
    source = ModelSource("profiler.models.parareal:parareal", arguments, (4, 3, 6, 6), "float64")
    graph = capture(load_model(source)).graph
    profile = profile_of(source, graph, slices)
    plan = side_by_side(profile, slices, 4, 2)
    boundaries = Boundaries.of_decision(graph, plan.decision)
    pairs = {(edge.src, edge.dst) for edge in boundaries.edges()}
    fine = range(1, slices + 1)
    assert not any((a, b) in pairs for a in fine for b in fine)
    assert all({(0, stage), (stage, slices + 1)} <= pairs for stage in fine)
    forward = predict(profile, plan.decision)[1]
    assert beside(forward, "1F", "2F") > 0
    inputs = PlanInputs(source, Optimizer("SGD", {"lr": 0.1}), fingerprint(graph), "", "")
    return Plan(inputs, plan.decision, plan.prediction, plan.search)


@pytest.mark.parametrize("slices", [4, pytest.param(2, marks=pytest.mark.exhaustive("the same on two ranks"))])
def test_slices_side_by_side_train_as_one_device_does(slices: int, tmp_path: Path) -> None:
    plan = planned(slices)
    assert plan.decision.num_ranks == slices
    result = run_job(plan, tmp_path, device=torch.device("cpu"), steps=3, check_numerics=True)
    assert result.numerics is not None
    assert max(each.error for each in result.numerics.worst.values()) < 1e-10
