"""One measuring process: sizes that it chooses, is given, repeats or finds done."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from planner.costs.layers.interpolation import layer_cost
from planner.ir.codec import fingerprint
from planner.ir.errors import StaleFileError, UsageError
from planner.ir.profile import ModelSource, Optimizer
from profiler.measure.partial_results import (
    CapturedGraph,
    ChosenMeasurements,
    FinishedMeasurements,
    ModelCosts,
    SizeCosts,
)
from profiler.measure.progress import ProfileProgress
from profiler.measure.timing import QUICK, TimingEffort, shared
from profiler.measure.worker import MeasuringJob, given_sizes, measure_model

SOURCE = ModelSource("tests.profiler.measure.test_worker:convolutions", {}, (8, 2, 12, 12))
JOB = MeasuringJob(SOURCE, Optimizer(), (), quick=True, read=layer_cost)


def convolutions() -> nn.Module:
    """The back end changes from one sample to two."""
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3))


def measured(job: MeasuringJob) -> tuple[ModelCosts, list[object]]:
    reports: list[object] = []
    return measure_model(reports.append, job), reports


@pytest.fixture(scope="module")
def first() -> tuple[ModelCosts, list[object]]:
    return measured(JOB)


def test_it_reports_the_graph_then_every_size_as_it_is_finished(first: tuple[ModelCosts, list[object]]) -> None:
    costs, reports = first
    graphs = [report for report in reports if isinstance(report, CapturedGraph)]
    sizes = [report for report in reports if isinstance(report, SizeCosts)]
    assert len(graphs) == 1
    assert tuple(sizes) == costs.done.sizes
    assert [size.samples for size in sizes][:2] == [1, 8]
    assert len({one.key for one in sizes[0].measurements} | {one.key for one in sizes[1].measurements}) > 2
    assert {1, 2, 8} <= set(costs.chosen.sizes)  # both sides of the change, and the ends
    for size in sizes:
        assert {len(one.raw_s) for one in size.measurements} == {QUICK.min_runs}
        assert size.step_s == pytest.approx(sum(one.forward_s + one.backward_s for one in size.measurements))
    progress = [report for report in reports if isinstance(report, ProfileProgress)]
    assert all(at.done <= at.total for at in progress)
    assert progress[-1].eta_s < 0.5 * progress[-1].total


def test_what_is_chosen_or_given_is_measured_and_no_more() -> None:
    costs, _ = measured(replace(JOB, chosen=ChosenMeasurements((2, 3), ())))
    assert [size.samples for size in costs.done.sizes] == [2, 3]
    assert [size.samples for size in measured(replace(JOB, sizes=(5, 5, 1)))[0].done.sizes] == [1, 5]


def test_what_is_done_is_not_measured_again(first: tuple[ModelCosts, list[object]]) -> None:
    costs, reports = first
    (graph,) = [report.graph for report in reports if isinstance(report, CapturedGraph)]
    done = FinishedMeasurements(costs.done.sizes[:2])
    again, seen = measured(replace(JOB, chosen=costs.chosen, done=done, graph=fingerprint(graph)))
    assert again.chosen == costs.chosen
    assert not {1, 8} & {report.samples for report in seen if isinstance(report, ProfileProgress) and report.samples}
    assert not {1, 8} & {report.samples for report in seen if isinstance(report, SizeCosts)}
    assert again.done.sizes[:2] == done.sizes


def test_another_graph_is_refused() -> None:
    with pytest.raises(StaleFileError, match=r"the model changed while it was profiled[\s\S]*before: sha256:0"):
        measured(replace(JOB, graph="sha256:0"))


def test_sizes_are_given_by_the_user_another_process_or_the_model() -> None:
    assert given_sizes(JOB, 8, True) == ()
    assert given_sizes(replace(JOB, read=None), 12, True) == (1, 2, 3, 4, 6, 12)
    assert given_sizes(replace(JOB, sizes=(4, 2)), 8, True) == (2, 4)
    assert given_sizes(replace(JOB, sizes=(4, 2), chosen=ChosenMeasurements((3,), ())), 8, True) == (3,)
    assert given_sizes(JOB, 8, False) == (8,)
    with pytest.raises(UsageError, match="with 8 samples only"):
        given_sizes(replace(JOB, sizes=(4,)), 8, False)


def test_processes_share_about_as_many_passes_as_one_makes() -> None:
    def passes(effort: TimingEffort) -> int:
        return effort.num_warm_ups + effort.min_runs + effort.split_runs + 1

    alone = TimingEffort()
    assert shared(alone, 1) == alone
    three = shared(alone, 3)
    assert (three.num_warm_ups, three.min_runs, three.max_runs, three.split_runs) == (1, 5, 10, 3)
    assert passes(alone) < 3 * passes(three) <= 1.5 * passes(alone)
    assert shared(alone, 20).min_runs == 4
