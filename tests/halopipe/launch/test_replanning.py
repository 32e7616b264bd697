"""Jobs whose machines come and go: which devices count as gone, and the same curve under the plans that follow."""

from __future__ import annotations

import json
import runpy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn
from typer.testing import Result

from benchmarks.chains import chain_profile
from halopipe.launch.job_environment import JobRank
from halopipe.launch.replanning import (
    HOSTS,
    PLAN,
    Replanner,
    _assigned,
    absent,
    devices_there,
    lost_in_succession,
    replanner,
)
from halopipe.launch.restart import LostAttempt
from halopipe.launch.run import run_plan
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunProgress
from halopipe.training.rank_device import DeviceAssignment
from planner.ir import errors
from planner.ir.codec import dump, load
from planner.ir.plan import Plan
from planner.ir.profile import Profile
from tests.forks import forked
from tests.halopipe import commands, learners
from tests.halopipe.launch.jobs import places
from tests.halopipe.plans import profiled
from tests.halopipe.ranks import run_job
from tests.oracles.plans import check
from tests.planner.factories import chain_decision, plan_of

DATA = "tests.halopipe.learners:"
RECIPE = {"optimizer": "AdamW:lr=0.05", "scheduler": "StepLR:step_size=2", "data": f"{DATA}stream"}
STEPS = 8
SAVED = 4


@cache
def case(num_stages: int = 3, num_devices: int = 3) -> tuple[Plan, Profile]:
    cuts = [(stage + 1) / num_stages for stage in range(num_stages - 1)]
    return profiled(learners.plan(cuts), num_devices)


def loss(
    error: type[errors.HalopipeError] = errors.WorkerDiedError, *ranks: int, before: tuple[LostAttempt, ...] = ()
) -> LostAttempt:
    return LostAttempt(case()[0], len(before), error("lost"), ranks, 0, 0, before)


def own(**options: object) -> tuple[Replanner, list[str]]:
    """Of the job of three stages on three cores; what it says."""
    said: list[str] = []
    given = RunOptions(**{"replan": True, "restarts": 3, **options})
    return Replanner(*case(), given, said.append, num_cores=lambda: 3, num_gpus=lambda: 0), said


DIED = errors.WorkerDiedError
LATE = errors.DeadlineError
FAILED = errors.StageFailedError


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("losses", "after", "gone"),
    [
        ([(DIED, 2)], 1, {"n0/cpu2"}),
        ([(DIED, 2)], 2, set()),
        ([(DIED, 2), (LATE, 2)], 2, {"n0/cpu2"}),
        ([(DIED, 1), (DIED, 2)], 2, set()),
        ([(DIED, 1, 2), (DIED, 2)], 2, {"n0/cpu2"}),
        ([(FAILED, 2), (FAILED, 2)], 2, set()),
        ([(errors.OutOfMemoryError, 2)], 1, set()),
        ([(DIED, 1), (DIED, 2), (DIED, 2)], 2, {"n0/cpu2"}),
    ],
)
def test_a_device_is_gone_once_its_rank_was_lost_so_often_in_succession(
    losses: list[tuple[type[errors.HalopipeError], ...]], after: int, gone: set[str]
) -> None:
    found: tuple[LostAttempt, ...] = ()
    for error, *ranks in losses:
        found = (*found, loss(error, *ranks, before=found))
    assert lost_in_succession(found, after) == gone


def test_devices_that_a_host_has_no_more() -> None:
    cores = [DeviceAssignment(rank, f"n0/cpu{rank}") for rank in range(3)]
    assert absent(cores, 4, 4, lambda: 0) == []
    assert absent(cores, 4, 3, lambda: 0) == [], "each rank still has a core"
    assert absent(cores, 4, 2, lambda: 0) == ["n0/cpu2"]
    assert absent(cores, 2, 2, lambda: 0) == [], "so it was when the job began"
    gpus = [DeviceAssignment(0, "n0/gpu0", 0), DeviceAssignment(1, "n0/gpu3", 3)]
    assert absent(gpus, 4, 1, lambda: 3) == ["n0/gpu3"]
    assert absent(gpus, 4, 1, lambda: 4) == []


