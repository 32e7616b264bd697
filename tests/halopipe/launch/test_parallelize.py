"""A module trained from a plain script: ranks are processes of this host, which the test calls as a script does."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import halopipe as hp
from benchmarks.chains import chain_profile
from halopipe.api import running
from halopipe.data.ahead import Upcoming
from halopipe.launch import parallelize
from halopipe.launch.job_environment import JobRank
from halopipe.launch.script_rank import ScriptCall
from halopipe.training.optimizer_spec import spec_of
from planner.ir.errors import InfeasibleError, MissingFileError, UsageError, WorkerError
from planner.ir.profile import ModelSource, Optimizer
from profiler.source.source import load_model
from runtime.numerics.compare import NumericsReport
from runtime.optim.followed import Followed
from tests.halopipe import learners
from tests.halopipe.plans import plan_of

HOME = Path(__file__).resolve().parents[3]
SOURCE = ModelSource("tests.halopipe.learners:classifier", {"dropout": "0.0"}, (4, learners.WIDTH), "float64")


def batch(step: int, rows: int = 6) -> tuple[Tensor, Tensor]:
    inputs, targets = learners.samples()
    return inputs[step : step + rows].double(), targets[step : step + rows]


def adamw(module: nn.Module) -> tuple[torch.optim.Optimizer, lr_scheduler.LRScheduler]:
    """Two groups, and a schedule that no text describes."""
    weights = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    biases = [parameter for parameter in module.parameters() if parameter.ndim == 1]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights, "betas": (0.5, 0.9)}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)
    return optimizer, lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))


class Bomb:
    """What the ranks cannot read."""

    def __reduce__(self) -> tuple[object, ...]:
        return divmod, (1, 0)


def one_step(
    network: nn.Module, optimizer: torch.optim.Optimizer, schedule: lr_scheduler.LRScheduler, at: int
) -> float:
    """What one device does; its loss."""
    optimizer.zero_grad()
    inputs, targets = batch(at)
    loss = nn.functional.cross_entropy(network(inputs), targets)
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss.item()


def require_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-10, atol=1e-12)


def test_a_module_is_trained_from_a_script_as_in_its_own_loop(tmp_path: Path) -> None:
    """Starts two processes, once for all that is asked of a run; they load torch: 8 s."""
    module = load_model(SOURCE).module
    with torch.no_grad():
        module[0].weight.mul_(1.5)  # the ranks begin with the script's weights, not with the factory's
    twin = copy.deepcopy(module)
    optimizer, schedule = adamw(module)
    own, own_schedule = adamw(twin)
    plan = plan_of(SOURCE, [0.5], (3, 3))
    with hp.parallelize(module, plan=plan, optimizer=optimizer, scheduler=schedule) as run:
        losses = [run.step(each) for each in run.ahead(map(batch, range(2)))]
        run.save(tmp_path)
        losses.append(run.step([batch(2, 3), batch(5, 3)]))  # the same samples, its micro-batches one by one
        assert losses == pytest.approx([one_step(twin, own, own_schedule, step) for step in range(3)], rel=1e-10)
        assert schedule.get_last_lr() == own_schedule.get_last_lr()
        kept = run.optimizer_state_dict()
        of_twin = {name: own.state[parameter] for name, parameter in twin.named_parameters()}
        assert kept["state"].keys() == of_twin.keys()
        for name, each in of_twin.items():
            for entry, value in each.items():
                torch.testing.assert_close(kept["state"][name][entry], value, rtol=1e-10, atol=1e-12)
        assert {tuple(group["betas"]) for group in kept["param_groups"]} == {(0.9, 0.999), (0.5, 0.9)}
        require_close(run.state_dict(), twin.state_dict())
        require_close(run.module.state_dict(), twin.state_dict())
        with torch.no_grad():
            expected = nn.functional.cross_entropy(twin(batch(4)[0]), batch(4)[1])
        assert run.evaluate(batch(4)).loss == pytest.approx(expected.item(), rel=1e-10)
        inputs, targets = batch(0)
        for refused, text in (
            (batch(0, 7), "a batch has 7 samples"),
            ((inputs.float(), targets), r"of torch\.float32, the model was captured with torch\.float64"),
            ((inputs, torch.full((6,), 5)), r"targets holds 5, and layer loss has 3 classes[\s\S]*sample 0, of the 6"),
        ):
            with pytest.raises(UsageError, match=text):  # and the run goes on
                run.step(refused)
        with pytest.raises(MissingFileError, match="has no complete checkpoint"):  # a typo ends no training
            run.load(tmp_path / "nowhere")
        with pytest.raises(MissingFileError, match="cannot write into"):
            run.save("/proc/nowhere")
        module[2].p = 0.5
        with pytest.raises(UsageError, match=r"p of 2: 0\.0 then, 0\.5 now"):
            run.step(batch(0))
        module[2].p = 0.0
        module.load_state_dict(twin.state_dict())
        with pytest.raises(UsageError, match="which the ranks do not see"):
            run.step(batch(0))
        assert run.load(tmp_path) == run.num_steps == 2
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 3)
        assert run.step(batch(2)) == pytest.approx(losses[2], rel=1e-10)
        run.load_state_dict(twin.state_dict())
        assert run.evaluate(batch(4)).loss == pytest.approx(expected.item(), rel=1e-10)
        run.load_optimizer_state_dict(kept)
        assert run.num_steps == 3
        one_step(twin, own, own_schedule, 3)
        run.step(batch(3))
        require_close(run.state_dict(), twin.state_dict())
        with pytest.raises(UsageError, match="not the state of an optimiser"):
            run.load_optimizer_state_dict({"state": {}})
        with pytest.raises(WorkerError, match="ZeroDivisionError") as caught:
            run.step(Bomb())
        assert "on rank" in str(caught.value)
        with pytest.raises(UsageError, match="this run is over"):
            run.step(batch(0))
    assert optimizer.state == {}  # of a run that failed nothing comes, neither weights nor this


def test_one_optimiser_goes_through_a_checkpoint_two_runs_and_a_loop_as_on_one_device() -> None:
    """Starts two processes twice: 4 s."""
    twin = load_model(SOURCE).module
    own, own_schedule = adamw(twin)
    one_step(twin, own, own_schedule, 0)
    module = copy.deepcopy(twin)
    optimizer, schedule = adamw(module)
    optimizer.load_state_dict(copy.deepcopy(own.state_dict()))
    schedule.load_state_dict(own_schedule.state_dict())
    plan = plan_of(SOURCE, [0.5], (3, 3))
    with hp.parallelize(module, plan=plan, optimizer=optimizer, scheduler=schedule) as run:
        run.step(batch(1))
        counts = [int(kept["step"]) for kept in optimizer.state_dict()["state"].values()]
        assert counts == [2] * 4  # as a script's own checkpoint has it
    with hp.parallelize(module, plan=plan, optimizer=optimizer, scheduler=schedule, accumulate=2) as run:
        run.step(batch(2))
        run.step(batch(2))
        run.step(batch(5))  # of an update that never comes
    one_step(module, optimizer, schedule, 3)
    for step in (1, 2, 3):
        one_step(twin, own, own_schedule, step)
    require_close(module.state_dict(), twin.state_dict())
    assert schedule.get_last_lr() == own_schedule.get_last_lr()


def test_what_cannot_be_kept_is_refused_before_anything_is_started() -> None:
    plan = plan_of(SOURCE, [0.5], (3, 3))
    module = load_model(SOURCE).module
    with pytest.raises(UsageError, match="parameters that are not the model's"):
        hp.parallelize(module, plan=plan, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    with pytest.raises(UsageError, match="an optimiser object is made of the parameters of a module"):
        hp.parallelize(SOURCE.factory, plan=plan, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="device 'nowhere' cannot be used"):
        hp.parallelize(module, plan=plan, device="nowhere")
    with pytest.raises(UsageError, match="a job on several hosts needs a plan"):
        parallelize.parallelize(module, None, None, "SGD", None, None, lambda: None, {}, JobRank(0, 2, num_hosts=2))


@pytest.mark.parametrize("quiet", [False, True])
def test_a_loop_that_looks_ahead_tells_the_ranks_the_batch_behind_the_one_they_train_on(
    quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what the comparison of the first step came to is said once, if at all."""
    run = object.__new__(parallelize.Parallel)
    done: list[tuple[object, ...]] = []

    def train_before(*batches: object) -> SimpleNamespace:
        done.append(batches)
        return SimpleNamespace(loss=0.5)

    numerics = NumericsReport("float64", 1, 3, {})
    execution = SimpleNamespace(
        train_before=train_before, has_updated=True, num_steps=1, followed=None, numerics=numerics
    )

    def call(do: Callable[..., object], *given: object, settings: None) -> dict[str, object]:
        return ScriptCall(do, given, {}, settings, is_written=False).done(execution, Path())

    run._followed = None
    run._upcoming = Upcoming(True)
    run._own = None
    run._is_quiet = quiet
    run.plan = SimpleNamespace(inputs=SimpleNamespace(model=SOURCE))
    run.ranks = SimpleNamespace(call=call)
    assert [run.step(batch) for batch in run.ahead("abc")] == [0.5] * 3
    assert done == [("a", "b"), ("b", "c"), ("c",)]
    assert run.step("d") == 0.5
    assert done[-1] == ("d",)
    assert capsys.readouterr().err.count("numerics: as one device over the first step in float64\n") == (not quiet)


