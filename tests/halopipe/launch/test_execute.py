"""A rank in a script of one's own, which trains as one device does, and where a step of several ranks went.

rank 0   0F0 |--| 0SEND |-|            0RECV |------------|  0B0 |---|  0UPDATE |-|
rank 1            1RECV |---------|  1F0 |--| 1B0 |--| 1SEND |-|        1UPDATE |-----|
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.chains import chain_profile
from halopipe.launch import execute
from halopipe.launch.combine import ranks_measured, stage_medians, stage_once_s
from planner.ir.codec import dump
from planner.ir.errors import RankCountError, StaleFileError, UsageError
from planner.ir.plan import Decision, Plan
from planner.ir.profile import ModelSource, Optimizer
from planner.ir.schedule import Op
from planner.ir.timeline import Span, Timeline
from profiler import load_model
from profiler.capture.graph import capture
from runtime.numerics.single_device import serial_step
from tests.halopipe import cloudy
from tests.halopipe.launch.jobs import places
from tests.planner.factories import chain_decision, plan_of
from tests.processes import Program

NUM_STEPS = 3
MODEL = """
import torch

def make(width=6):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))
    return module, (torch.randn(4, 5), torch.randint(3, (4,))), torch.nn.functional.cross_entropy
"""
SCRIPT = f"""
import json, torch
import halopipe as hp
from model import make
from planner.ir.codec import load
from planner.ir.plan import Plan

model, (inputs, targets), loss_fn = make()
model, inputs = model.double(), inputs.double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = dict(example=(inputs, targets), scheduler="StepLR:step_size=1,gamma=0.5", clip_norm=0.5)
with hp.execute(load("plan.json", Plan), model, loss_fn, optimizer, **options) as engine:
    losses = [engine.step((inputs, targets)) for _ in range({NUM_STEPS})]
    score = engine.evaluate((inputs, targets), (inputs[:3], targets[:3]))
    engine.save("saved")
    engine.step((inputs, targets))
    again = engine.load("saved")
    same = engine.evaluate((inputs, targets), (inputs[:3], targets[:3])) == score
    compared = engine.numerics.num_tensors, engine.numerics.witness
    print(json.dumps([engine.rank, losses, sorted(engine.state_dict()), score.num_samples, again, same, compared]))
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan of two stages for the model above, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(SCRIPT)
    source = ModelSource("model.py:make", dtype="float64")
    graph = capture(load_model(source)).graph
    profile = replace(chain_profile(1), graph=graph, model=source, optimizer=Optimizer("SGD", {"lr": 0.1}))
    made = plan_of(profile, chain_decision(profile, cuts=(2,), micro_batches=(2, 2)))
    dump(made, "plan.json")
    return made


class Clipping(torch.optim.SGD):
    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.5)
        super().step()


def serial_losses(plan: Plan) -> list[float]:
    model = load_model(plan.inputs.model)
    optimizer = Clipping(model.module.parameters(), lr=0.1)
    micro_batches = plan.decision.micro_batches
    losses = []
    for _ in range(NUM_STEPS):
        losses.append(serial_step(model.loss, optimizer, model.inputs, model.targets, micro_batches))
        optimizer.param_groups[0]["lr"] /= 2
    return losses


def ended_ranks(folder: Path) -> list[tuple[int, str, str]]:
    """Of two ranks of the script the exit code, and what they print to both streams."""
    ranks = [Program.start(folder / "train.py", **place) for place in places(2)]
    return [rank.end() for rank in ranks]


def run_ranks(folder: Path) -> list[Any]:
    """What each of two ranks of the script prints."""
    ended = ended_ranks(folder)
    assert [code for code, _, _ in ended] == [0, 0], ended
    return [json.loads(stdout) for _, stdout, _ in ended]


