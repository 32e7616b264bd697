"""One rank of a plan in a script of one's own; the ranks are threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from halopipe.data.feeds import consumer_of
from halopipe.training.optimizer_spec import make_optimizer_of, make_scheduler_of, parse_optimizer, parse_scheduler
from halopipe.training.rank import Opened
from halopipe.training.session import Execution
from planner.ir.errors import DifferentDataError, StaleFileError, UsageError
from planner.ir.plan import Plan
from profiler.capture.graph import capture
from profiler.source.source import load_model
from runtime.engine import Engine
from runtime.monitor.waits import Voice
from runtime.stage.builder import groups_of
from runtime.stage.captured import captured_model
from runtime.transport import InProcessTransport
from tests.halopipe import learners
from tests.runtime.ranks import on_ranks

PLAN = learners.plan([])


def together(plan: Plan, do: Callable[[Execution], object], seed: int = 0, **options: object) -> list[object]:
    """What ``do`` gives on each rank."""
    torch.set_num_threads(1)
    model = load_model(plan.inputs.model)
    original = model, capture(model)
    copies = [copy.deepcopy(original) for _ in range(plan.decision.num_ranks)]
    store = dist.HashStore()
    made = {
        "scheduler": make_scheduler_of(parse_scheduler("StepLR:step_size=1,gamma=0.5")),
        "seed": seed,
        "deadline_s": 20.0,
        **options,
    }

    def run(end: InProcessTransport) -> object:
        twin, captured = copies[end.rank]
        given = captured_model(captured)
        voice = Voice(store, plan.decision, end.rank, 20.0, 20.0)
        optimizer = make_optimizer_of(parse_optimizer("SGD:lr=0.5"))
        engine = Engine(plan.decision, given, twin.module, end, optimizer, **made)
        opened = Opened(engine, consumer_of(plan.decision, given, end, 20.0))
        with voice, Execution(opened, twin.module, engine.close, seed) as execution:
            return do(execution)

    return on_ranks(plan.decision.num_ranks, run, groups_of(plan.decision, original[1].graph))


def batch(rows: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = learners.samples()
    return inputs[step : step + rows].double(), targets[step : step + rows]


def steps(first: int, last: int) -> Callable[[Execution], list[float | None]]:
    return lambda execution: [execution.step(batch(6, step)) for step in range(first, last)]


def loss_of(found: list[object]) -> list[float]:
    return next(losses for losses in found if losses[0] is not None)


def test_what_is_saved_is_loaded_under_another_plan(tmp_path: Path) -> None:
    whole = loss_of(together(PLAN, steps(0, 5), clip_norm=0.7))

    def first(execution: Execution) -> None:
        steps(0, 3)(execution)
        execution.save(tmp_path)

    def rest(execution: Execution) -> list[float | None]:
        assert execution.load(tmp_path) == execution.num_steps == 3
        return steps(3, 5)(execution)

    together(learners.replicas(), first, clip_norm=0.7)
    assert loss_of(together(learners.plan(), rest, clip_norm=0.7)) == pytest.approx(whole[3:], rel=1e-10)
    with pytest.raises(UsageError, match="was drawn from another seed") as caught:
        together(PLAN, rest, seed=3)
    assert caught.value.remedies == ("execute(..., seed=0)",)
    with pytest.raises(StaleFileError, match="belongs to another model"):
        together(learners.plan_of_taggers(), rest)


def test_a_checkpoint_of_a_step_is_never_overwritten(tmp_path: Path) -> None:
    def twice(execution: Execution) -> None:
        execution.save(tmp_path)
        execution.save(tmp_path)

    with pytest.raises(UsageError, match="there is a checkpoint of step 0"):
        together(PLAN, twice)


def test_nothing_is_saved_or_loaded_between_updates(tmp_path: Path) -> None:
    def save_between(execution: Execution) -> None:
        execution.save(tmp_path)
        execution.step(batch(6, 0))
        execution.save(tmp_path / "other")

    def load_between(execution: Execution) -> None:
        execution.step(batch(6, 0))
        execution.load(tmp_path)

    for deed in (save_between, load_between):
        with pytest.raises(UsageError) as caught:
            together(PLAN, deed, accumulate=2)
        assert "gradients wait for the update" in str(caught.value)


def test_evaluation_is_the_same_on_all_ranks_and_changes_nothing() -> None:
    def run(execution: Execution) -> tuple[object, list[float | None]]:
        before = execution.step(batch(6, 0))
        score = execution.evaluate(batch(6, 0), batch(5, 6))
        return score, [before, *steps(1, 3)(execution)]

    found = together(learners.replicas(), run)
    assert len({score for score, _ in found}) == 1
    score = found[0][0]
    assert (score.step, score.num_samples) == (1, 11)
    assert score.accuracy == pytest.approx(round(score.accuracy * 11) / 11)
    losses = loss_of([losses for _, losses in found])
    assert losses == pytest.approx(loss_of(together(PLAN, steps(0, 3))), rel=1e-10)


def test_a_step_takes_micro_batches_one_by_one_and_tells_what_it_knows() -> None:
    def run(execution: Execution) -> list[object]:
        halves = [tuple(tensor[:3] for tensor in batch(6, 0)), tuple(tensor[3:] for tensor in batch(6, 0))]
        results = [execution.train(batch(6, 0)), execution.train(halves), execution.train([batch(2, 0)])]
        assert [result.learning_rates for result in results] == [(0.5,), (0.25,), (0.125,)]
        assert all((result.gradient_norm or 0.0) > 0 for result in results)
        return [result.loss for result in results]

    assert len(loss_of(together(learners.plan(), run, clip_norm=9.0))) == 3


def test_a_batch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="a batch has 7 samples, the plan's global batch is 6"):
        together(PLAN, lambda execution: execution.step(batch(7, 0)))
    with pytest.raises(UsageError, match="there is no data to evaluate on"):
        together(PLAN, lambda execution: execution.evaluate())


@pytest.mark.parametrize("what", ["inputs", "targets"])
def test_ranks_that_are_given_different_batches_end_before_the_step(what: str) -> None:
    def train(execution: Execution) -> None:
        execution.step(batch(6, 0))
        inputs, targets = batch(6, 1)
        if execution.rank == 1:
            inputs, targets = (inputs + 1, targets) if what == "inputs" else (inputs, targets.flip(0))
        with pytest.raises(DifferentDataError, match=f"different data at step 1: {what}") as caught:
            execution.step((inputs, targets))
        assert execution.num_steps == 1
        assert "every rank the same global batch" in caught.value.remedies[0]
        with pytest.raises(DifferentDataError, match="at step 0"):
            execution.evaluate((inputs, targets))

    together(learners.plan(), train)
