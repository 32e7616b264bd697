"""One rank of a plan in a script of one's own; the ranks are threads."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from halopipe.data.feeds import consumer_of
from halopipe.training.optimizer_spec import (
    _DEFAULTS,
    make_optimizer_of,
    make_scheduler_of,
    parse_optimizer,
    parse_scheduler,
)
from halopipe.training.rank import Opened, Terms
from halopipe.training.session import Execution
from halopipe.training.single_device import parameters_of
from planner.ir.errors import (
    CorruptFileError,
    DifferentDataError,
    FactoryError,
    NotFiniteError,
    StaleFileError,
    UnknownNameError,
    UsageError,
)
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from runtime.checkpoint.lock import LOCK, held
from runtime.engine import Engine
from runtime.monitor.waits import Voice
from runtime.numerics.finite import OnNan
from runtime.optim.optimizer import Followed
from runtime.stage.builder import groups_of
from runtime.stage.captured import captured_model
from runtime.transport import InProcessTransport
from tests.captures import capture
from tests.halopipe import learners
from tests.halopipe.plans import plan_of
from tests.runtime.plans import folded
from tests.runtime.ranks import on_ranks

PLAN = learners.plan([])


Make = Callable[[nn.Module], tuple[torch.optim.Optimizer, LRScheduler | None]]


def together(
    plan: Plan, do: Callable[[Execution], object], seed: int = 0, make: Make | None = None, **options: object
) -> list[object]:
    """What ``do`` gives on each rank; ``make`` makes the optimiser and schedule objects of a user's script."""
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
        own = dict(made)
        optimizer = make_optimizer_of(parse_optimizer(own.pop("text", "SGD:lr=0.5")))
        if make is not None:
            made_by_user, own["scheduler"] = make(twin.module)
            optimizer = Followed(made_by_user, own["scheduler"])
            optimizer.recognise(parameters_of(twin, captured))
        engine = Engine(plan.decision, given, twin.module, end, optimizer, **own)
        opened = Opened(engine, consumer_of(plan.decision, given, end, 20.0))
        terms = Terms(plan, optimizer, seed=seed)
        with voice, Execution(opened, twin.module, engine.close, terms, voice.activity, twin.batch) as execution:
            return do(execution)

    return on_ranks(plan.decision.num_ranks, run, groups_of(plan.decision, original[1].graph))


