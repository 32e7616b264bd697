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
from halopipe.training.rank import JobMember, member_of
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
        self.first = nn.Linear(WIDTH, 6)
        self.between = between
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.relu(self.between(self.first(x))))


class OwnDtype(nn.Module):
    """A user's cast to single precision, which the weights of a copy in float64 do not survive."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).to(torch.float32))


class Within(nn.Module):
    """A norm that is computed in single precision, whatever the dtype, and rows that are written one by one."""

    def __init__(self, lower: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 6)
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 3)
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


def network(*, kind: str) -> Any:
    """``ignoring``: a mean over as many samples as are not ignored, behind statistics of the micro-batch."""
    with_norm = nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    module = {
        "plain": Net(),
        "normalised": with_norm,
        "ignoring": with_norm,
        "dropping": Net(nn.Dropout(0.4)),
        "own_dtype": OwnDtype(),
        "within": Within(lower=True),
        "beside": Within(lower=False),
    }[kind]
    targets = torch.tensor([-100, 2, -100, 1]) if kind == "ignoring" else torch.randint(3, (4,))
    return module, (torch.randn(4, WIDTH), targets), functional.cross_entropy


def source(kind: str, dtype: str = "float64") -> ModelSource:
    return ModelSource(f"{__name__}:network", {"kind": json.dumps(kind)}, dtype=dtype)


def plan(name: str = "plain", dtype: str = "float64", cuts: tuple[float, ...] = (0.5,)) -> Plan:
    return plan_of(source(name, dtype), list(cuts), (3, 2, 2))


def checked(made: Plan, folder: Path, **options: object) -> RunResult:
    return run_job(made, folder, **{"steps": 2, "check_first_step": True, **options})


def job_of(name: str = "plain", dtype: str = "float64", **options: Any) -> Job:
    return Job(plan(name, dtype), RunOptions(**options), Path())


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


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "witness"),
    [("plain", WHOLE), ("dropping", WHOLE), ("normalised", IN_PARTS), ("ignoring", IN_PARTS), ("own_dtype", "")],
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


def spoil_gradients(patch: pytest.MonkeyPatch, factor: float) -> None:
    """Those of the first layer are so many times as large."""
    honest = GradientSync.run

    def scaling(self: GradientSync) -> Any:
        for local_stage in self._local_stages.values():
            if "first.weight" in local_stage.parameters:
                local_stage.parameters["first.weight"].grad.mul_(factor)
        return honest(self)

    patch.setattr(GradientSync, "run", scaling)


def test_what_the_plan_does_wrong_is_named_by_the_layer_nearest_to_the_loss_also_where_a_lower_precision_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        spoil_gradients(patch, 2.0)
        with pytest.raises(NumericsError, match="the plan does not compute what one device does") as caught:
            checked(plan(), tmp_path)
    assert "the captured graph does on one device what the user's module does" in caught.value.details
    last = caught.value.details[-1]
    assert last.startswith("values part at layer first (stage 0, rank 0): gradient of first.weight at ")
    assert "relative error 1.00e+00" in last
    spoil_gradients(monkeypatch, 1.001)
    with pytest.raises(NumericsError, match="the plan does not compute what one device does") as caught:
        checked(plan("within"), tmp_path)
    assert any("values pass through float32" in line for line in caught.value.details)
    assert caught.value.details[-1].startswith("values part at layer first")  # and not at what is not filled


def test_a_model_with_a_dtype_of_its_own_has_no_yardstick_and_that_is_said() -> None:
    found = make_reference(job_of("own_dtype", "float32"))
    assert found.rounding == {}
    assert found.witness.startswith(
        f"{WHOLE}; its own rounding is not known, as it does not run in float64 (RuntimeError"
    )


def test_a_module_that_runs_on_the_host_alone_is_told_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixing(*arguments: object, **options: object) -> float:
        raise RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu\nand more")

    monkeypatch.setattr(single_device, "capture_for", lambda model, device: (model, capture(model)))
    monkeypatch.setattr(single_device, "serial_step", mixing)
    job = job_of()
    model = load_model(job.source)
    with pytest.raises(UnsupportedModelError, match="one device of type cuda cannot run the module") as caught:
        reference_of(member_of(job, 0), model, [(model.inputs, model.targets)], torch.device("cuda:0"))
    assert caught.value.details[0] == "Expected all tensors to be on the same device, but found cuda:0 and cpu"
    assert "test_first_step.py:" in caught.value.details[1]
    assert any("--no-check-first-step" in remedy for remedy in caught.value.remedies)


def test_the_yardstick_reads_the_very_same_batch_and_travels_whole() -> None:
    UNSEEDED.clear()
    found = make_reference(job_of(dtype="float32", data=f"{__name__}:unseeded"))
    assert len(UNSEEDED) == 1
    assert 0 < max(found.rounding["gradient"].values()) < 1e-5
    store = dist.HashStore()
    set_text(store, REFERENCE, found.to_text())
    there = Reference.from_text(text_at(store, REFERENCE))
    assert (there.losses, there.rounding, there.witness) == (found.losses, found.rounding, found.witness)
    assert all(there.gradient[name].distance(found.gradient[name]) == 0.0 for name in found.gradient)


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


def test_updates_are_compared_where_gradients_are_gathered_over_steps_unless_one_of_them_is_left_out(
    tmp_path: Path,
) -> None:
    numerics = checked(plan(), tmp_path, steps=4, accumulate=2, clip_norm=0.1).numerics
    assert numerics is not None
    assert (numerics.num_steps, numerics.worst["parameter"].error < 1e-10) == (2, True)
    outcome = checked(plan(), tmp_path, steps=4, accumulate=2, on_nan="skip", data=f"{__name__}:bad_first")
    assert [each.step for each in outcome.left_out] == [1]
    assert outcome.numerics is not None
    assert outcome.numerics.skipped == "the update of step 1 was left out"


def test_forward_passes_alone_are_compared_by_their_loss(tmp_path: Path) -> None:
    numerics = checked(learners.plan(schedule="forward"), tmp_path, data="tests.halopipe.learners:dataset").numerics
    assert numerics is not None
    assert set(numerics.worst) == {"loss"}
    assert numerics.worst["loss"].error < 1e-10


def with_sigmoid(captured: Any) -> Any:
    """Another function than the module's, in place of its relu."""
    for node in captured.graph_module.graph.nodes:
        if node.target is torch.ops.aten.relu.default:
            node.target = torch.ops.aten.sigmoid.default
    captured.graph_module.recompile()
    return captured


