"""Whole runs in processes: losses beside one device, memory limits, unlike shares of a micro-batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn, randint, randn

from cuda_ops.memory import available
from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from planner.ir.constraints import parse_rule
from planner.ir.errors import OutOfMemoryError
from planner.ir.plan import RankPrediction
from planner.ir.problem import Problem
from planner.ir.profile import Measurement, ModelSource
from planner.solvers import solver
from profiler.source.source import load_model
from tests.halopipe.plans import RESNET, plan_of, profiled
from tests.runtime.training import sharded
from tests.zoo import NETWORKS, merged


def resnet50(*depths: int) -> ModelSource:
    arguments = {"width": "8", "num_classes": "10", "depths": str(list(depths))}
    return ModelSource("profiler.models.resnet:resnet50", arguments, (8, 3, 32, 32))


WHOLE = pytest.mark.exhaustive("four processes that capture a hundred and fifty layers each")


@pytest.mark.parametrize(
    ("source", "dtype", "tolerance"),
    [
        pytest.param(resnet50(1, 1), "float64", 1e-10, id="a block of two stages"),
        pytest.param(resnet50(3, 4, 6, 3), "float64", 1e-10, id="whole", marks=WHOLE),
        pytest.param(resnet50(3, 4, 6, 3), "float32", 1e-4, id="whole in float32", marks=WHOLE),
    ],
)
def test_five_losses_of_a_pipeline_equal_one_device_s(source: ModelSource, dtype: str, tolerance: float) -> None:
    plan = plan_of(source, [0.6], (4, 4))
    options = RunOptions(steps=5, warmup=1, data="halopipe.data:digits", check_numerics=True, dtype=dtype)
    result = run_plan(plan, options)
    assert result is not None
    assert result.numerics is not None
    assert result.numerics.num_steps == 5
    assert result.numerics.worst["loss"].error <= tolerance
    assert len(set(result.losses)) == 5


STEPS = RunOptions(steps=2, warmup=1, deadline_s=20.0, check_first_step=False)


@pytest.mark.skipif(bool(available()), reason="no compiler for the counting allocator")
def test_a_run_ends_where_a_rank_needs_more_than_its_limit() -> None:
    plan = plan_of(RESNET, [0.5])
    free = run_plan(plan, STEPS)
    assert free is not None
    peaks = free.peak_bytes
    assert min(peaks) > 10_000
    samples = [sample for sample in free.timeline.memory if sample.rank == 1]
    assert len(samples) > 4
    assert max(sample.num_bytes for sample in samples) <= peaks[1]
    predictions = tuple(RankPrediction(rank, 0.0, 0.0, 0.0, 123_000, 0) for rank in range(2))
    told = replace(plan, prediction=replace(plan.prediction, ranks=predictions))
    limit = max(peaks) // 2
    with pytest.raises(OutOfMemoryError) as caught:
        run_plan(told, replace(STEPS, tensors_limit_bytes=limit))
    error = caught.value
    assert error.code == "H506"
    stopped = [rank for rank in range(2) if f"rank {rank} (n0/cpu{rank}, stage {rank}) stopped at step" in error.title]
    assert len(stopped) == 1
    rank = stopped[0]
    assert peaks[rank] > limit  # both may need more: who runs out first is a race
    assert any(f"of a limit of {limit} bytes" in line for line in error.details)
    assert any(line.startswith(f"predicted for rank {rank}: ") and "limit: " in line for line in error.details)
    assert any("halopipe plan --memory" in line for line in error.remedies or error.usual)


def heavy_first() -> tuple[nn.Module, object, object]:
    """Nearly all parameters are in the first of two halves."""
    network = nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    return network, (randn(4, 512), randint(4, (4,))), nn.CrossEntropyLoss()


@pytest.mark.skipif(bool(available()), reason="no compiler for the counting allocator")
def test_a_rank_keeps_nothing_of_what_others_train() -> None:
    free = run_plan(plan_of(ModelSource(f"{__name__}:heavy_first", {}, ()), [0.5]), STEPS)
    assert free is not None
    of_others = 4 * 512 * 1024
    assert free.peak_bytes[0] > of_others > 4 * free.peak_bytes[1]


def listed(global_batch: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of sentences, with a list of all their words as targets; the last of fewer sentences."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for sentences in (global_batch, global_batch, global_batch - 2):
        ids = torch.randint(merged.WORDS, (sentences, merged.TOKENS), generator=generator)
        targets = torch.randint(merged.WORDS, (ids.numel(),), generator=generator)
        ignored = torch.rand(targets.shape, generator=generator) < 0.3
        batches.append((ids, torch.where(ignored, -100, targets)))
    return batches


class Told:
    """A metric that adds up what it is told."""

    def __init__(self) -> None:
        self.sums = {"words": 0, "predictions": 0.0}

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Of a micro-batch."""
        assert len(prediction) == len(target)
        self.sums["words"] += len(target)
        self.sums["predictions"] += (prediction[:, 0] * target).sum().item()

    def compute(self) -> dict[str, float]:
        """The sums."""
        return self.sums


