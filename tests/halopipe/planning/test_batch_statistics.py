"""Whether batch norm sees the whole batch, or a micro-batch: asked of a search, said of a plan, checked in a file."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import halopipe as hp
from halopipe.api import running
from planner.ir.errors import InfeasibleError
from planner.ir.profile import ModelSource, Profile
from planner.layers import batch_dependent_layers, statistics_text
from planner.solvers import names
from planner.solvers.candidates.feasibility import mixing_text
from profiler.models.example import Example
from profiler.source.source import load_model
from tests.captures import capture
from tests.halopipe.plans import profile_of
from tests.oracles.plans import check

HERE = "tests.halopipe.planning.test_batch_statistics"


def network(*, input_shape: tuple[int, ...] = (8, 3, 6, 6), frozen: bool = False, centred: bool = False) -> Example:
    """A small CNN as people write it."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    if frozen:
        norm.eval()
    if centred:
        module[1] = Centred()
    return module, (torch.randn(input_shape), torch.arange(input_shape[0]) % 3), nn.functional.cross_entropy


class Centred(nn.Module):
    """A batch norm of one's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Without the mean of the batch."""
        return x - x.mean(0, keepdim=True)


def source(**arguments: str) -> ModelSource:
    return ModelSource(f"{HERE}:network", arguments, (8, 3, 6, 6))


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_of(source(), capture(load_model(source())).graph, 2)


@pytest.mark.parametrize(
    ("arguments", "is_dependent"), [({}, True), ({"frozen": "true"}, False), ({"centred": "true"}, True)]
)
def test_layers_whose_output_depends_on_the_batch_are_known(arguments: dict[str, str], is_dependent: bool) -> None:
    assert bool(batch_dependent_layers(capture(load_model(source(**arguments))).graph)) is is_dependent


@pytest.mark.parametrize(
    "solver",
    sorted({"best-first", "span-ilp", "data-parallel", "one-device", "pipedream", "dapple", "piper"} & {*names()}),
)
def test_no_solver_cuts_the_batch_of_which_statistics_are_to_be_whole(profile: Profile, solver: str) -> None:
    found = hp.plan(profile, solver=solver, batch_statistics="whole", confidence=0.0)
    assert found.decision.micro_batches == (8,)
    assert found.inputs.request.batch_statistics == "whole"
    assert not statistics_text(found.decision, profile.graph)
    if solver == "best-first":
        assert found.search.status == "proven"
        alone = hp.plan(profile, micro_batch=[8], confidence=0.0)
        assert found.prediction.step_s == pytest.approx(alone.prediction.step_s)


def test_a_plan_that_cuts_it_says_so_and_one_that_may_not_is_refused(profile: Profile) -> None:
    cut = hp.plan(profile, micro_batch=[2])
    assert "statistics of each of 4 micro-batches, not of the whole batch of 8" in statistics_text(
        cut.decision, profile.graph
    )
    request = replace(cut.inputs.request, batch_statistics="whole", micro_batch_sizes=())
    edited = replace(cut, inputs=replace(cut.inputs, request=request))
    faults = [text for text in check(edited, profile) if "asked for statistics of the whole batch" in text]
    assert len(faults) == 1
    with pytest.raises(InfeasibleError, match="statistics of the whole batch need all samples") as caught:
        hp.plan(profile, micro_batch=[2], batch_statistics="whole")
    assert caught.value.remedies[0] == "batch_statistics='micro'"
    assert hp.plan(profile, micro_batch=[2], batch_statistics="micro").decision.micro_batches == (2,) * 4


def test_a_script_keeps_the_statistics_of_its_loop_unless_it_says_otherwise() -> None:
    assert inspect.signature(running.parallelize).parameters["batch_statistics"].default == "whole"


