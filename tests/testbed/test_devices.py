"""Devices on the hosts of a testbed: of any speed, with memory that runs out, and such as compute nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from itertools import pairwise

import pytest
import torch
from torch import nn

from benchmarks.accuracy.cases import STEADY, TIMED
from benchmarks.accuracy.profiles import entrance
from benchmarks.accuracy.runs import Runner
from benchmarks.devices.ranks import on_ranks
from benchmarks.devices.testbed import Testbed
from cuda_ops.memory import available, counting
from planner.ir.errors import HalopipeError
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from planner.ir.timeline import Span
from profiler.measure.contention import trimmed_mean
from runtime.engine import Engine
from runtime.rank import RankContext
from runtime.transport import Transport
from tests.runtime.plans import decide

pytestmark = pytest.mark.testbed
Build = Callable[..., Testbed]

SOURCE = ModelSource(
    "profiler.models.gpt:gpt",
    {"vocabulary": "50", "width": "16", "layers": "8", "heads": "2", "context": "8"},
    (8, 8),
)


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(SOURCE)


def stages(runner: Runner, count: int) -> Decision:
    """Transformer blocks on ``count`` ranks."""
    cuts = [f"blocks.{8 * stage // count}.norm1" for stage in range(1, count)]
    return decide(runner.captured.graph, cuts, (2, 2, 2, 2))


def test_plans_run_on_hosts_with_devices_of_any_speed(build: Build, runner: Runner) -> None:
    steps = runner.run(stages(runner, 2), build(2, "1gbit"), (0, 1), (1.5, 4.0), 2).steps
    assert len(steps) == 2
    for step in steps:
        assert all(rank.busy_s > 0 for rank in step.ranks)
        assert torch.isfinite(torch.tensor(step.loss))


def test_steady_devices_take_what_they_rehearsed_in_all_runs(build: Build, runner: Runner) -> None:
    decision = stages(runner, 2)
    where = (build(2, "1gbit"), (0, 1), (2.0, 4.0))
    first = runner.run(decision, *where, 0, STEADY)
    assert first.steps == []
    again = runner.run(decision, *where, 1, STEADY, before=first.rehearsed)
    rehearsed_s = [
        sum(trimmed_mean(piece) for piece in zip(*before, *now, strict=True))
        for before, now in zip(first.rehearsed, again.rehearsed, strict=True)
    ]
    for rank, seconds, factor in zip(again.steps[0].ranks, rehearsed_s, where[2], strict=True):
        assert rank.busy_s == pytest.approx(factor * seconds)


def test_eight_devices_that_compute_nothing_share_the_cores(build: Build, runner: Runner) -> None:
    decision = stages(runner, 8)
    told = {f"{stage}{op}{m}": 0.002 for stage in range(8) for op in "FB" for m in range(4)}
    spans = tuple(
        Span(int(action[0]), action, at, stop)
        for action, (at, stop) in zip(told, pairwise(0.002 * k for k in range(len(told) + 1)), strict=True)
    )
    steps = runner.run(decision, build(4, "1gbit"), (0, 0, 1, 1, 2, 2, 3, 3), (1.0,) * 8, 2, TIMED, spans).steps
    for step in steps:
        for rank, seen in enumerate(step.ranks):
            assert seen.by_action_s[f"{rank}F"] >= 4 * 0.002
            assert seen.by_action_s[f"{rank}B"] >= 4 * 0.002
            assert seen.busy_s == 0  # nothing was computed


@pytest.mark.skipif(bool(available()), reason=available() or "memory can be counted")
def test_memory_that_is_capped_runs_out(build: Build, runner: Runner) -> None:
    testbed = build(1)
    decision = decide(runner.captured.graph, (), (2, 2, 2, 2))

    def peak_or_error(transport: Transport, limit_bytes: int | None) -> int | str:
        gc.collect()  # what other tests left in the process that this one was forked from goes now, not in the step
        gc.disable()
        with counting() as counter:
            inherited = counter.current_bytes
            told = {"model": runner.captured, "module": runner.model.module, "transport": transport}
            engine = Engine(RankContext(decision, _optimizer, **told))
            counter.limit(None if limit_bytes is None else inherited + limit_bytes)
            counter.reset_peak()
            try:
                engine.step(runner.model.inputs, runner.model.targets)
            except HalopipeError as error:
                return str(error)
            return counter.peak_bytes - inherited

    def run(limit_bytes: int | None) -> int | str:
        return on_ranks(1, lambda rank: peak_or_error(rank, limit_bytes), enter=entrance((0,), testbed))[0]

    needed = run(None)
    assert isinstance(needed, int)
    assert run(needed) == needed
    assert "memory" in str(run(needed * 9 // 10))


def _optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)
