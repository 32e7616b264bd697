"""A run whose ranks may have so much memory and no more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn, randint, randn

from cuda_ops.memory import available
from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from planner.ir.errors import OutOfMemoryError
from planner.ir.plan import RankPrediction
from planner.ir.profile import ModelSource
from tests.halopipe.plans import RESNET, plan_of

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
        run_plan(told, replace(STEPS, memory_limit_bytes=limit))
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
