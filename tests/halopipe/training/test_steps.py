"""What a step does, in which order, and that it is the same whoever has it done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import halopipe as hp
from halopipe.training.optimizer_spec import make_scheduler_of, parse_scheduler
from halopipe.training.session import Execution
from halopipe.training.steps import RankSteps
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from runtime.checkpoint import Checkpoint, whole_state_dict
from runtime.engine import StepResult
from tests.halopipe import learners
from tests.halopipe.plans import plan_of
from tests.halopipe.ranks import run_job
from tests.halopipe.training.sessions import batch, together

SOURCE = ModelSource("tests.halopipe.learners:classifier", {"dropout": "0.3"}, (4, learners.WIDTH), "float64")
OPTIMIZER, SCHEDULER, NUM_STEPS = "AdamW:lr=0.05", "StepLR:step_size=1,gamma=0.5", 4
OPTIONS = {"clip_norm": 0.5, "accumulate": 2, "seed": 3}


def given(global_batch: int, input_shape: tuple[int, ...], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a run, as a script gives them; the last one is smaller."""
    return map(sized, range(NUM_STEPS))


def sized(step: int) -> tuple[Tensor, Tensor]:
    return batch(6 if step < NUM_STEPS - 1 else 5, step)


def by_run(plan: Plan, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    texts = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER, "data": f"{__name__}:given", "steps": NUM_STEPS}
    losses = run_job(plan, folder, checkpoint=str(folder / "saved"), **texts, **OPTIONS).losses
    return list(losses), whole_state_dict(Checkpoint.open(folder / "saved"))


def by_script(plan: Plan, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    def train(execution: Execution) -> tuple[list[float], dict[str, Tensor]]:
        return [execution.step(sized(step)) for step in range(NUM_STEPS)], execution.state_dict()

    scheduler = make_scheduler_of(parse_scheduler(SCHEDULER))
    return together(plan, train, text=OPTIMIZER, scheduler=scheduler, **OPTIONS)[0]


def by_parallelize(plan: Plan, folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    module = load_model(plan.inputs.model, OPTIONS["seed"]).module
    with hp.parallelize(module, plan=plan, optimizer=OPTIMIZER, scheduler=SCHEDULER, **OPTIONS) as run:
        return [run.step(sized(step)) for step in range(NUM_STEPS)], run.state_dict()


@pytest.mark.parametrize("drive", [by_script, by_parallelize])
def test_whoever_drives_the_steps_they_give_the_same_to_the_last_bit(drive: object, tmp_path: Path) -> None:
    """``hp.parallelize`` starts two processes, which load torch: 8 s."""
    torch.set_num_threads(1)
    plan = plan_of(SOURCE, [0.5], (3, 3))
    losses, weights = by_run(plan, tmp_path)
    own_losses, own_weights = drive(plan, tmp_path)
    assert own_losses == losses
    assert own_weights.keys() == weights.keys()
    for name, tensor in own_weights.items():
        assert torch.equal(tensor, weights[name]), name


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