def batch(rows: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = learners.samples()
    return inputs[step : step + rows].double(), targets[step : step + rows]


def steps(first: int, last: int) -> Callable[[Execution], list[float]]:
    return lambda execution: [execution.step(batch(6, step)) for step in range(first, last)]


def loss_of(found: list[object]) -> list[float]:
    assert all(losses == found[0] for losses in found)  # every rank is told
    return found[0]


def test_what_is_saved_is_loaded_under_another_plan(tmp_path: Path) -> None:
    whole = loss_of(together(PLAN, steps(0, 5), clip_norm=0.7))

    def first(execution: Execution) -> None:
        steps(0, 3)(execution)
        execution.save(tmp_path)

    def rest(execution: Execution) -> list[float]:
        assert execution.load(tmp_path) == execution.num_steps == 3
        return steps(3, 5)(execution)

    together(learners.replicas(), first, clip_norm=0.7)
    assert loss_of(together(learners.plan(), rest, clip_norm=0.7)) == pytest.approx(whole[3:], rel=1e-10)
    with pytest.raises(UsageError, match="was drawn from another seed") as caught:
        together(PLAN, rest, seed=3)
    assert caught.value.remedies == ("execute(..., seed=0)",)
    with pytest.raises(StaleFileError, match="belongs to another model"):
        together(learners.plan_of_taggers(), rest)


def test_a_script_goes_on_from_the_newest_sound_checkpoint_if_there_is_any(tmp_path: Path) -> None:
    def begun(execution: Execution) -> list[float]:
        assert execution.load(tmp_path, step="auto") == execution.num_steps == 0
        losses = steps(0, 2)(execution)
        execution.save(tmp_path)
        losses += steps(2, 4)(execution)
        execution.save(tmp_path)
        return losses

    def rest(execution: Execution) -> list[float]:
        assert execution.load(tmp_path, step="auto") == 2
        return steps(2, 4)(execution)

    losses = loss_of(together(learners.plan(), begun))
    (tmp_path / "step-4" / "rank-1" / "__0_0.distcp").unlink()
    assert loss_of(together(learners.plan(), rest)) == losses[2:]
    (tmp_path / "step-2" / "manifest.sha256").write_text("0" * 64)
    with pytest.raises(CorruptFileError, match="sound"):
        together(learners.plan(), rest)
    with pytest.raises(UnknownNameError, match="no checkpoint 'newest'"):
        together(PLAN, lambda execution: execution.load(tmp_path, step="newest"))


def test_a_script_saves_into_no_folder_that_another_job_writes_to_and_goes_on(tmp_path: Path) -> None:
    def refused(execution: Execution) -> list[float]:
        losses = steps(0, 2)(execution)
        with pytest.raises(UsageError) as caught:
            execution.save(tmp_path / "theirs")
        who = "another job writes its checkpoints into" if execution.rank == 0 else "rank 0 cannot write into"
        assert caught.value.title == f"{who} {tmp_path / 'theirs'}"
        execution.save(tmp_path / "own")
        assert (tmp_path / "own" / LOCK).exists()
        return losses + steps(2, 3)(execution)

    with held(tmp_path / "theirs"):
        losses = loss_of(together(learners.plan(), refused))
    assert losses == loss_of(together(learners.plan(), steps(0, 3)))
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["step-2"], "the lock is gone with the run"


def test_who_goes_on_by_other_micro_batches_hears_what_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def saves(folder: Path) -> Callable[[Execution], None]:
        return lambda execution: execution.save(folder)

    def loads(folder: Path) -> Callable[[Execution], object]:
        return lambda execution: execution.load(folder)

    def said() -> list[str]:
        return [text for name, _, text in caplog.record_tuples if name.startswith("halopipe")]

    together(learners.plan(), saves(tmp_path / "draws"))
    together(learners.plan([]), loads(tmp_path / "draws"))
    assert said() == [], "stages and ranks change nothing"
    together(learners.plan(micro_batches=(2, 2, 2)), loads(tmp_path / "draws"))
    (word,) = said()
    was = f"{tmp_path}/draws/step-0 was saved by 2 micro-batches of 3, this plan has 3 micro-batches of 2: "
    assert word.startswith(f"{was}random draws or statistics of layer 2 go by micro-batch")
    assert word.endswith("to keep them: halopipe plan --micro-batch 3")
    together(learners.plan_of_taggers(), saves(tmp_path / "none"))
    other = learners.plan_of_taggers()
    micro_batches = replace(plan_of(other.inputs.model, [0.5], (4,)), inputs=other.inputs)
    together(micro_batches, loads(tmp_path / "none"))
    assert said() == [word], "this network draws nothing"


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
    assert losses == pytest.approx(loss_of(together(PLAN, steps(0, 3))), rel=1e-10)


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


def test_an_output_that_is_not_there_is_refused_with_those_that_are() -> None:
    plan = plan_of(ModelSource("tests.halopipe.learners:heads", dtype="float64"), [0.5])
    with pytest.raises(UsageError, match="cannot be given 'idle'") as caught:
        together(plan, lambda execution: execution.evaluate(batch(4, 0), outputs=("classes", "idle")))
    assert caught.value.details == (
        "outputs of the module that the loss is made of: classes, more.0, more.1",
        "tensors of a batch: inputs, targets",
    )
    assert "times 0" in caught.value.remedies[0]


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


def test_what_is_no_metric_is_refused() -> None:
    with pytest.raises(FactoryError, match="makes no metric"):
        together(PLAN, lambda execution: execution.evaluate(batch(6, 0), metric=broken))


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


def adamw(module: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
    """No decay for biases, another rate for the last layer; a warm-up of one's own."""
    named = dict(module.named_parameters())
    biases = [parameter for name, parameter in named.items() if name.endswith("bias")]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": [named["0.weight"]]}]
    groups.append({"params": [named["3.weight"]], "lr": 0.03, "betas": (0.5, 0.9)})
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)
    return optimizer, lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


def stepped(module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
    """An optimiser that has something to keep already."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    nn.functional.cross_entropy(module(batch(6, 9)[0]), batch(6, 9)[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer, None


def one_device(make: Make, num_steps: int, rows: int = 6) -> tuple[list[float], dict[str, Tensor]]:
    """A training loop as people write it."""
    module = load_model(CALM).module
    optimizer, schedule = make(module)
    losses = []
    for step in range(num_steps):
        inputs, targets = batch(rows, step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(inputs), targets)
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        losses.append(loss.item())
    return losses, module.state_dict()


CALM = ModelSource("tests.halopipe.learners:classifier", {"dropout": "0.0"}, (4, learners.WIDTH), "float64")


def divided(zero: int = 1) -> Plan:
    """A stage of two ranks, which divide its optimiser and what else ``zero`` says, and one of one rank."""
    found = plan_of(CALM, [0.5], (3, 3), ranks=[(0, 1), (2,)], shares=[(1, 2), (3,)])
    stages = tuple(
        replace(stage, sharded=len(stage.ranks) > 1, zero=zero if len(stage.ranks) > 1 else 1)
        for stage in found.decision.stages
    )
    return replace(found, decision=replace(found.decision, stages=stages))


CALM_PLANS = {
    "two stages": lambda: plan_of(CALM, [0.5], (3, 3)),
    "a divided optimiser": divided,
    "divided gradients": lambda: divided(2),
    "divided parameters": lambda: divided(3),
    "two stages on a rank": lambda: plan_of(CALM, [0.3, 0.6], (3, 3), ranks=[(0,), (1,), (0,)], schedule=folded),
}


def require_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("make", [adamw, stepped])
@pytest.mark.parametrize("name", CALM_PLANS)
def test_the_users_own_optimiser_and_schedule_train_as_in_the_users_own_loop(name: str, make: Make) -> None:
    def run(execution: Execution) -> tuple[list[float], dict[str, Tensor]]:
        return steps(0, 3)(execution), execution.state_dict()

    expected, weights = one_device(make, 3)
    for losses, state in together(CALM_PLANS[name](), run, make=make):
        assert losses == pytest.approx(expected, rel=1e-10)
        require_close(state, weights)


@pytest.mark.parametrize("name", [each for each in _DEFAULTS if each != "Muon"])
def test_every_optimiser_trains_as_that_of_torch(name: str) -> None:
    text = f"{name}:lr=0.02,weight_decay=0.1" if name != "Rprop" else "Rprop:lr=0.02"
    expected, _ = one_device(lambda module: (make_optimizer_of(parse_optimizer(text))(module.parameters()), None), 3)
    found = together(CALM_PLANS["two stages"](), steps(0, 3), text=text, scheduler=None)
    assert loss_of(found) == pytest.approx(expected, rel=1e-10)


def test_what_a_script_does_to_its_optimiser_holds_and_what_cannot_is_refused() -> None:
    made: dict[int, torch.optim.Optimizer] = {}

    def sgd(module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        made[threading.get_ident()] = optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
        return optimizer, None

    def run(execution: Execution) -> tuple[float, ...]:
        mine = made[threading.get_ident()]
        plateau = lr_scheduler.ReduceLROnPlateau(mine, patience=0, factor=0.5, threshold=1e9)
        rates = []
        for step in range(3):
            result = execution.train(batch(6, step))
            plateau.step(result.loss)
            rates += result.learning_rates
        mine.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(UsageError, match="has 2 groups of parameters by now"):
            execution.step(batch(6, 3))
        return tuple(rates)

    assert together(CALM_PLANS["two stages"](), run, make=sgd, scheduler=None) == [(0.5, 0.25, 0.125)] * 2
    with pytest.raises(UsageError, match="has 1 parameters that are not the model's"):
        together(PLAN, run, make=lambda module: (torch.optim.SGD([nn.Parameter(torch.zeros(1))]), None))
    hooked = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    hooked.register_step_pre_hook(lambda *_: None)
    with pytest.raises(UsageError, match="has hooks around its steps"):
        Followed(hooked)
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(UsageError, match="ReduceLROnPlateau follows a metric"):
        Followed(plain, lr_scheduler.ReduceLROnPlateau(plain))


def test_a_checkpoint_brings_the_users_schedule_back(tmp_path: Path) -> None:
    def first(execution: Execution) -> None:
        steps(0, 2)(execution)
        execution.save(tmp_path)

    def rest(execution: Execution) -> list[float]:
        execution.load(tmp_path)
        return steps(2, 4)(execution)

    expected, _ = one_device(adamw, 4)
    plan = CALM_PLANS["two stages"]()
    together(plan, first, make=adamw)
    assert loss_of(together(plan, rest, make=adamw)) == pytest.approx(expected[2:], rel=1e-10)


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


def no_number(rows: int, step: int) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(rows, step)
    return inputs.index_fill(0, torch.tensor([0]), math.nan), targets


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


def test_a_schedule_of_the_users_own_waits_where_an_update_is_skipped() -> None:
    def made(module: nn.Module) -> tuple[torch.optim.Optimizer, LRScheduler]:
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        return optimizer, lr_scheduler.StepLR(optimizer, 1, 0.5)

    def train(execution: Execution) -> tuple[float, int, float]:
        losses = [execution.step(each) for each in (batch(6, 0), no_number(6, 1), batch(6, 2))]
        assert math.isnan(losses[1])
        assert execution.followed is not None
        return execution.followed.optimizer.param_groups[0]["lr"], execution.num_steps, losses[2]

    found = together(learners.plan(), train, make=made, on_nan=OnNan.SKIP)
    assert [each[:2] for each in found] == [(0.25, 3)] * 2
    assert math.isfinite(found[0][2])
