"""The first step of a job beside one device's: what it is compared with, and what is said where it differs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from halopipe.launch import spawn
from halopipe.run_spec.job import REFERENCE, Job
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from halopipe.training import first_step, single_device
from halopipe.training import rank as opening
from halopipe.training.first_divergence import first_divergence
from halopipe.training.rank import Rank, rank_of
from halopipe.training.reference import Reference
from halopipe.training.single_device import IN_PARTS, WHOLE, make_reference, reference_of
from planner.ir.errors import (
    HalopipeError,
    NumericsError,
    StaleFileError,
    UnsupportedModelError,
    UsageError,
)
from planner.ir.plan import Plan, RankPrediction
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from runtime.monitor.failure import EndedWorker, leave_error, leave_result, set_text, text_at, write_error
from runtime.optim.gradient_sync import GradientSync
from tests.captures import capture
from tests.halopipe import learners
from tests.halopipe.plans import plan_of
from tests.halopipe.ranks import run_job

WIDTH = 4


class Net(nn.Module):
    """Three layers with a function between them."""

    def __init__(self, between: Any = torch.tanh) -> None:
        super().__init__()
        self.first, self.between, self.last = nn.Linear(WIDTH, 6), between, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.relu(self.between(self.first(x))))


def example(module: nn.Module) -> Any:
    return module, (torch.randn(4, WIDTH), torch.randint(3, (4,))), functional.cross_entropy


def plain_net() -> Any:
    return example(Net())


def normalised() -> Any:
    return example(nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)))


def ignoring() -> Any:
    """A mean over as many samples of a micro-batch as are not ignored, behind statistics of the micro-batch."""
    module, (inputs, _), loss = normalised()
    return module, (inputs, torch.tensor([-100, 2, -100, 1])), loss


def dropping() -> Any:
    return example(Net(nn.Dropout(0.4)))


class OwnDtype(nn.Module):
    """A user's cast to single precision, which the weights of a copy in float64 do not survive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).to(torch.float32))


def own_dtype() -> Any:
    return example(OwnDtype())