@pytest.mark.exhaustive("two ranks more")
def test_ranks_that_build_their_model_from_other_seeds_are_refused(plan: Plan, tmp_path: Path) -> None:
    """Before, they trained a model that nobody had built."""
    text = MODEL.replace("torch.manual_seed(0)", "import os; torch.manual_seed(int(os.environ['RANK']))")
    (tmp_path / "model.py").write_text(text)
    ended = ended_ranks(tmp_path)
    assert 0 not in [code for code, _, _ in ended]
    assert "rank 1 begins with other values of 0.bias than rank 0" in ended[1][2]
    assert "rank 0: sha256:" in ended[1][2]


def test_a_script_of_ones_own_trains_as_one_device_does(plan: Plan, tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path)
    compared = [4, "the user's module on the whole batch"]
    names = ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert first == [0, second[1], names, 7, NUM_STEPS, True, compared]
    assert second[2:] == first[2:]
    assert second[1] == pytest.approx(serial_losses(plan), rel=1e-10)


def test_a_sparse_example_or_module_takes_the_place_of_the_factorys() -> None:
    made = cloudy.plan(cuts=[])
    network = cloudy.Segmenter().double()
    by_module = execute.loaded_of_script(made, network, None, None)
    assert by_module.module.user_module is network
    assert by_module.loss(*by_module.fed).isfinite()
    example = cloudy.tensor_of([cloudy.cloud(n) for n in range(3)]).double(), torch.zeros(3, dtype=torch.int64)
    by_example = execute.loaded_of_script(made, None, lambda output, targets: output.feats.square().mean(), example)
    assert by_example.samples == 3
    assert by_example.clouds.preparation.per_site == (False,)
    assert capture(by_module).graph == capture(load_model(made.inputs.model)).graph


def test_a_process_that_is_no_rank_is_told_the_command(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="no rank of a job") as caught:
        execute.execute(plan)
    assert caught.value.remedies[0] == "torchrun --nproc-per-node 2 your_script.py"
    for name, value in places(3)[0].items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankCountError, match="the plan is for 2 ranks, the job has 3"):
        execute.execute(plan)