def test_targets_that_are_one_list_of_words_are_trained_on_and_evaluated_by_sentences() -> None:
    source = NETWORKS["merged:language_model"].source
    plan = plan_of(source, [], (4, 3), ranks=[(0, 1)], shares=[(1, 1)])
    plan = replace(plan, decision=sharded(plan.decision, 3))
    names = {"data": f"{__name__}:listed", "eval_data": f"{__name__}:listed", "eval_metric": f"{__name__}:Told"}
    result = run_plan(plan, RunOptions(steps=3, warmup=1, check_numerics=True, optimizer="SGD:lr=0", **names))
    assert result is not None
    assert result.numerics is not None
    assert max(compared.error for compared in result.numerics.worst.values()) < 1e-10
    model = load_model(source)
    batches = listed(7, 0)
    with torch.no_grad():
        losses = [model.loss((ids,), (targets,)).item() for ids, targets in batches]
        told = Told()
        for ids, targets in batches:
            told.update(model.module(ids), targets)
    assert result.losses == pytest.approx(losses, abs=1e-10)
    score = result.scores[-1]
    assert score.metrics == pytest.approx(told.sums, abs=1e-8)
    assert score.num_samples == 7 + 7 + 5


TIMES = "forward_s", "backward_s", "backward_input_s", "backward_weight_s"


def test_shares_of_one_and_three_are_planned_and_run_as_on_one_device() -> None:
    _, profile = profiled(plan_of(RESNET, [0.5]), 2)
    ((kind, measured),) = profile.measurements.items()

    def slower(one: Measurement) -> Measurement:
        return replace(one, **{name: 3 * getattr(one, name) for name in TIMES})

    devices = profile.cluster.devices
    unlike = replace(
        profile,
        cluster=replace(profile.cluster, devices=(replace(devices[0], kind="slow"), devices[1])),
        measurements={**profile.measurements, "slow": tuple(map(slower, measured))},
        parameters={**profile.parameters, "slow": profile.parameters[kind]},
        action_overhead_s={**profile.action_overhead_s, "slow": profile.action_overhead_s.get(kind, 0.0)},
    )
    rules = (parse_rule("*=replicas:2"),)
    plan = solver("best-first")(
        Problem(unlike, 8, schedules=(), micro_batch_sizes=(4,), max_stages=1, fix=rules, confidence=0.0)
    )
    assert {placed.cuts["sample"] for placed in plan.decision.layers.values()} == {(0, 1, 4)}
    result = run_plan(plan, RunOptions(steps=2, warmup=1, transport="gloo", check_numerics=True, dtype="float64"))
    assert result is not None
    assert result.transport == "gloo"
    assert result.numerics is not None
    assert max(compared.error for compared in result.numerics.worst.values()) < 1e-10
