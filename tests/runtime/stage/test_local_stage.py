"""What a stage keeps and tells on one rank: sums of gradients, and what its row asks for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from planner.ir.schedule import Action
from runtime.optim.gradient_buckets import GradientBuckets
from runtime.optim.of_stage import Updates
from runtime.stage.local_stage import AccumulationStep, LocalStage
from runtime.stage.modes import RunConfig
from runtime.stage.stage import DeferredWeightGradients

UNSUMMED = ["reset", "backward", "backward"]
SUMMED = ["wait", "wait", "before", "step"]


class Log(list[str]):
    """What happened, in order."""

    def start_sum(self, flat: torch.Tensor) -> SimpleNamespace:
        self.append(f"start {flat.numel()}")
        return SimpleNamespace(wait=lambda: self.append("wait"))


def local_stage(log: Log, count: int = 1) -> LocalStage:
    """A stage of one linear layer whose optimiser only says that it stepped."""
    layer = nn.Linear(3, 2)
    parameters = dict(layer.named_parameters())
    passes = SimpleNamespace(
        layer=layer,
        reset=lambda step: log.append("reset"),
        before_update=lambda: log.append("before"),
    )
    optimizer = SimpleNamespace(step=lambda: log.append("step"))
    buckets = GradientBuckets(parameters.values(), log.start_sum, bucket_bytes=1)
    updates = Updates(frozenset(), buckets, optimizer, frozenset())
    return LocalStage(
        passes, (0, 1), (), (), (), (), parameters, {}, updates, lambda tensor: None, AccumulationStep(count)
    )


def run_step(stage: LocalStage, log: Log) -> None:
    """What an executor calls in a step of two micro-batches."""
    stage.reset()
    for microbatch in range(2):
        if microbatch == 1:
            stage.expect_last()
        stage.passes.layer(torch.ones(1, 3)).sum().backward()
        log.append("backward")
    stage.reduce_gradients()
    stage.update()
    stage.accumulation.advance()


def test_gradients_are_sent_within_the_last_backward_and_waited_for_before_the_update() -> None:
    log = Log()
    stage = local_stage(log)
    for _ in range(2):
        run_step(stage, log)
    assert log == [*UNSUMMED[:2], "start 2", "start 6", "backward", *SUMMED] * 2
    assert all(gradient.eq(2).all() for gradient in stage.gradients().values())


def test_of_several_steps_the_last_sums_and_updates() -> None:
    log = Log()
    stage = local_stage(log, count=3)
    for _ in range(6):
        run_step(stage, log)
    assert log == [*UNSUMMED, *UNSUMMED, *UNSUMMED[:2], "start 2", "start 6", "backward", *SUMMED] * 2
    assert all(gradient.eq(6).all() for gradient in stage.gradients().values())


def test_a_forgotten_step_leaves_nothing_behind() -> None:
    log = Log()
    stage = local_stage(log)
    stage.expect_last()
    stage.reset()
    stage.passes.layer(torch.ones(1, 3)).sum().backward()
    assert log == ["reset"]
    stage.reset()
    assert stage.gradients() == {}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_phases_come_in_turn(count: int) -> None:
    accumulation = AccumulationStep(count)
    found = []
    for _ in range(2 * count):
        found.append((accumulation.is_first, accumulation.is_last))
        accumulation.advance()
    assert found == [(index == 0, index == count - 1) for index in range(count)] * 2


def test_what_is_spoilt_stays_so_until_steps_of_another_update_begin() -> None:
    accumulation = AccumulationStep(3, number=2)
    found = []
    accumulation.advance()
    accumulation.is_spoilt = True
    for _ in range(4):
        found.append(accumulation.is_spoilt)
        accumulation.advance()
    assert found == [True, True, True, False]


def config_of(text: str, recompute: bool = False) -> RunConfig:
    return RunConfig.of([Action.parse(each) for each in text.split()], recompute, None)


def test_a_row_of_whole_backwards() -> None:
    assert config_of("0F0 0F1 0B0 0B1 0UPDATE") == RunConfig()
    assert config_of("0F0 0B0", recompute=True) == RunConfig(recompute=True)


def test_halves_are_found_by_micro_batch() -> None:
    assert config_of("0F0 0F1 0I0 0B1 0W0 0UPDATE").split == {0}


def test_forward_passes_alone_keep_nothing_to_compute_again() -> None:
    assert config_of("0F0 0F1", recompute=True) == RunConfig(trains=False)


def test_precision_is_handed_on() -> None:
    assert RunConfig.of([], False, torch.bfloat16).autocast is torch.bfloat16


def test_versions_are_counted_where_updates_come_within_the_step() -> None:
    assert config_of("0F0 0F1 0B0 0UPDATE0 0F2@1 0B1 0B2@1 0UPDATE2").version_uses == {0: 2, 1: 1}
    assert config_of("0F0 0F1 0B0 0B1 0UPDATE").version_uses == {}


def ones(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def test_each_parameter_is_told_of_once_and_not_before_its_gradient_is_complete() -> None:
    once, twice, never = ones(3)
    told: list[tuple[Tensor, object]] = []
    left = DeferredWeightGradients(
        [once, twice, never], lambda p: told.append((p, None if p.grad is None else p.grad.tolist()))
    )
    left.note((twice, None), lambda: (torch.ones(2), None))
    left.note((once, twice), lambda: (torch.ones(2), torch.ones(2)))
    assert told == []
    left.run()
    assert told == [(never, None), (once, [1, 1]), (twice, [2, 2])]


def test_nobody_needs_to_listen() -> None:
    (parameter,) = ones(1)
    left = DeferredWeightGradients([parameter], None)
    left.note((parameter, None), lambda: (torch.ones(2), None))
    left.run()
    assert parameter.grad.tolist() == [1, 1]
