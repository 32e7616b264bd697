"""Evaluation on ranks that are threads: metrics, and the outputs that they are given."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halopipe.training.evaluate import Classes, classes_of
from halopipe.training.session import Execution
from planner.ir.errors import FactoryError, UsageError
from planner.ir.graph import Graph
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from tests.captures import capture
from tests.halopipe import cloudy, learners
from tests.halopipe.plans import plan_of
from tests.halopipe.training.sessions import batch, lone, loss_of, steps, together
from tests.runtime.plans import folded


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
def test_metrics_of_ones_own_see_whole_micro_batches_in_order_under_every_plan(make: Callable[[], Plan]) -> None:
    """The same values as of the module on one device."""
    plan = make()

    def run(execution: Execution) -> object:
        both = execution.evaluate(batch(6, 0), batch(5, 6), metric=confusions)
        return execution.evaluate(batch(6, 0), batch(5, 6), metric=learners.Confusion).metrics, both.metrics

    found = together(plan, run)
    assert all(each == found[0] for each in found)
    (one, both), expected = found[0], learners.Confusion()
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

    def run(execution: Execution) -> tuple[float | None, object, list[tuple[Tensor, ...]]]:
        seen = _Seen()
        before = execution.evaluate(batch(4, 0)).accuracy
        own = execution.evaluate(batch(4, 0), metric=lambda: seen, outputs=names)
        named = execution.evaluate(batch(4, 0), outputs=("targets", "classes"))
        return before, (own.accuracy, named.accuracy), seen.given

    output, targets = module(batch(4, 0)[0]), batch(4, 0)[1]
    expected = (output["more"][0], output["classes"], targets, output["more"][1])
    right = (output["classes"].argmax(1) == targets).double().mean().item()
    for before, accuracies, given in together(plan, run):
        assert before == right  # the loss of classes is found among the losses
        assert accuracies == (None, right)
        assert len(given) == 2
        for wanted, *parts in zip(expected, *given, strict=True):
            assert torch.equal(torch.cat(parts), wanted)


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
        assert [tuple(each.shape for each in values) for values in given] == [((2, 6, 3), (2, 6))] * 2
        assert torch.equal(torch.cat([output for output, _ in given]), module(inputs))


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
