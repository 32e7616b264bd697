"""A model is captured once for all processes of a job on one host, and anew for each job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from halopipe.launch import spawn
from halopipe.launch.run import run_plan
from halopipe.run_spec.job import JOB, Job
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from halopipe.training import shared_capture
from planner.ir.errors import StaleFileError
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from tests.halopipe.plans import mined, plan_of

NETWORK = """
from pathlib import Path

import torch
from torch import nn

with Path({log!r}).open("a") as file:
    file.write("loaded, ")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x):
        return self.last({call}(self.first(x)) * {scale})


def make():
    return Scaled(), (torch.randn(4, 3), torch.tensor([0, 1, 2, 3])), nn.CrossEntropyLoss()
"""


def written(folder: Path, scale: float, call: str = "torch.relu") -> ModelSource:
    """A network whose file notes how often it is run."""
    place = folder / "network.py"
    place.write_text(NETWORK.format(log=str(folder / "log"), scale=scale, call=call))
    return ModelSource(f"{place}:make")


def trained(plan: Plan, folder: Path) -> RunResult:
    (folder / "log").unlink(missing_ok=True)
    result = run_plan(plan, RunOptions(steps=2, warmup=0))
    assert result is not None
    assert result.numerics is not None
    assert result.numerics.num_steps == 1, "its first step was compared with one device"
    return result


@contextlib.contextmanager
def by_each(folder: Path, num_workers: int) -> Iterator[None]:
    """As where nothing can be shared."""
    yield None


def test_a_shared_capture_gives_the_first_step_that_captures_of_their_own_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(written(tmp_path, 1.5), [0.5])
    together = trained(plan, tmp_path)
    assert (tmp_path / "log").read_text() == "loaded, "
    monkeypatch.setattr(spawn, "captured_once", by_each)
    apart = trained(plan, tmp_path)
    assert (tmp_path / "log").read_text() == "loaded, " * 3
    assert together.losses == apart.losses


def test_a_changed_source_is_captured_anew(tmp_path: Path) -> None:
    plan = plan_of(written(tmp_path, 1.5), [0.5])
    before = trained(plan, tmp_path)
    written(tmp_path, 3.0)
    assert trained(plan, tmp_path).losses[0] != before.losses[0]
    written(tmp_path, 1.5, "torch.tanh")
    with pytest.raises(StaleFileError):
        trained(plan, tmp_path)


def test_a_model_that_was_captured_ahead_is_taken_once_by_its_source_and_seed(tmp_path: Path) -> None:
    plan = mined()
    job = Job(plan, RunOptions(1, dtype="float64"), tmp_path)
    job.write(tmp_path / JOB)
    forget = shared_capture.capture_ahead(str(tmp_path / JOB))
    source, seed = plan.inputs.model, job.options.seed
    assert shared_capture.load(source, seed + 1)[1] is None
    assert shared_capture.load(replace(source, arguments={**source.arguments, "where": "0"}), seed)[1] is None
    model, captured = shared_capture.load(source, seed)
    assert captured is not None
    assert {id(each) for each in captured.graph_module.parameters()} == {id(p) for p in model.module.parameters()}
    other, none = shared_capture.load(source, seed)
    assert none is None
    assert other.module is not model.module
    assert {str(each.dtype) for each in shared_capture.load(job.source, seed)[0].module.parameters()} == {
        "torch.float64"
    }
    shared_capture.capture_ahead(str(tmp_path / JOB))
    forget()
    assert shared_capture.load(source, seed)[1] is None