class Within(nn.Module):
    """A norm that is computed in single precision, whatever the dtype, and rows that are written one by one."""

    def __init__(self, lower: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.lower = lower

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        table = torch.linspace(0, 1, 6, dtype=torch.float32).cos()  # as of rotary positions: alike under every plan
        x = x + table.to(x.dtype)
        if self.lower:
            x = functional.layer_norm(x.float(), (6,)).to(x.dtype)
        made = torch.empty_like(x)
        for column in range(6):
            made[:, column] = 2 * x[:, column]
        return self.last(self.norm(made))


def within() -> Any:
    return example(Within(lower=True))


def beside() -> Any:
    return example(Within(lower=False))


def source(name: str, dtype: str = "float64") -> ModelSource:
    return ModelSource(f"{__name__}:{name}", dtype=dtype)


def plan(name: str = "plain_net", dtype: str = "float64", cuts: tuple[float, ...] = (0.5,)) -> Plan:
    return plan_of(source(name, dtype), list(cuts), (3, 2, 2))


def checked(made: Plan, folder: Path, **options: object) -> RunResult:
    return run_job(made, folder, **{"steps": 2, "check_first_step": True, **options})


UNSEEDED: list[Tensor] = []


def unseeded(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[Any]:
    """Another batch each time it is asked for."""
    while True:
        UNSEEDED.append(torch.randn(global_batch, WIDTH))
        yield UNSEEDED[-1], torch.zeros(global_batch, dtype=torch.int64)


def bad_first(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[Any]:
    """NaN in the first batch, and good ones behind it."""
    first = torch.full((global_batch, WIDTH), float("nan"))
    while True:
        yield first, torch.zeros(global_batch, dtype=torch.int64)
        first = torch.ones(global_batch, WIDTH)


@pytest.mark.parametrize(
    ("name", "witness"),
    [("plain_net", WHOLE), ("dropping", WHOLE), ("normalised", IN_PARTS), ("ignoring", IN_PARTS), ("own_dtype", "")],
)
def test_the_first_step_of_a_job_is_one_device_s(tmp_path: Path, name: str, witness: str) -> None:
    dtype = "float64" if witness else "float32"
    numerics = checked(plan(name, dtype), tmp_path).numerics
    assert numerics is not None
    assert (numerics.num_steps, numerics.skipped, numerics.hidden) == (1, "", 0)
    assert {"loss", "gradient", "parameter"} <= set(numerics.worst)
    if witness:
        assert numerics.witness == witness
        assert max(each.error for each in numerics.worst.values()) < 1e-10


def test_what_a_lower_precision_within_rounds_is_accepted_and_said(tmp_path: Path) -> None:
    """And nothing more than that: a wrong gradient of a thousandth is not."""
    numerics = checked(plan("within"), tmp_path).numerics
    assert numerics is not None
    assert "values pass through float32 in 2 layers, to first" in numerics.witness
    assert "values pass through float32" in str(numerics)
    limits = {kind: each.accepted for kind, each in numerics.worst.items()}
    assert 1e-10 < limits["gradient"] < 1e-4
    assert numerics.hidden == 0
    plain_limits = checked(plan("beside"), tmp_path).numerics
    assert plain_limits is not None
    assert {each.accepted for each in plain_limits.worst.values()} == {1e-10}
    assert "float32" not in plain_limits.witness


def test_a_mistake_shows_where_a_lower_precision_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = GradientSync.run

    def scaling(self: GradientSync) -> Any:
        for local_stage in self._local_stages.values():
            if "first.weight" in local_stage.parameters:
                local_stage.parameters["first.weight"].grad.mul_(1.001)
        return honest(self)

    monkeypatch.setattr(GradientSync, "run", scaling)
    with pytest.raises(NumericsError, match="the plan does not compute what one device does") as caught:
        checked(plan("within"), tmp_path)
    assert any("values pass through float32" in line for line in caught.value.details)
    assert caught.value.details[-1].startswith("values part at layer first")  # and not at what is not filled


def test_a_model_with_a_dtype_of_its_own_has_no_yardstick_and_that_is_said(tmp_path: Path) -> None:
    job = Job(plan("own_dtype", "float32"), RunOptions(), tmp_path)
    found = make_reference(job)
    assert found.rounding == {}
    assert found.witness.startswith(
        f"{WHOLE}; its own rounding is not known, as it does not run in float64 (RuntimeError"
    )


def test_a_module_that_runs_on_the_host_alone_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixing(*arguments: object, **options: object) -> float:
        raise RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu\nand more")

    monkeypatch.setattr(single_device, "capture_for", lambda model, device: (model, capture(model)))
    monkeypatch.setattr(single_device, "serial_step", mixing)
    job = Job(plan("plain_net"), RunOptions(), tmp_path)
    model = load_model(job.source)
    with pytest.raises(UnsupportedModelError, match="one device of type cuda cannot run the module") as caught:
        reference_of(rank_of(job, 0), model, [(model.inputs, model.targets)], torch.device("cuda:0"))
    assert caught.value.details[0] == "Expected all tensors to be on the same device, but found cuda:0 and cpu"
    assert "test_first_step.py:" in caught.value.details[1]
    assert any("--no-check-first-step" in remedy for remedy in caught.value.remedies)


def test_the_yardstick_reads_the_very_same_batch(tmp_path: Path) -> None:
    UNSEEDED.clear()
    job = Job(plan("plain_net", "float32"), RunOptions(data=f"{__name__}:unseeded"), tmp_path)
    found = make_reference(job)
    assert len(UNSEEDED) == 1
    assert 0 < max(found.rounding["gradient"].values()) < 1e-5


def test_one_device_is_fed_images_of_the_size_that_the_plan_is_for(tmp_path: Path) -> None:
    """The example repeated, as the ranks are: not the example that was captured."""
    made = plan_of(ModelSource("profiler.models.unet2d:unet2d", {"width": "2", "depth": "1"}, (1, 1, 8, 8)), [], (1,))
    source = replace(made.inputs.model, sizes={"height": 16, "width": 12})
    job = Job(replace(made, inputs=replace(made.inputs, model=source)), RunOptions(steps=1), tmp_path)
    (found,) = make_reference(job).losses
    model = load_model(job.source, job.options.seed)
    image, mask = (tensor.repeat(1, 1, 2, 2)[..., :12] for tensor in (*model.inputs, *model.targets))
    assert found == pytest.approx(model.loss((image,), (mask,)).item(), rel=1e-6)
    assert found != pytest.approx(model.loss(model.inputs, model.targets).item(), rel=1e-6)


def test_updates_are_compared_where_gradients_are_gathered_over_steps(tmp_path: Path) -> None:
    numerics = checked(plan(), tmp_path, steps=4, accumulate=2, clip_norm=0.1).numerics
    assert numerics is not None
    assert (numerics.num_steps, numerics.worst["parameter"].error < 1e-10) == (2, True)


def test_an_update_that_an_earlier_of_its_steps_spoils_is_not_compared(tmp_path: Path) -> None:
    outcome = checked(plan(), tmp_path, steps=4, accumulate=2, on_nan="skip", data=f"{__name__}:bad_first")
    assert [each.step for each in outcome.left_out] == [1]
    assert outcome.numerics is not None
    assert outcome.numerics.skipped == "the update of step 1 was left out"


def test_forward_passes_alone_are_compared_by_their_loss(tmp_path: Path) -> None:
    numerics = checked(learners.plan(schedule="forward"), tmp_path, data="tests.halopipe.learners:dataset").numerics
    assert numerics is not None
    assert set(numerics.worst) == {"loss"}
    assert numerics.worst["loss"].error < 1e-10


@pytest.fixture
def wrong_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks run another function than the module's, in place of its relu; one device does not."""
    honest = opening.capture_for

    def capture_for(*args: Any, **options: Any) -> Any:
        model, captured = honest(*args, **options)
        for node in captured.graph_module.graph.nodes:
            if node.target is torch.ops.aten.relu.default:
                node.target = torch.ops.aten.sigmoid.default
        captured.graph_module.recompile()
        return model, captured

    monkeypatch.setattr(opening, "capture_for", capture_for)


@pytest.mark.usefixtures("wrong_graph")
def test_a_plan_that_computes_something_else_ends_before_its_second_step(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    with pytest.raises(NumericsError, match="the plan does not compute what one device does") as caught:
        checked(plan(), tmp_path, metrics=str(metrics))
    assert caught.value.exit_code == 6
    assert "one device: the user's module on the whole batch" in caught.value.details
    assert len(metrics.read_text().splitlines()) == 1


def test_without_the_check_nobody_notices(tmp_path: Path, wrong_graph: None) -> None:
    assert len(checked(plan(), tmp_path, check_first_step=False).losses) == 2


@pytest.mark.parametrize("name", ["plain_net", "dropping"])
def test_values_that_part_in_the_captured_graph_are_named_by_layer(name: str) -> None:
    made = plan(name)
    job = Job(made, RunOptions(), Path())
    model = load_model(job.source)
    item = model.inputs, model.targets
    assert (
        "does on one device what the user's module does"
        in first_divergence(rank_of(job, 0).context, model, capture(model), item, [])[0]
    )
    captured = capture(model)
    for node in captured.graph_module.graph.nodes:
        if node.target is torch.ops.aten.relu.default:
            node.target = torch.ops.aten.sigmoid.default
    (line,) = first_divergence(rank_of(job, 0).context, model, captured, item, [])
    stage = made.decision.layers["relu"].stage
    assert f"in the forward of micro-batch 0, layer relu (stage {stage}, rank {stage}) makes values of norm" in line


class Doubled(torch.autograd.Function):
    """Equal forward, twice the gradient: what a capture that loses a backward of the user's own does not do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


def test_gradients_that_part_in_the_captured_graph_are_named_by_layer() -> None:
    job = Job(plan(), RunOptions(), Path())
    model = load_model(job.source)
    captured = capture(model)
    model.module.between = lambda x: Doubled.apply(torch.tanh(x))
    (line,) = first_divergence(rank_of(job, 0).context, model, captured, (model.inputs, model.targets), [])
    assert "in the backward of micro-batch 0, layer first (stage 0, rank 0) gets a gradient of norm " in line


def test_what_the_plan_does_wrong_is_named_by_the_layer_nearest_to_the_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = GradientSync.run

    def doubling(self: GradientSync) -> Any:
        for local_stage in self._local_stages.values():
            if "first.weight" in local_stage.parameters:
                local_stage.parameters["first.weight"].grad.mul_(2)
        return honest(self)

    monkeypatch.setattr(GradientSync, "run", doubling)
    with pytest.raises(NumericsError) as caught:
        checked(plan(), tmp_path)
    assert "the captured graph does on one device what the user's module does" in caught.value.details
    assert caught.value.details[-1].startswith(
        "values part at layer first (stage 0, rank 0): gradient of first.weight at "
    )
    assert "relative error 1.00e+00" in caught.value.details[-1]


def test_a_module_that_draws_otherwise_than_its_graph_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = single_device.capture_for

    def capture_for(*args: Any, **options: Any) -> Any:
        model, captured = honest(*args, **options)
        model.module.between = nn.Identity()
        return model, captured

    monkeypatch.setattr(single_device, "capture_for", capture_for)
    for options in ({}, {"check_numerics": True}):
        with pytest.raises(UnsupportedModelError, match="one device cannot draw what the plan draws"):
            checked(plan("dropping"), tmp_path, **options)


def test_where_there_is_no_memory_for_one_device_the_job_says_so(tmp_path: Path) -> None:
    made = plan()
    huge = replace(made.prediction, ranks=(RankPrediction(0, 0.0, 0.0, 0.0, 1 << 50, 1 << 51),))
    numerics = checked(replace(made, prediction=huge), tmp_path).numerics
    assert numerics is not None
    assert numerics.skipped.startswith("one device would need about 3072 TiB")
    assert str(numerics).startswith("not compared with one device: ")


def test_schedules_that_update_within_a_step_are_not_compared(tmp_path: Path) -> None:
    made = plan_of(source("plain_net"), [0.5], (2, 2), schedule="pipedream")
    numerics = checked(made, tmp_path).numerics
    assert numerics is not None
    assert numerics.skipped.startswith("schedule pipedream updates the weights within a step")
    with pytest.raises(UsageError, match="--check-numerics needs a schedule"):
        checked(made, tmp_path, check_numerics=True)


def test_what_one_device_left_behind_is_the_reason() -> None:
    store = dist.HashStore()

    def reason() -> str:
        return Reference.from_text(spawn._reference_text(store, EndedWorker(-9))).skipped

    assert reason() == "the run on one device ended by signal 9 without a word"
    leave_error(store, 0, write_error(UnsupportedModelError("it draws otherwise")))
    assert reason() == "one device could not run it: it draws otherwise"
    leave_result(store, 0, Reference(skipped="no memory").to_text())
    assert reason() == "no memory"


def test_a_reference_that_nobody_leaves_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_step, "PATIENCE_S", 0.05)
    store = dist.HashStore()
    first_step.FirstStep(told(0), None, lambda wrong: [])._provide(store)
    there = Reference.from_text(text_at(store, REFERENCE))
    assert there.skipped == "one device did not come to an end in 0.05 s"


def told(number: int, of: Plan | None = None, **given: Any) -> Rank:
    rank = rank_of(Job(of or plan(), RunOptions(), Path()), number)
    rank.spelled = given.pop("spelled", rank.spelled)
    rank.context = replace(rank.context, **given)
    return rank


def agreed(mine: Rank, first: Rank, model: str = "plain_net", seed: int = 0) -> None:
    """Two ranks compare what they hold; the error of rank 1, which rank 0 raises too."""
    store, errors = dist.HashStore(), {}

    def one(rank: int, each: Rank, captured: Any) -> None:
        each.store, each.context.model = store, captured
        try:
            each.agree()
        except HalopipeError as error:
            errors[rank] = error

    ranks = ((0, first, capture(load_model(source(model)))), (1, mine, capture(load_model(source(model), seed))))
    threads = [threading.Thread(target=one, args=arguments) for arguments in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        assert str(errors[0]) == str(errors[1])
        raise errors[1]


def test_ranks_that_hold_the_same_agree() -> None:
    agreed(told(1), told(0))


@pytest.mark.parametrize(
    ("given", "seed", "said"),
    [
        ({"seed": 7}, 0, ("rank 1 was told another seed than rank 0", "rank 0: 0", "rank 1: 7")),
        ({"clip_norm": 0.5}, 0, ("rank 1 was told another clip norm than rank 0", "rank 0: 0", "rank 1: 0.5")),
        ({"accumulate": 2}, 0, ("rank 1 was told another accumulate than rank 0", "rank 0: 1", "rank 1: 2")),
        (
            {"spelled": {"optimizer": "SGD"}},
            0,
            ("rank 1 was told another autocast than rank 0", "rank 0: ", "rank 1: None"),
        ),
        ({}, 1, ("rank 1 begins with other values of first.bias than rank 0", "rank 0: sha256:", "rank 1: sha256:")),
    ],
)
def test_a_rank_that_holds_something_else_is_refused_with_both_values(
    given: dict[str, Any], seed: int, said: tuple[str, ...]
) -> None:
    with pytest.raises(UsageError) as caught:
        agreed(told(1, **given), told(0), seed=seed)
    texts = (caught.value.title, *caught.value.details)
    assert all(text.startswith(begin) for text, begin in zip(texts, said, strict=True))


def test_a_rank_with_another_plan_is_refused() -> None:
    with pytest.raises(StaleFileError, match="rank 1 was given another plan than rank 0"):
        agreed(told(1, plan(cuts=())), told(0))


def test_a_reference_travels_whole() -> None:
    job = Job(plan("dropping", "float32"), RunOptions(), Path())
    model = load_model(job.source)
    found = reference_of(rank_of(job, 0), model, [(model.inputs, model.targets)], torch.device("cpu"))
    store = dist.HashStore()
    set_text(store, REFERENCE, found.to_text())
    there = Reference.from_text(text_at(store, REFERENCE))
    assert (there.losses, there.rounding, there.witness) == (found.losses, found.rounding, found.witness)
    assert all(there.gradient[name].distance(found.gradient[name]) == 0.0 for name in found.gradient)
    assert json.dumps(there.rounding)
