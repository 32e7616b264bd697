"""Sparse networks by plans: runs beside one device, data, evaluation, checkpoints, and what goes wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from cuda_ops.sparse.nn import SparseTensor
from halopipe.launch.run import run_plan
from halopipe.run_spec.job import Job
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from halopipe.training.session import Execution
from halopipe.training.single_device import make_reference
from planner.ir.errors import FactoryError, StageFailedError, UsageError
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from runtime.monitor.failure import read_error, write_error
from tests.halopipe import cloudy
from tests.halopipe.cloudy import Clouds
from tests.halopipe.plans import plan_of
from tests.halopipe.ranks import run_job
from tests.halopipe.training.sessions import together

torch.set_num_threads(1)

SITES = "tests.halopipe.cloudy:sites"
CLASSES = "tests.halopipe.cloudy:classes"
SHARED = {"cuts": [], "ranks": [(0, 1)]}
LAYOUTS = {
    "segmenter": {"ranks": [(0, 1), (2,)], "shares": [(3, 1), (1,)]},
    "classifier": SHARED,
    "detector": SHARED,
    "dropping": SHARED,
}


@pytest.mark.parametrize("factory", LAYOUTS)
def test_a_run_computes_what_one_device_does(tmp_path: Path, factory: str) -> None:
    data = SITES if factory == "segmenter" else CLASSES
    result = run_job(cloudy.plan(factory, **LAYOUTS[factory]), tmp_path, check_numerics=True, data=data)
    assert result.numerics.num_steps == 5
    assert max(each.error for each in result.numerics.worst.values()) < 1e-10


SOME_STEPS = {"data": SITES, "eval_data": SITES, "steps": 4}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """On one rank."""
    return run_job(cloudy.plan(cuts=[]), tmp_path_factory.mktemp("alone"), **SOME_STEPS)


@pytest.mark.parametrize("way", ["each", "first", "share"])
def test_ranks_get_the_same_clouds_whoever_reads_them(tmp_path: Path, alone: RunResult, way: str) -> None:
    """Of eleven clouds the last batch has three: micro-batches of two and one."""
    plan = cloudy.plan(**({} if way == "each" else SHARED))
    result = run_job(plan, tmp_path, data_from=way, **SOME_STEPS)
    assert result.losses == pytest.approx(alone.losses, rel=1e-10)
    (score,) = result.scores
    (expected,) = alone.scores
    assert score.loss == pytest.approx(expected.loss, rel=1e-10)
    assert (score.accuracy, score.num_samples) == (expected.accuracy, cloudy.NUM_CLOUDS)


def test_the_share_of_right_answers_is_over_the_points_that_count(alone: RunResult) -> None:
    asked = sum(int((cloudy.cloud_sample(n)[1] != -100).sum()) for n in range(cloudy.NUM_CLOUDS))
    right = alone.scores[0].accuracy * asked
    assert right == pytest.approx(round(right), abs=1e-9)
    assert right > 0


def test_clouds_may_be_padded_to_other_lengths_in_each_batch(tmp_path: Path) -> None:
    stream = "tests.halopipe.cloudy:stream"
    found = [run_job(cloudy.plan(), tmp_path, steps=3, data=stream, data_from=way).losses for way in ("each", "first")]
    assert found[0] == found[1]


def test_a_run_goes_on_from_a_checkpoint_under_another_plan(tmp_path: Path) -> None:
    options = {"data": SITES, "optimizer": "Adam:lr=0.01"}
    whole = run_job(cloudy.plan(), tmp_path, steps=5, **options)
    saved = {**options, "checkpoint": str(tmp_path / "saved")}
    run_job(cloudy.plan(), tmp_path, steps=3, **saved)
    rest = run_job(cloudy.plan(**SHARED), tmp_path, steps=5, resume=True, **saved)
    assert rest.first_step == 3
    assert rest.losses == pytest.approx(whole.losses[3:], rel=1e-9)


def test_a_plan_of_two_processes_computes_what_one_device_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes 5 s: the ranks and the one that does it alone each capture the network, and train and evaluate it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    options = RunOptions(steps=5, warmup=1, check_numerics=True, dtype="float64", data=SITES, eval_data=SITES)
    result = run_plan(cloudy.plan(), options)
    assert result is not None
    assert result.numerics.num_steps == 5
    assert max(each.error for each in result.numerics.worst.values()) < 1e-10
    assert result.scores[0].num_samples == cloudy.NUM_CLOUDS


FAULTS = {
    "duplicate": "duplicate coordinates",
    "range": "coordinate y out of range",
    "nan": "NaN or infinite, the first of sample 0, point 3",
    "count": "number of points of a cloud",
    "metres": "dtype of coordinates",
    "points": "shapes of coordinates, features and counts",
}


def test_clouds_that_no_network_takes_are_refused_with_what_is_wrong_where() -> None:
    def refusals(execution: Execution) -> list[StageFailedError | None]:
        found = []
        for fault in FAULTS:
            clouds = Clouds(per_site=True, fault=fault)
            inputs, targets = default_collate([clouds[n] for n in range(4)])
            with pytest.raises(StageFailedError) as caught:
                execution.evaluate((tuple(inputs), targets))
            found.append(caught.value)
        return found

    (refused,) = together(cloudy.plan(cuts=[]), refusals)
    for error, said in zip(refused, FAULTS.values(), strict=True):
        assert said in error.title
        assert "rank 0 (n0/cpu0" in error.title
        assert "micro-batch 0" in error.title
        assert "found" in error.details[0]
        assert error.remedies


def test_a_rank_that_meets_such_clouds_later_is_not_waited_for(tmp_path: Path) -> None:
    with pytest.raises(StageFailedError, match="NaN or infinite"):
        run_job(cloudy.plan(), tmp_path, data="tests.halopipe.cloudy:nan_later", steps=3, deadline_s=5.0)


def test_clouds_of_other_features_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="features has shape"):
        run_job(cloudy.plan(cuts=[]), tmp_path, data="tests.halopipe.cloudy:channels", steps=1)


def test_one_device_tells_of_such_clouds_too(tmp_path: Path) -> None:
    job = Job(cloudy.plan(cuts=[]), RunOptions(steps=1, data="tests.halopipe.cloudy:nan"), tmp_path)
    with pytest.raises(ValueError, match="NaN") as caught:
        make_reference(job)
    told = read_error(write_error(caught.value))
    assert told.title.startswith("clouds cannot be used: features that are NaN")
    assert told.exit_code == 5
    assert told.remedies


@pytest.mark.parametrize("fault", ["duplicate", "nan"])
def test_an_example_that_no_network_takes_is_the_factorys_fault(fault: str) -> None:
    with pytest.raises(FactoryError, match="cloudy:broken"):
        load_model(ModelSource("tests.halopipe.cloudy:broken", {"fault": f'"{fault}"'}))


def test_a_step_takes_a_sparse_tensor_or_padded_clouds() -> None:
    samples = [cloudy.cloud_sample(n) for n in range(4)]
    padded = [torch.stack([sample[0][place] for sample in samples]) for place in range(2)]
    counts = torch.tensor([sample[0][2] for sample in samples])
    raw = (padded[0], padded[1].double(), counts), torch.stack([targets for _, targets in samples])
    clouds = [cloudy.cloud(n) for n in range(4)]
    tensor = cloudy.tensor_of([(coordinates, features.double()) for coordinates, features in clouds])
    targets = torch.cat([cloudy.site_targets(features) for _, features in clouds])

    def losses(execution: Execution) -> list[float | None]:
        scores = [execution.evaluate(batch).loss for batch in (raw, (tensor, targets))]
        return [*scores, execution.step(raw), execution.evaluate((tensor, targets)).loss]

    (first, second, trained, after), *_ = together(cloudy.plan(**SHARED), losses)
    assert first == second
    assert trained != after


def test_features_keep_a_dtype_of_their_own(tmp_path: Path) -> None:
    """Time stamps in float64, of which a network in float32 takes what is left when the epoch is gone."""
    plan = plan_of(ModelSource("tests.halopipe.cloudy:stamped"), [0.5], (4,))
    result = run_job(plan, tmp_path, steps=3, data="tests.halopipe.cloudy:stamped_stream", check_numerics=True)
    assert result.numerics is not None
    assert result.numerics.worst["loss"].error < 1e-5
    module, _, loss = cloudy.stamped()
    model = load_model(ModelSource("tests.halopipe.cloudy:stamped"))
    module.load_state_dict(model.module.user_module.state_dict())
    inputs, targets = next(cloudy.stamped_stream(4))
    coordinates, features, counts = inputs
    rows = [torch.cat([torch.full((n, 1), b), coordinates[b, :n]], 1).int() for b, n in enumerate(counts.tolist())]
    valid = [(features[b, :n], targets[b, :n]) for b, n in enumerate(counts.tolist())]
    x = SparseTensor(torch.cat([feats for feats, _ in valid]), torch.cat(rows))
    own = loss(module(x), torch.cat([target for _, target in valid])[x.order])
    assert result.losses[0] == pytest.approx(own.item(), rel=1e-5)


class Compared:
    """A metric that tells how much it was given."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, dtype=torch.float64)

    def update(self, prediction: torch.Tensor, target: torch.Tensor) -> None:
        assert len(prediction) == len(target)
        self.sums += torch.tensor([target.numel(), prediction.double().abs().sum(), 1])

    def compute(self) -> dict[str, float]:
        return dict(zip(("points", "sum", "calls"), self.sums.tolist(), strict=True))


def test_a_metric_is_given_what_the_loss_of_clouds_compares_under_every_plan() -> None:
    """Their output is a SparseTensor."""
    samples = [cloudy.cloud_sample(n) for n in range(4)]
    padded = [torch.stack([sample[0][place] for sample in samples]) for place in range(2)]
    counts = torch.tensor([sample[0][2] for sample in samples])
    raw = (padded[0], padded[1].double(), counts), torch.stack([targets for _, targets in samples])
    plans = cloudy.plan(cuts=[]), cloudy.plan(**SHARED)
    one, other = (together(plan, lambda run: run.evaluate(raw, metric=Compared).metrics)[0] for plan in plans)
    assert one == pytest.approx(other, rel=1e-10)
    assert one["points"] == sum(counts.tolist())