def test_an_optimiser_whose_state_no_process_can_tell_another_is_refused_in_a_second_run() -> None:
    module = nn.Linear(2, 2)
    run = object.__new__(parallelize.Parallel)
    run._followed = Followed(torch.optim.SGD(module.parameters()))
    run._kept_of = 0
    run.num_steps = 3

    def call(*_: object, **__: object) -> None:
        raise UsageError("SGD keeps a dict (seen) for weight, which cannot be saved")

    run.ranks = SimpleNamespace(call=call, is_alive=True, folder=Path())
    run._fetch_kept()
    with pytest.raises(UsageError, match=r"stayed with the ranks of an earlier run[\s\S]*keeps a dict \(seen\)"):
        Followed(run._followed.optimizer)


def test_in_a_job_of_torchrun_rank_0_plans_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    plan = plan_of(SOURCE, [0.5], (3, 3))
    monkeypatch.setattr(parallelize, "job_stores", lambda rank, num_ranks: (store, store))
    monkeypatch.setattr(
        parallelize, "joined", lambda rank, *_, **__: SimpleNamespace(plan=rank.plan, rank=rank.context.rank)
    )

    def join(rank: int, make_plan: Callable[[], object]) -> object:
        job = JobRank(rank, 2)
        return parallelize.parallelize(nn.Linear(2, 2), None, None, "SGD", None, None, make_plan, {}, job)

    runs = [join(rank, lambda: ("its profile", plan)) for rank in range(2)]
    assert [(run.rank, run.plan, run.profile) for run in runs] == [(0, plan, "its profile"), (1, plan, None)]

    def fail() -> object:
        raise InfeasibleError("no plan fits")

    for rank in range(2):
        with pytest.raises(InfeasibleError, match="no plan fits"):
            join(rank, fail)