def test_a_loss_is_answered_by_the_same_plan_until_a_device_is_gone_and_by_the_first_when_it_is_back() -> None:
    given, said = own()
    first = loss(errors.WorkerDiedError, 1)
    assert given.decide(first) is None
    found = given.decide(loss(errors.WorkerDiedError, 1, before=(first,)))
    assert found is not None
    assert found is given.plan
    assert check(found, case()[1]) == ()
    assert {name for stage in found.decision.stages for name in stage.devices} == {"n0/cpu0", "n0/cpu2"}
    assert said[0].startswith("another plan without n0/cpu1: ")
    assert any("stages: 2 instead of 3" in line for line in said)

    cores = [3]
    given, said = own()
    given.num_cores = lambda: cores[0]
    assert given.decide(loss(errors.OutOfMemoryError, 0)) is None
    cores[0] = 2
    found = given.decide(loss(errors.OutOfMemoryError, 0))
    assert found is not None
    assert found.decision.num_ranks == 2
    assert given.decide(loss(errors.OutOfMemoryError, 0)) is None
    cores[0] = 3
    assert given.decide(loss(errors.OutOfMemoryError, 0)) is case()[0]
    cores[0] = 1
    with pytest.raises(errors.InfeasibleError, match="no plan fits without n0/cpu1, n0/cpu2"):  # it is to have 2 stages
        given.decide(loss(errors.OutOfMemoryError, 0))


def test_a_device_may_come_back_within_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halopipe.launch.replanning._POLL_S", 0.001)
    given, said = own(patience_s=30.0)
    cores = iter([3, 2, 2, 3])
    given.num_cores = lambda: next(cores)
    assert given.decide(loss(errors.OutOfMemoryError, 0)) is None
    assert given.decide(loss(errors.OutOfMemoryError, 0)) is None
    assert said == ["n0/cpu2 is gone; it may come back for 30.0 s"]


@dataclass(frozen=True)
class Slow:
    """What a watch says of a rank."""

    rank: int
    factor: float
    peer: int | None = None


@dataclass(frozen=True)
class At(RunProgress):
    slow: tuple[Slow, ...] = ()


def heard(given: Replanner, factor: float, steps: int, step_s: float) -> None:
    show = given.watching(None)
    for step in range(1, steps + 1):
        show(At(step, 10_000, 1.0, step_s, slow=(Slow(1, factor),)))
        if given._thread is not None:
            given._thread.join()


def test_a_straggler_ends_an_attempt_right_after_a_checkpoint_and_only_for_a_better_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = chain_profile(6, 3, forward_s=1e-3, activation_bytes=2**12)
    plan = plan_of(profile, chain_decision(profile, (2, 4), (1,) * 8))
    options = RunOptions(replan=True, restarts=1, checkpoint="saved", checkpoint_every=10, steps=10_000)
    looks = iter([(10,), (10,), (10, 20)])
    monkeypatch.setattr("runtime.checkpoint.complete_steps", lambda folder: next(looks))
    monkeypatch.setattr(Replanner, "_keep", lambda self: None)

    def given() -> Replanner:
        return Replanner(plan, profile, options, lambda line: None, num_cores=lambda: 3, num_gpus=lambda: 0)

    heard(given(), 1.1, 25, 0.05)  # no device is slow
    with pytest.raises(errors.WorkerError, match="another plan") as caught:
        heard(found := given(), 1.6, 25, 0.05)
    assert "n0/cpu1 at 62 % of its speed" in caught.value.details[0]
    decided = found.decide(LostAttempt(plan, 0, caught.value, (), 20, 21))
    assert decided is found.plan is not plan
    assert decided.inputs.request.speeds == {"n0/cpu1": 0.625}
    heard(found, 1.6, 25, 0.05)  # no restart is left


