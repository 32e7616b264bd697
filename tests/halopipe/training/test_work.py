"""What a rank refuses before it trains, and what it tells afterwards; all in this process."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from halopipe.run_spec.job import REFERENCE, Job, RankResult
from halopipe.run_spec.options import RunOptions
from halopipe.training.single_device import make_reference
from halopipe.training.work import work
from planner.ir.errors import CorruptFileError, IllegalProgramError, StaleFileError, UsageError
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from runtime.monitor.activity import read_board
from runtime.monitor.failure import set_text
from runtime.transport import Hub, InProcessTransport, Transport
from tests.halopipe.plans import RESNET, mined, plan_of


def do(plan: Plan, folder: Path, store: dist.Store | None = None, **options: object) -> RankResult:
    """The work of rank 0 where it is the only one to come."""
    job = Job(plan, RunOptions(**{"steps": 3, "warmup": 1, "check_first_step": False, **options}), folder)
    board = dist.HashStore()
    if job.is_compared:
        set_text(store or board, REFERENCE, make_reference(job).to_text())
    result = work(job, 0, store or board, board, lambda groups, program: InProcessTransport(Hub(1, groups), 0))
    assert read_board(board, [0])[0].num_done == job.options.steps
    return result


def test_one_rank_does_everything(tmp_path: Path) -> None:
    result = do(plan_of(RESNET, []), tmp_path, check_numerics=True, dtype="float64")
    assert (len(result.losses), len(result.step_seconds), sorted(result.spans)) == (3, 3, [0, 1, 2])
    module = load_model(RESNET).module
    assert result.peak_bytes > 3 * 8 * sum(each.numel() for each in module.parameters())  # with gradients and momentum
    assert {each.kind for each in result.compared} == {"gradient", "parameter", "buffer", "loss"}
    assert "bn1.num_batches_tracked" in {each.name for each in result.compared if each.kind == "buffer"}
    assert max(each.error for each in result.compared) == 0.0


def test_a_plan_for_another_model_is_refused_with_both_fingerprints(tmp_path: Path) -> None:
    plan, other = plan_of(RESNET, []), mined()
    wrong = replace(plan, inputs=replace(plan.inputs, model_fingerprint=other.inputs.model_fingerprint))
    with pytest.raises(StaleFileError) as caught:
        do(wrong, tmp_path)
    there, here, which = caught.value.details
    assert there.startswith(f"plan: {other.inputs.model_fingerprint}, of ")
    assert here.startswith(f"here: {plan.inputs.model_fingerprint}, of ")
    assert "their names are the same" in which
    assert (caught.value.code, caught.value.exit_code) == ("H304", 3)


def test_a_rank_with_another_plan_is_refused(tmp_path: Path) -> None:
    job = Job(mined(), RunOptions(), tmp_path)
    store = dist.HashStore()
    store.set("terms/0", '{"plan": "sha256:0123456789abcdef"}')
    with pytest.raises(StaleFileError, match="rank 1 was given another plan than rank 0") as caught:
        work(job, 1, store, dist.HashStore(), lambda groups, program: InProcessTransport(Hub(2, groups), 1))
    assert caught.value.details[0] == "rank 0: sha256:0123456789abcdef"


def test_a_rank_that_fails_while_it_is_opened_leaves_the_others_and_falls_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Transport] = []
    monkeypatch.setattr(InProcessTransport, "close", lambda end: closed.append(end))
    monkeypatch.setattr("halopipe.training.rank.Engine", lambda *given, **named: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        do(plan_of(RESNET, []), tmp_path)
    assert len(closed) == 1
    assert "heartbeat" not in {thread.name for thread in threading.enumerate()}


def test_an_edited_program_that_would_hang_is_refused_with_the_grid(tmp_path: Path) -> None:
    plan = mined()
    rows = (tuple(action for action in plan.decision.program[0] if action != "0SEND_F1>1"), plan.decision.program[1])
    with pytest.raises(IllegalProgramError) as caught:
        do(replace(plan, decision=replace(plan.decision, program=rows)), tmp_path)
    assert "rank 0: " in str(caught.value)
    assert caught.value.exit_code == 3


def test_an_edited_plan_without_a_layer_is_refused_by_its_name(tmp_path: Path) -> None:
    plan = mined()
    layers = {name: place for name, place in plan.decision.layers.items() if name != "1.linear"}
    with pytest.raises(CorruptFileError, match=r"layer 1\.linear is in no stage"):
        do(replace(plan, decision=replace(plan.decision, layers=layers)), tmp_path)


def dropping(*, input_shape: tuple[int, ...] = (4, 3)) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_numerics_of_a_random_model_are_checked_with_the_numbers_that_it_draws(tmp_path: Path, dtype: str) -> None:
    plan = plan_of(ModelSource(f"{__name__}:dropping", {}, (4, 3)), [])
    compared = do(plan, tmp_path, check_numerics=True, dtype=dtype).compared
    assert {each.kind for each in compared} == {"gradient", "parameter", "loss"}
    assert all(each.error <= each.accepted for each in compared)
    assert max(each.accepted for each in compared) < 0.1  # in float32: its twin in float64 drops the same units


def test_data_that_ends_is_named_with_the_step(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the data ended after 2 batches"):
        do(plan_of(RESNET, []), tmp_path, data="tests.halopipe.bombs:short")