def test_a_plan_that_computes_something_else_ends_before_its_second_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = opening.capture_for

    def capture_for(*args: Any, **options: Any) -> Any:
        model, captured = honest(*args, **options)
        return model, with_sigmoid(captured)

    monkeypatch.setattr(opening, "capture_for", capture_for)  # of ranks; one device does not
    metrics = tmp_path / "metrics.jsonl"
    with pytest.raises(NumericsError, match="the plan does not compute what one device does") as caught:
        checked(plan(), tmp_path, metrics=str(metrics))
    assert caught.value.exit_code == 6
    assert f"one device: {WHOLE}" in caught.value.details
    assert len(metrics.read_text().splitlines()) == 1
    assert len(checked(plan(), tmp_path, check_first_step=False).losses) == 2, "without the check nobody notices"


def divergence(job: Job, model: Any, captured: Any) -> list[str]:
    return first_divergence(member_of(job, 0).context, model, captured, (model.inputs, model.targets), [])


@pytest.mark.parametrize("name", ["plain", "dropping"])
def test_values_that_part_in_the_captured_graph_are_named_by_layer(name: str) -> None:
    job = job_of(name)
    model = load_model(job.source)
    assert "does on one device what the user's module does" in divergence(job, model, capture(model))[0]
    (line,) = divergence(job, model, with_sigmoid(capture(model)))
    stage = job.plan.decision.layers["relu"].stage
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
    job = job_of()
    model = load_model(job.source)
    captured = capture(model)
    model.module.between = lambda x: Doubled.apply(torch.tanh(x))
    (line,) = divergence(job, model, captured)
    assert "in the backward of micro-batch 0, layer first (stage 0, rank 0) gets a gradient of norm " in line


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


def test_what_cannot_be_compared_says_why_and_the_job_goes_on(tmp_path: Path) -> None:
    made = plan()
    huge = replace(made.prediction, ranks=(RankPrediction(0, 0.0, 0.0, 0.0, 1 << 50, 1 << 51),))
    numerics = checked(replace(made, prediction=huge), tmp_path).numerics
    assert numerics is not None
    assert numerics.skipped.startswith("one device would need about 3072 TiB")
    assert str(numerics).startswith("not compared with one device: ")
    made = plan_of(source("plain"), [0.5], (2, 2), schedule="pipedream")
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


def told(number: int, of: Plan | None = None, **given: Any) -> JobMember:
    member = member_of(Job(of or plan(), RunOptions(), Path()), number)
    member.spelled = given.pop("spelled", member.spelled)
    member.context = replace(member.context, **given)
    return member


def agreed(mine: JobMember, first: JobMember, model: str = "plain", seed: int = 0) -> None:
    """Two ranks compare what they hold; the error of rank 1, which rank 0 raises too."""
    store = dist.HashStore()
    errors = {}

    def one(rank: int, each: JobMember, captured: Any) -> None:
        each.store = store
        each.context.model = captured
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


@pytest.mark.every_case
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


def test_ranks_that_hold_the_same_agree_and_one_with_another_plan_is_refused() -> None:
    agreed(told(1), told(0))
    with pytest.raises(StaleFileError, match="rank 1 was given another plan than rank 0") as caught:
        agreed(told(1, plan(cuts=())), told(0))
    assert [detail.partition(":")[0] for detail in caught.value.details[:2]] == ["rank 0", "rank 1"]
