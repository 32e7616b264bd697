"""One rank of a plan in a script of one's own: its steps and its evaluations; the ranks are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from benchmarks.robustness import metrics
from halopipe.data.shared_source import DataSources
from halopipe.training.evaluate import Classes, classes_of
from halopipe.training.optimizer_spec import make_scheduler_of, parse_scheduler
from halopipe.training.session import Execution
from halopipe.training.steps import RankSteps
from planner.ir.errors import DifferentDataError, FactoryError, NotFiniteError, UsageError
from planner.ir.graph import Graph
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from profiler.models.example import Example
from profiler.source.source import load_model
from runtime.checkpoint import Checkpoint, whole_state_dict
from runtime.engine import StepResult
from runtime.numerics.finite import OnNan
from tests.captures import capture
from tests.halopipe import cloudy, learners
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
from tests.runtime.plans import folded

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
    module = load_model(source).module
    expected = []
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
OPTIMIZER = "AdamW:lr=0.05"
SCHEDULER = "StepLR:step_size=1,gamma=0.5"
NUM_STEPS = 4
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
    steps.after_step = phase("go on")
    steps.around = around
    assert steps.step(3) is result
    assert done == ["around 3", "take", "run", "left", "settle", "note", "compare", "go on"]
    assert (steps.first, steps.comparison) == (None, ("reference", ())), "it is compared once"
    steps.take = phase("take")
    done[:] = []
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


nine = partial(rows, 9)
ten = partial(rows, 10)


def eight() -> Dataset[tuple[Tensor, ...]]:
    return Subset(nine(), range(8))


def kept() -> object:
    return DataLoader(nine(), batch_size=4)


def dropped() -> object:
    return DataLoader(nine(), batch_size=4, drop_last=True)


def supply(name: str, steps: int, **options: str) -> DataSources:
    plan = plan_of(WITH_NORM, [0.5], (2, 2), **options)
    model = load_model(WITH_NORM)
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


def test_evaluation_is_the_same_on_all_ranks_and_changes_nothing() -> None:
    def run(execution: Execution) -> tuple[object, list[float]]:
        before = execution.step(batch(6, 0))
        score = execution.evaluate(batch(6, 0), batch(5, 6))
        return score, [before, *steps(1, 3)(execution)]

    found = together(learners.replicas(), run)
    assert len({score for score, _ in found}) == 1
    score = found[0][0]
    assert (score.step, score.num_samples) == (1, 11)
    assert score.accuracy == pytest.approx(round(score.accuracy * 11) / 11)
    losses = loss_of([losses for _, losses in found])
    assert losses == pytest.approx(loss_of(together(lone(), steps(0, 3))), rel=1e-10)


def confusions() -> dict[str, object]:
    return {"all": learners.Confusion(), "again": learners.Confusion()}


def broken() -> object:
    return 3


@pytest.mark.parametrize("make", [learners.plan, learners.replicas])
def test_metrics_of_ones_own_see_whole_batches_in_order_under_every_plan(make: Callable[[], Plan]) -> None:
    """The same values as of the module on one device."""
    plan = make()

    def run(execution: Execution) -> object:
        both = execution.evaluate(batch(6, 0), batch(5, 6), metric=confusions)
        return execution.evaluate(batch(6, 0), batch(5, 6), metric=learners.Confusion).metrics, both.metrics

    found = together(plan, run)
    assert all(each == found[0] for each in found)
    one, both = found[0]
    expected = learners.Confusion()
    module = load_model(plan.inputs.model).module.eval()
    for inputs, targets in (batch(6, 0), batch(5, 6)):
        expected.update(module(inputs), targets)
    assert one == pytest.approx({name: value.item() for name, value in expected.compute().items()}, rel=1e-6)
    assert both == {f"{name}.{part}": one[part] for name in ("all", "again") for part in one}


class _Seen:
    """A metric that tells what it was given."""

    def __init__(self) -> None:
        self.given = list[tuple[Tensor, ...]]()

    def update(self, *values: Tensor) -> None:
        self.given.append(values)

    def compute(self) -> int:
        return len(self.given)


@pytest.mark.parametrize("ranks", [[(0,), (1,), (2,)], [(0,), (1,), (0,)], [(0, 1), (2,)], [(0, 1)]], ids=str)
def test_evaluation_is_of_the_outputs_that_are_named_under_every_plan(ranks: list[tuple[int, ...]]) -> None:
    cuts = [number / len(ranks) for number in range(1, len(ranks))]
    schedule = folded if len(set(ranks)) < len(ranks) else "1f1b"
    source = ModelSource("tests.halopipe.learners:heads", dtype="float64")
    plan = plan_of(source, cuts, ranks=ranks, schedule=schedule)
    module = load_model(plan.inputs.model).module.eval()
    names = ("more.0", "classes", "targets", "more.1")
    inputs, targets = batch(4, 0)
    inputs = inputs.mul(16).round().div(16)

    def run(execution: Execution) -> tuple[float | None, object, list[tuple[Tensor, ...]]]:
        seen = _Seen()
        before = execution.evaluate((inputs, targets)).accuracy
        own = execution.evaluate((inputs, targets), metric=lambda: seen, outputs=names)
        named = execution.evaluate((inputs, targets), outputs=("targets", "classes"))
        return before, (own.accuracy, named.accuracy), seen.given

    output = module(inputs)
    expected = (output["more"][0], output["classes"], targets, output["more"][1])
    right = (output["classes"].argmax(1) == targets).double().mean().item()
    for before, accuracies, given in together(plan, run):
        assert before == right  # the loss of classes is found among the losses
        assert accuracies == (None, right)
        assert len(given) == 1
        for wanted, *parts in zip(expected, *given, strict=True):
            torch.testing.assert_close(torch.cat(parts), wanted, rtol=1e-12, atol=0.0)


@pytest.mark.cases(8)
@pytest.mark.parametrize("plan", metrics.PLANS)
@pytest.mark.parametrize("name", metrics.NETWORKS)
def test_metrics_are_called_as_the_loss_function_is(name: str, plan: str) -> None:
    """Once for each batch, whatever its micro-batches are."""
    network = metrics.NETWORKS[name]
    held_out = metrics.held_out(network)
    module = load_model(network.source).module.eval()
    expected = network.metric()
    with torch.no_grad():
        for inputs, targets in held_out:
            expected.update(module(inputs), targets)
    wanted = {name: pytest.approx(float(value), rel=1e-12) for name, value in expected.compute().items()}

    def run(execution: Execution) -> object:
        return execution.evaluate(*held_out, metric=network.metric).metrics

    assert all(found == wanted for found in together(metrics.PLANS[plan](network.source), run))


def test_micro_batches_that_are_given_one_by_one_are_a_call_each() -> None:
    network = metrics.NETWORKS["a loss of two terms"]
    plan = plan_of(network.source, [0.5], (4, 2))
    both = metrics.held_out(network)

    def run(execution: Execution) -> object:
        in_one = execution.evaluate([(x[:2], y[:2]) for x, y in both], metric=metrics.MAE)
        apart = execution.evaluate(*((x[:2], y[:2]) for x, y in both), metric=metrics.MAE)
        return in_one.metrics, apart.metrics

    for in_one, apart in together(plan, run):
        assert in_one == pytest.approx(apart, rel=1e-12)


class WithPenalty(nn.Module):
    """Its output holds a number that is made of all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(metrics.WIDTH, metrics.WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.layers(x)
        return found, found.square().mean()


def with_penalty() -> tuple[object, ...]:
    return WithPenalty(), metrics.batch(0), _with_penalty


def _with_penalty(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[0], targets) + 0.1 * output[1]


@pytest.mark.parametrize(
    ("micro_batches", "ranks"), [((6,), [(0,)]), ((4, 2), [(0,)]), ((6,), [(0, 1)])], ids=["whole", "two", "shared"]
)
def test_an_output_that_is_made_of_all_samples_is_given_whole_or_not_at_all(
    micro_batches: tuple[int, ...], ranks: list[tuple[int, ...]]
) -> None:
    source = ModelSource("tests.halopipe.training.test_session:with_penalty", dtype="float64")
    plan = plan_of(source, [], micro_batches, ranks=ranks)
    inputs, targets = metrics.held_out(metrics.NETWORKS["a loss of two terms"])[0]
    output = load_model(source).module(inputs)

    def run(execution: Execution) -> list[tuple[Any, ...]]:
        seen = _Seen()
        execution.evaluate((inputs, targets), metric=lambda: seen)
        return seen.given

    if len(micro_batches) * len(ranks[0]) == 1:
        (((found, penalty), compared),) = together(plan, run)[0]
        assert torch.equal(compared, targets)
        torch.testing.assert_close((found, penalty), output, rtol=1e-12, atol=0.0)
    else:
        with pytest.raises(UsageError, match="which is not made of one sample after another"):
            together(plan, run)


def test_what_is_no_output_and_no_metric_is_refused_with_what_is() -> None:
    plan = plan_of(ModelSource("tests.halopipe.learners:heads", dtype="float64"), [0.5])
    with pytest.raises(UsageError, match="cannot be given 'idle'") as caught:
        together(plan, lambda execution: execution.evaluate(batch(4, 0), outputs=("classes", "idle")))
    assert caught.value.details == (
        "outputs of the module that the loss is made of: classes, more.0, more.1",
        "tensors of a batch: inputs, targets",
    )
    assert "times 0" in caught.value.remedies[0]
    with pytest.raises(FactoryError, match="makes no metric"):
        together(lone(), lambda execution: execution.evaluate(batch(6, 0), metric=broken))


def test_outputs_of_sequences_are_named_as_they_leave_the_module() -> None:
    plan = plan_of(ModelSource("tests.halopipe.learners:tagger"), [0.5])
    module = load_model(plan.inputs.model).module
    inputs, targets = learners.tagger()[1]

    def run(execution: Execution) -> list[tuple[Tensor, ...]]:
        seen = _Seen()
        execution.evaluate((inputs, targets), metric=lambda: seen, outputs=("output", "targets"))
        return seen.given

    for given in together(plan, run):
        assert [tuple(each.shape for each in values) for values in given] == [((4, 6, 3), (4, 6))]
        torch.testing.assert_close(torch.cat([output for output, _ in given]), module(inputs))


def test_models_that_classify_are_known_by_their_loss() -> None:
    def graph_of(source: ModelSource) -> Graph:
        return capture(load_model(source)).graph

    sources = [f"tests.halopipe.learners:{name}" for name in ("classifier", "tagger")]
    for graph in (graph_of(ModelSource(source)) for source in sources):
        classes = classes_of(graph)
        assert classes is not None
        assert [classes.logits, classes.target, classes.dim] == [*graph.layers[-1].inputs, 1]
    assert classes_of(graph_of(ModelSource("tests.halopipe.bombs:mined", {}, (4, 3)))) is None
    graph = graph_of(cloudy.source("segmenter"))  # it classifies sites, before the means of its loss
    classes = classes_of(graph)
    assert classes is not None
    assert classes.target == "targets"
    assert graph.values()[classes.logits].dims == ("sites", "channel")
    assert graph.values()[graph.layers[-1].inputs[0]].dims == ("sample",)
    logits = torch.tensor([[2.0, 1.0], [0.0, 1.0], [5.0, 1.0]])
    assert Classes("x", "y", 1).count(logits, torch.tensor([0, 0, -100])) == (1, 2), "what is ignored is no question"