def flat_network(*, input_shape: tuple[int, ...] = (8, 6)) -> Example:
    """A batch norm over features, which have one value a channel of each sample."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return module, (torch.randn(input_shape), torch.arange(input_shape[0]) % 3), nn.functional.cross_entropy


@pytest.fixture(scope="module")
def flat() -> Profile:
    made = ModelSource(f"{HERE}:flat_network", {}, (8, 6))
    return profile_of(made, capture(load_model(made)).graph, 2)


@pytest.mark.parametrize(
    "solver",
    sorted(
        {"best-first", "span-ilp", "data-parallel", "one-device", "pipedream", "dapple", "piper", "bapipe"} & {*names()}
    ),
)
def test_no_solver_makes_a_micro_batch_of_which_there_is_no_variance(flat: Profile, solver: str) -> None:
    """A last one of a sample: of 7 samples 3, 3 and 1."""
    with pytest.raises(InfeasibleError):
        hp.plan(flat, solver=solver, global_batch=7, micro_batch=[3], confidence=0.0)


def test_a_batch_that_has_no_variance_in_any_way_is_refused_and_the_remedies_work(flat: Profile) -> None:
    def refused(**asked: Any) -> tuple[str, ...]:
        with pytest.raises(InfeasibleError, match="normalises over the batch") as caught:
            hp.plan(flat, **asked)
        return caught.value.remedies

    assert refused(global_batch=4, micro_batch=[1]) == ("micro_batch=[2]",)
    assert hp.plan(flat, global_batch=4, micro_batch=[2]).decision.micro_batches == (2, 2)
    assert refused(global_batch=7, micro_batch=[2, 3]) == ("micro_batch=[4]",)
    assert hp.plan(flat, global_batch=7, micro_batch=[4]).decision.micro_batches == (4, 3)
    assert refused(global_batch=1) == ("global_batch=2",)
    assert hp.plan(flat, global_batch=2).decision.micro_batches == (2,)
    assert hp.plan(flat, objective="latency", micro_batch=[1], global_batch=4).decision.micro_batches == (1,) * 4


class Followed(nn.Module):
    """A mean teacher, which follows its student in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 3)
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The student's output beside the teacher's."""
        with torch.no_grad():
            for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.lerp_(its, 0.1)
        self.calls += 1  # which nothing reads
        return self.student(x) + self.teacher(x)


def followed(*, input_shape: tuple[int, ...] = (8, 6)) -> Example:
    torch.manual_seed(0)
    return Followed(), (torch.randn(input_shape), torch.randn(input_shape[0], 3)), nn.functional.mse_loss


def test_a_teacher_that_every_micro_batch_moves_is_said_and_moves_once_a_step_where_the_batch_is_whole() -> None:
    made = ModelSource(f"{HERE}:followed", {}, (8, 6))
    profile = profile_of(made, capture(load_model(made)).graph, 2)
    cut = hp.plan(profile, solver="one-device", micro_batch=[2])
    text = statistics_text(cut.decision, profile.graph)
    assert text.endswith("teacher.bias is updated by each of 4 micro-batches, not once")
    whole = hp.plan(profile, batch_statistics="whole")
    assert (whole.decision.micro_batches, statistics_text(whole.decision, profile.graph)) == ((8,), "")


def one_by_one(*, input_shape: tuple[int, ...] = (8, 6)) -> Example:
    """A network for one number of samples alone, without a batch norm."""
    torch.manual_seed(0)
    return OneByOne(nn.Linear(6, 3)), (torch.randn(input_shape), torch.randn(input_shape[0], 3)), nn.functional.mse_loss


class OneByOne(nn.Module):
    """Goes over the samples in Python."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A sample at a time."""
        return torch.stack([self.layer(x[row]) for row in range(int(x.shape[0]))])


def test_statistics_are_said_of_batch_norms_alone() -> None:
    made = source(centred="true")
    profile = profile_of(made, capture(load_model(made)).graph, 2)
    decision = replace(hp.plan(profile).decision, micro_batches=(2,) * 4)
    text = statistics_text(decision, profile.graph)
    assert text.endswith("made of the samples of each of 4 micro-batches together, not of the whole batch of 8")
    assert "statistics" not in text
    fixed = ModelSource(f"{HERE}:one_by_one", {}, (8, 6))
    profile = profile_of(fixed, capture(load_model(fixed)).graph, 2)
    text = statistics_text(hp.plan(profile, global_batch=16).decision, profile.graph)
    assert text.startswith("the model takes 8 samples at a time")
    assert "statistics" not in text
    assert mixing_text(profile.graph) == "the model takes 8 samples at a time, no other number"
