"""One rank of a plan in a script of one's own; the ranks are threads."""

from __future__ import annotations

import pytest
import torch

from halopipe.training.session import Execution
from planner.ir.errors import DifferentDataError, NotFiniteError, UsageError
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from runtime.numerics.finite import OnNan
from tests.halopipe import learners
from tests.halopipe.plans import plan_of
from tests.halopipe.training.sessions import (
    CALM_PLANS,
    adamw,
    batch,
    lone,
    loss_of,
    no_number,
    require_close,
    steps,
    together,
)


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
        together(lone(), lambda execution: execution.step(batch(7, 0)))
    with pytest.raises(UsageError, match="there is no data to evaluate on"):
        together(lone(), lambda execution: execution.evaluate())


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


@pytest.mark.parametrize("name", CALM_PLANS)
def test_a_state_dict_is_the_modules_and_can_be_loaded(name: str) -> None:
    def run(execution: Execution) -> tuple[list[float], list[float]]:
        begin = execution.state_dict()
        first = steps(0, 2)(execution)
        trained = execution.module.state_dict()
        require_close(trained, execution.state_dict())
        assert any((trained[name] != begin[name]).any() for name in begin)
        execution.load_state_dict(begin)
        with pytest.raises(UsageError, match="this is not the state of the model") as caught:
            execution.load_state_dict({name: begin[name] for name in list(begin)[1:]})
        assert "0.weight" in str(caught.value)
        return first, steps(0, 2)(execution)

    plain = lambda module: (torch.optim.SGD(module.parameters(), lr=0.1), None)  # noqa: E731  # without a state
    for first, again in together(CALM_PLANS[name](), run, make=plain, scheduler=None):
        assert again == pytest.approx(first, rel=1e-10)


def test_a_batch_is_given_as_the_user_has_it() -> None:
    """A mapping with the labels inside, from a model with its own loss; the micro-batches one by one."""

    def keyed(step: int, rows: int = 6, first: int = 0) -> dict[str, object]:
        inputs, targets = batch(first + rows, step)
        return {"labels": targets[first:], "inputs": [inputs[first:], None]}

    def run(execution: Execution) -> list[float]:
        losses = [execution.step(keyed(0)), execution.step([keyed(1, 3), keyed(1, 3, 3)]), execution.step(keyed(2))]
        with pytest.raises(UsageError, match="another batch than the model's example"):
            execution.step({"inputs": [batch(6, 0)[0], None]})
        return losses

    source = ModelSource("tests.halopipe.learners:keyed", {}, (), "float64")
    module, expected = load_model(source).module, []
    optimizer, schedule = adamw(module.layers)
    for step in range(3):
        optimizer.zero_grad()
        loss = module(**keyed(step))["loss"]
        loss.backward()
        optimizer.step()
        schedule.step()
        expected.append(loss.item())
    made = together(plan_of(source, [0.5], (3, 3)), run, make=lambda module: adamw(module.layers))
    assert loss_of(made) == pytest.approx(expected, rel=1e-10)


def test_a_step_with_nan_raises_itself_on_every_rank() -> None:
    raised: list[str] = []

    def train(execution: Execution) -> None:
        execution.step(batch(6, 0))
        with pytest.raises(NotFiniteError) as caught:
            execution.step(no_number(6, 1))
        raised.append(caught.value.title)

    together(learners.plan(), train, on_nan=OnNan.STOP)
    assert len(raised) == 2
    assert set(raised) == {"step 2: the batch has NaN in inputs, micro-batch 0"}