TWO_HOSTS = chain_profile(6, 4, hosts=("n0", "n0", "n1", "n1"))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("hosts", "known", "found"),
    [
        ([("a", 2), ("b", 2)], {}, [["n0/cpu0", "n0/cpu1"], ["n1/cpu2", "n1/cpu3"]]),
        ([("b", 2)], {"a": "n0", "b": "n1"}, [["n1/cpu2", "n1/cpu3"]]),
        ([("b", 2), ("a", 2)], {"a": "n0", "b": "n1"}, [["n1/cpu2", "n1/cpu3"], ["n0/cpu0", "n0/cpu1"]]),
        ([("c", 2)], {"a": "n0", "b": "n1"}, [["n0/cpu0", "n0/cpu1"]]),
        ([("a", 1), ("b", 2)], {}, [["n0/cpu0"], ["n1/cpu2", "n1/cpu3"]]),
        ([("a", 3), ("b", 2)], {}, [["n0/cpu0", "n0/cpu1"], ["n1/cpu2", "n1/cpu3"]]),
        ([("a", 2), ("b", 2), ("c", 2)], {}, [["n0/cpu0", "n0/cpu1"], ["n1/cpu2", "n1/cpu3"], []]),
        ([("a", 4)], {}, [["n0/cpu0", "n0/cpu1", "n1/cpu2", "n1/cpu3"]]),
        ([("a", 3)], {}, [["n0/cpu0", "n0/cpu1", "n1/cpu2"]]),
    ],
)
def test_which_devices_the_hosts_of_a_job_have(
    hosts: list[tuple[str, int]], known: dict[str, str], found: list[list[str]]
) -> None:
    decision = chain_decision(TWO_HOSTS, (2, 3, 4))
    assert devices_there(hosts, decision, TWO_HOSTS.cluster, known) == found


def test_a_host_that_does_not_come_is_planned_without_and_planned_with_again_when_it_joins(tmp_path: Path) -> None:
    plan = plan_of(TWO_HOSTS, chain_decision(TWO_HOSTS, (2, 3, 4)))
    said: list[str] = []
    given = Replanner(plan, TWO_HOSTS, RunOptions(replan=True, checkpoint=str(tmp_path / "saved")), said.append)

    def came(*names: str) -> dict[JobRank, str]:
        return {
            JobRank(2 * host + local, 2 * len(names), local, host=host): name
            for host, name in enumerate(names)
            for local in range(2)
        }

    whole = _assigned(given, came("b", "a"))
    assert (whole.plan, whole.planned_ranks) == (plan, {0: 0, 1: 1, 2: 2, 3: 3})
    assert json.loads((tmp_path / "saved" / HOSTS).read_text()) == {"b": "n0", "a": "n1"}
    left = _assigned(given, came("a"))
    assert {name for stage in left.plan.decision.stages for name in stage.devices} <= {"n1/cpu2", "n1/cpu3"}
    assert set(left.planned_ranks) <= {0, 1}
    assert load(tmp_path / "saved" / PLAN, Plan) == left.plan
    num_said = len(said)
    again = Replanner(plan, TWO_HOSTS, given.options, said.append)
    assert _assigned(again, came("a")) == left, "kept, not searched for again"
    assert said[num_said].startswith("another plan without n0/cpu0, n0/cpu1: ")
    back = _assigned(given, came("a", "b"))
    assert (back.plan, back.planned_ranks) == (plan, {2: 0, 3: 1, 0: 2, 1: 3})


@pytest.mark.parametrize(("num_stages", "num_ranks"), [(3, 2), (2, 3)])
def test_a_job_of_other_ranks_than_its_plan_goes_on_with_the_same_curve(
    tmp_path: Path, num_stages: int, num_ranks: int
) -> None:
    plan, profile = case(num_stages, 3)
    saved = str(tmp_path / "saved")
    whole = run_job(learners.plan([]), tmp_path, **RECIPE, steps=STEPS)
    run_job(plan, tmp_path, **RECIPE, steps=SAVED, checkpoint=saved)
    asked = {"checkpoint": saved, "resume": True, "replan": True, "warmup": 0, "check_first_step": False}
    options = RunOptions(**RECIPE, steps=STEPS, **asked)

    def work(rank: int) -> tuple[list[float], int, list[str]]:
        said: list[str] = []
        given = Replanner(plan, profile, options, said.append)
        result = run_plan(plan, options, replanner=given)
        return [] if result is None else list(result.losses), given.plan.decision.num_ranks, said

    places_of = places(num_ranks, LOCAL_WORLD_SIZE=str(num_ranks))
    (losses, num_used, said), *others = forked(num_ranks, work, places_of)
    assert losses == pytest.approx(whole.losses[SAVED:], rel=1e-10)
    assert num_used == 2
    assert others == [([], 2, [])] * (num_ranks - 1)
    if num_ranks < num_stages:
        assert said[0].startswith("another plan without n0/cpu2: ")
    else:
        assert said == ["1 rank of the job has nothing to do: [2]"]


def done(text: str) -> Result:
    result = commands.call(*text.split())
    assert result.exit_code == 0, result.stderr
    return result