def test_another_model_than_the_planned_one_is_refused(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(execute, "job_stores", lambda rank, num_ranks: (dist.HashStore(), dist.HashStore()))
    wider = replace(plan.inputs.model, arguments={"width": "7"})
    with pytest.raises(StaleFileError, match="made for another model") as caught:
        execute.execute(replace(plan, inputs=replace(plan.inputs, model=wider)))
    assert "their names are the same: sizes differ" in caught.value.details[-1]
    layers = {f"{name}x" if name == "loss" else name: each for name, each in plan.decision.layers.items()}
    with pytest.raises(StaleFileError) as caught:
        execute.execute(
            replace(plan, decision=replace(plan.decision, layers=layers), inputs=replace(plan.inputs, model=wider))
        )
    assert caught.value.details[2:] == ("only in the plan: lossx", "only here: loss")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"model": torch.nn.Linear}, "Linear is a class, not a module"),
        ({"model": 3}, "a int is no model"),
        ({"optimizer": 3}, "optimizer is 3, of type int"),
    ],
)
def test_what_is_no_module_or_optimiser_is_refused_before_the_others_are_met(
    plan: Plan, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        execute.execute(plan, **given)


def test_an_optimiser_is_made_of_text_function_or_object_and_a_schedule_is_its(plan: Plan) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    named = execute._makers(plan, "Adam:lr=0.25", [])[0]([weight])
    assert (type(named), named.param_groups[0]["lr"]) == (torch.optim.Adam, 0.25)
    function = execute._makers(plan, lambda parameters: torch.optim.SGD(parameters, lr=0.2), [])[0]
    assert function([weight]).param_groups[0]["lr"] == 0.2
    assert execute._makers(plan, None, [])[0]([weight]).param_groups[0]["lr"] == 0.1
    ours, other, no_rate = (torch.optim.SGD([weight], lr=lr) for lr in (0.1, 0.1, float("nan")))
    schedule = torch.optim.lr_scheduler.StepLR(ours, 1)
    assert execute._makers(plan, ours, [schedule])[0].schedules.optimizer is ours
    with pytest.raises(UsageError, match="belongs to an optimiser object, and another optimiser is used"):
        execute._makers(plan, "SGD", [schedule])
    with pytest.raises(UsageError, match="was made on another optimiser"):
        execute._makers(plan, other, [schedule])
    with pytest.raises(UsageError, match="lr=nan: a number that is finite is needed"):
        execute._makers(plan, no_rate, [])[0]


def test_a_device_is_one_of_this_process() -> None:
    assert [execute._device(each) for each in ("", "cpu", torch.device("cpu"), "cpu:0")] == ["", "cpu", "cpu", "cpu"]
    for wrong in ("gpu", "cuda:99"):
        with pytest.raises(UsageError, match="cannot be used"):
            execute._device(wrong)


def step(*spans: tuple[int, str, float, float], step_s: float) -> Timeline:
    return Timeline("measured", step_s, tuple(Span(*span) for span in spans))


def pipeline() -> Decision:
    return chain_decision(chain_profile(2), (1,), (2,))


PIPELINE = step(
    (0, "0F0", 0.0, 2.0),
    (0, "0SEND_F0>1", 2.0, 2.5),
    (0, "0RECV_B0<1", 2.5, 9.0),
    (0, "0B0", 9.0, 12.0),
    (0, "0UPDATE", 12.0, 13.0),
    (1, "1RECV_F0<0", 0.0, 3.0),
    (1, "1F0", 3.0, 5.0),
    (1, "1B0", 5.0, 8.0),
    (1, "1SEND_B0>0", 8.0, 8.5),
    (1, "1UPDATE", 8.5, 11.0),
    step_s=14.0,
)


def test_a_receive_waits_for_another_rank_until_it_sends_then_for_the_message() -> None:
    first, second = ranks_measured([PIPELINE], pipeline())
    assert (first.compute_s, first.communication_s, first.bubble_s, first.idle_s) == pytest.approx((6.0, 1.5, 5.5, 1.0))
    assert (second.compute_s, second.communication_s, second.bubble_s) == pytest.approx((7.5, 1.5, 2.0))
    assert second.idle_s == pytest.approx(3.0)
    assert ranks_measured([PIPELINE, PIPELINE], pipeline()) == (first, second)
    assert ranks_measured([], pipeline()) == ()
    assert stage_once_s([PIPELINE], pipeline(), Op.UPDATE) == pytest.approx((1.0, 2.5)), "that of the slowest rank"
    assert stage_once_s([PIPELINE], pipeline(), Op.REDUCE_GRAD) == (0.0, 0.0)


def test_a_sum_counts_from_when_its_last_rank_is_there() -> None:
    replicas = chain_decision(chain_profile(2), (), (2,), ranks=[(0, 1)], shares=[(1, 1)])
    found = step((0, "0REDUCE_GRAD", 1.0, 4.0), (1, "0REDUCE_GRAD", 2.5, 4.5), step_s=5.0)
    assert stage_once_s([found], replicas, Op.REDUCE_GRAD) == pytest.approx((2.0,))
    first, second = ranks_measured([found], replicas)
    assert (first.communication_s, second.communication_s) == pytest.approx((1.5, 2.0))
    assert (first.bubble_s, first.idle_s) == pytest.approx((2.5, 1.0))


def test_stage_medians_are_per_micro_batch_and_halves_add_up() -> None:
    spans = [("0F0", 0, 1), ("0F1", 1, 4), ("0F2", 4, 6), ("1I0", 0, 2), ("1W0", 2, 3), ("0SEND_F0>1", 0, 9)]
    timelines = [step(*((0, *span) for span in spans), step_s=1.0)]
    assert stage_medians(timelines, 2, (Op.FORWARD,)) == (2, 0)
    assert stage_medians(timelines, 2, (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)) == (0, 3)