def test_a_plan_is_made_of_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}
    profile = object()
    plan = plan_of(SOURCE, [], (3,))

    def measured(module: object, example: object, **others: object) -> object:
        asked.update(others, example=example)
        return profile

    def started(*given: object, quiet: bool) -> object:
        asked["told quiet"] = quiet
        return given[6]()

    monkeypatch.setattr("halopipe.api.plans.profile", measured)
    monkeypatch.setattr(
        "halopipe.api.plans.plan", lambda found, global_batch, batch_statistics, quiet: (found, quiet, plan)[-1]
    )
    monkeypatch.setattr("halopipe.launch.parallelize.parallelize", started)
    module = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.25, betas=(0.5, 0.75))
    assert hp.parallelize(module, batch(0), devices=2, optimizer=optimizer, global_batch=6) == (profile, plan)
    assert (asked["cluster"], asked["quick"], asked["quiet"], asked["told quiet"]) == (2, True, False, False)
    assert asked["optimizer"] == Optimizer("AdamW", {"lr": 0.25, "betas": (0.5, 0.75)}, 2.0)


def test_an_optimiser_of_ones_own_is_planned_by_the_state_that_it_keeps() -> None:
    made = spec_of(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    assert made == replace(spec_of("AdamW"), state_bytes_per_parameter_byte=0.0)
    parameters = [nn.Parameter(torch.zeros(2))]
    assert spec_of(torch.optim.SGD(parameters, lr=0.1, nesterov=True, momentum=0.5)) == Optimizer(
        "SGD", {"lr": 0.1, "momentum": 0.5, "nesterov": True}, 1.0
    )
    assert spec_of(torch.optim.SGD(parameters)) == Optimizer("SGD", {"lr": 0.001}, 0.0)


SCRIPT = """
import json, torch
import halopipe as hp

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))

torch.manual_seed(0)
net, x, y = Net(), torch.randn(4, 5), torch.randint(3, (4,))
with hp.parallelize(net, (x, y), loss_fn=torch.nn.functional.cross_entropy, optimizer="SGD:lr=0.5") as run:
    losses = [run.step((x, y)) for _ in range(3)]
print(json.dumps([losses, torch.nn.functional.cross_entropy(net(x), y).item()]))
"""


@pytest.mark.exhaustive("profiles in processes of its own: 20 s; its parts are tested one by one")
def test_a_plain_script_needs_no_guard(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(SCRIPT)
    command = [sys.executable, "plain.py"]
    found = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(HOME)}, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    losses, last = json.loads(found.stdout)
    assert losses[0] > losses[1] > losses[2] > last


IN_A_JOB = """
import json
import torch
from torch import nn
import halopipe as hp

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)).double()
batch = torch.randn(8, 12, dtype=torch.float64), torch.arange(8) % 3
optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
losses = []
with hp.parallelize(network, batch, loss_fn=nn.functional.cross_entropy, optimizer=optimizer) as run:
    for _ in range(4):
        losses.append(run.step(batch))
        scheduler.step()
    losses.append(run.evaluate(batch).loss)
    run.save("kept")
    losses.append(run.step(batch))
    run.load("kept")
    losses.append(run.step(batch))
    print(json.dumps([run.num_ranks, losses, run.state_dict()["2.bias"].tolist()]), flush=True)
"""


@pytest.mark.exhaustive("two processes of torchrun, one of which profiles: half a minute")
@pytest.mark.timeout(600)
def test_a_script_of_torchrun_trains_on_all_its_processes_as_in_its_own_loop(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(IN_A_JOB)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "job.py"]
    environment = {**os.environ, "PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.replace("][", "]\n[").splitlines()  # two processes may write into one line
    told = [json.loads(line) for line in lines if line.startswith("[")]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    inputs = torch.randn(8, 12, dtype=torch.float64)
    targets = torch.arange(8) % 3
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    scheduler = lr_scheduler.StepLR(optimizer, 2)
    expected = []
    for step in range(5):
        loss = nn.functional.cross_entropy(network(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step < 4:
            scheduler.step()
        expected.append(loss.item())
    expected += expected[-1:] * 2  # evaluated, and a step after loading: both with the weights of the fifth
    assert len(told) == 2
    for num_ranks, losses, bias in told:
        assert num_ranks == 2
        assert losses == pytest.approx(expected, rel=1e-10)
        assert bias == pytest.approx(network[2].bias.tolist(), rel=1e-10)


def test_a_plan_for_fewer_devices_than_the_job_has_processes_is_made_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    profile = chain_profile(3)
    best = hp.plan(profile, global_batch=8, num_ranks=1)
    found = running._on_all(profile, best, 2, "micro")
    assert found.decision.num_ranks == 2
    assert "on 1 device" in capsys.readouterr().err
    assert running._on_all(profile, found, 2, "micro") is found