def test_a_lost_device_is_planned_without_and_the_curve_is_that_of_an_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan, profile = case()
    dump(plan, "plan.json")
    dump(profile, "profile.json")
    recipe = f"--optimizer {RECIPE['optimizer']} --scheduler {RECIPE['scheduler']} --data {DATA}deadly"
    losses = "--checkpoint saved --checkpoint-every 2 --replan --restarts 1 --gone-after 1"
    found = done(f"run plan.json --steps {STEPS} {recipe} {losses} --no-check-first-step --json")
    assert (tmp_path / "died").exists()
    whole = run_job(learners.plan([]), tmp_path, **RECIPE, steps=STEPS)
    assert json.loads(found.stdout)["losses"] == pytest.approx(whole.losses, rel=1e-10)
    assert "another plan without n0/cpu" in found.stderr
    now = load("saved/plan.json", Plan)
    assert (now.decision.num_ranks, check(now, profile)) == (2, ())
    assert load("plan.json", Plan) == plan


NAPS = """
import os, time
import torch
from torch import nn

def nap(x):
    slow = os.path.exists("slow") and os.readlink("/proc/self/fd/1").endswith("output-1.txt")
    time.sleep((12e-3 if slow else 3e-3) * len(x))
    return x.clone()

naps = torch.library.custom_op("halopipe_tests::naps", nap, mutates_args=(), schema="(Tensor x) -> Tensor")
naps.register_fake(torch.empty_like)
naps.register_autograd(lambda ctx, gradient: naps(gradient))

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        with torch.no_grad():
            self.linear.weight.copy_(torch.linspace(-1, 1, 16).view(4, 4))
            self.linear.bias.zero_()

    def forward(self, x):
        return torch.tanh(naps(self.linear(x)))

def model():
    return nn.Sequential(*(Layer() for _ in range(6))), (torch.ones(8, 4).double(),) * 2, nn.MSELoss()

def data(global_batch):
    generator = torch.Generator().manual_seed(1)
    while True:
        yield tuple(torch.rand((2, global_batch, 4), generator=generator, dtype=torch.float64))
"""


@pytest.mark.exhaustive("70 s: it profiles, and each step sleeps; what is decided is tested above")
def test_a_rank_that_is_slower_than_planned_is_given_less_and_the_curve_is_that_of_one_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("naps.py").write_text(NAPS)
    done("profile naps.py:model --quick --dtype float64")
    done("plan profile.json --schedule 1f1b --micro-batch 2")
    assert load("plan.json", Plan).decision.num_ranks == 2
    Path("slow").touch()
    job = "run plan.json --data naps.py:data --optimizer SGD:lr=0.1 --steps 80 --no-check-first-step --json"
    found = done(f"{job} --checkpoint saved --checkpoint-every 5 --replan --restarts 3")
    assert "rank 1 is slow: " in found.stderr
    assert "another plan with n0/cpu1 at " in found.stderr
    told = json.loads(found.stdout)
    reasons = [each["error"] for each in told["restarts"]]
    assert set(reasons) == {"the job goes on under another plan"}
    assert len(reasons) <= 2, "the speed that the first steps show may be mended once"
    speed = load("saved/plan.json", Plan).inputs.request.speeds["n0/cpu1"]
    assert 0.15 < speed < 0.6, "a step of a rank has more in it than its naps, four times as long"
    Path("slow").unlink()
    assert told["losses"] == pytest.approx(_alone(80), rel=1e-10)
    assert median(told["step_seconds"][-20:]) < 0.75 * median(told["step_seconds"][:20])


def _alone(steps: int) -> list[float]:
    """The same network without its naps, by torch alone."""
    found = runpy.run_path("naps.py")
    module, _, loss_fn = found["model"]()
    parts = [part for layer in module for part in (layer.linear, nn.Tanh())]
    network = nn.Sequential(*parts)
    losses = list[float]()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for _, (inputs, targets) in zip(range(steps), found["data"](8), strict=False):
        optimizer.zero_grad()
        loss = loss_fn(network(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_what_a_job_must_have_to_plan_again() -> None:
    plan, profile = case()
    asked = RunOptions(replan=True, restarts=1)
    once = RunOptions(replan=True)
    assert replanner(plan, profile, RunOptions()) is None
    with pytest.raises(errors.UsageError, match="needs the profile that the plan was made from"):
        replanner(plan, None, asked)
    with pytest.raises(errors.UsageError, match="--replan needs --restarts"):
        run_plan(plan, once, replanner=replanner(plan, profile, once))
