"""One rank of a plan in a script of one's own, its steps, and its evaluations; the ranks are threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import halopipe as hp
from halopipe.data.shared_source import DataSources
from halopipe.training.optimizer_spec import make_scheduler_of, parse_scheduler
from halopipe.training.session import Execution
from halopipe.training.steps import RankSteps
from planner.ir.errors import DifferentDataError, NotFiniteError, UsageError
from planner.ir.profile import ModelSource
from profiler.models.example import Example
from profiler.source.source import load_model
from runtime.checkpoint import Checkpoint, whole_state_dict
from runtime.engine import StepResult
from runtime.numerics.finite import OnNan
from tests.captures import capture
from tests.halopipe import learners
from tests.halopipe.plans import plan_of
from tests.halopipe.ranks import run_job
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

HERE = __name__


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


SOURCE = ModelSource("tests.halopipe.learners:classifier", {"dropout": "0.3"}, (4, learners.WIDTH), "float64")
OPTIMIZER, SCHEDULER, NUM_STEPS = "AdamW:lr=0.05", "StepLR:step_size=1,gamma=0.5", 4
OPTIONS = {"clip_norm": 0.5, "accumulate": 2, "seed": 3}


def sized(step: int) -> tuple[Tensor, Tensor]:
    """The batches of a run, as a script gives them; the last one is smaller."""
    return batch(6 if step < NUM_STEPS - 1 else 5, step)


def given() -> Iterator[tuple[Tensor, Tensor]]:
    return map(sized, range(NUM_STEPS))


def test_whoever_drives_the_steps_they_give_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """A run, ranks in a script, and ``hp.parallelize``, which starts two processes."""
    torch.set_num_threads(1)
    plan = plan_of(SOURCE, [0.5], (3, 3))
    recipe = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER, **OPTIONS}

    def train(steps: Any) -> tuple[tuple[float, ...], dict[str, Tensor]]:
        return tuple(steps.step(sized(step)) for step in range(NUM_STEPS)), steps.state_dict()

    options = {**recipe, "data": f"{HERE}:given", "steps": NUM_STEPS, "checkpoint": str(tmp_path)}
    losses = run_job(plan, tmp_path, **options).losses
    weights = whole_state_dict(Checkpoint.open(tmp_path))
    scheduler = make_scheduler_of(parse_scheduler(SCHEDULER))
    found = [together(plan, train, text=OPTIMIZER, scheduler=scheduler, **OPTIONS)[0]]
    with hp.parallelize(load_model(plan.inputs.model, OPTIONS["seed"]).module, plan=plan, **recipe) as run:
        found.append(train(run))
    for own_losses, own_weights in found:
        assert own_losses == losses
        assert own_weights.keys() == weights.keys()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in own_weights.items())


def test_the_phases_of_a_step_follow_each_other_as_they_are_listed() -> None:
    done: list[str] = []
    result = StepResult(0.5, 1.0, ())

    @contextmanager
    def around(number: int) -> Iterator[None]:
        done.append(f"around {number}")
        yield
        done.append("left")

    def phase(name: str, value: object = None) -> object:
        return lambda *_: (done.append(name), value)[1]

    engine = SimpleNamespace(settle=phase("settle"))
    first = SimpleNamespace(after=phase("compare", ("reference", ())))
    steps = RankSteps(engine, phase("take", "batch"), phase("run", result), None, True, phase("note"), first)
    steps.behind, steps.around = phase("go on"), around
    assert steps.step(3) is result
    assert done == ["around 3", "take", "run", "left", "settle", "note", "compare", "go on"]
    assert (steps.first, steps.comparison) == (None, ("reference", ())), "it is compared once"
    steps.take, done[:] = phase("take"), []
    assert steps.step(4) is None
    assert done == ["around 4", "take", "left"], "nothing is done without a batch"


WITH_NORM = ModelSource(f"{HERE}:with_norm", {}, (4, 5), "float64")


def with_norm(*, input_shape: tuple[int, ...] = (4, 5)) -> Example:
    """Batch norm over vectors, as people write it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    return module, (torch.randn(input_shape), torch.arange(input_shape[0]) % 3), nn.functional.cross_entropy


def rows(count: int) -> Dataset[tuple[Tensor, ...]]:
    return TensorDataset(torch.randn(count, 5, dtype=torch.float64), torch.arange(count) % 3)


nine, ten = partial(rows, 9), partial(rows, 10)


def eight() -> Dataset[tuple[Tensor, ...]]:
    return Subset(nine(), range(8))


def kept() -> object:
    return DataLoader(nine(), batch_size=4)


def dropped() -> object:
    return DataLoader(nine(), batch_size=4, drop_last=True)


def supply(name: str, steps: int, **options: str) -> DataSources:
    plan, model = plan_of(WITH_NORM, [0.5], (2, 2), **options), load_model(WITH_NORM)
    consumer = SimpleNamespace(decision=plan.decision, graph=capture(model).graph, transport=SimpleNamespace(rank=0))
    asked = SimpleNamespace(data=f"{HERE}:{name}", data_from="each", eval_data="", steps=steps)
    return DataSources(consumer, asked, model, 0)


def test_a_last_batch_that_a_plan_cannot_train_on_is_refused_before_the_first_step_and_each_remedy_works() -> None:
    for name in ("nine", "kept"):
        supply(name, 2)  # the last batch is never reached
        with pytest.raises(UsageError, match=r"layer 1 normalises over the batch[\s\S]*9 samples: 1 of 4") as caught:
            supply(name, 3)
        assert caught.value.remedies[:2] == (
            "leave the last 1 out: torch.utils.data.Subset(dataset, range(8))",
            "DataLoader(..., drop_last=True)",
        )
    for remedied in ("eight", "dropped"):
        supply(remedied, 30)
    with pytest.raises(UsageError, match=r"needs a full batch[\s\S]*10 samples: 2 of 4"):
        supply("ten", 3, schedule="pipedream")


def test_a_script_whose_batch_has_one_sample_is_told_the_layer_and_goes_on() -> None:
    inputs, targets = rows(4)[:]

    def run(execution: Execution) -> float:
        with pytest.raises(UsageError, match=r"layer 1 normalises[\s\S]*1 value a channel[\s\S]*drop_last=True"):
            execution.step((inputs[:1], targets[:1]))
        return execution.step((inputs, targets))

    first, second = together(plan_of(WITH_NORM, [0.5], (2, 2)), run)
    assert first == second
