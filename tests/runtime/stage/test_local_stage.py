"""What a stage keeps and tells on one rank: sums of gradients, versions of weights, and what its row asks for."""

from __future__ import annotations

import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from planner.ir.schedule import Action, Op, Pipeline, StageGraph
from planner.passes.versions import versions_kept
from planner.schedules import names, schedule, traits
from runtime.optim.gradient_buckets import GradientBuckets
from runtime.optim.of_stage import Updates
from runtime.stage.local_stage import AccumulationStep, LocalStage
from runtime.stage.modes import RunConfig
from runtime.stage.stage import DeferredWeightGradients
from runtime.stage.weight_versions import Weights

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
    program = SimpleNamespace(
        layer=layer,
        reset=lambda step: log.append("reset"),
        before_update=lambda: log.append("before"),
    )
    optimizer = SimpleNamespace(step=lambda: log.append("step"))
    buckets = GradientBuckets(parameters.values(), log.start_sum, bucket_bytes=1)
    updates = Updates(frozenset(), buckets, optimizer, frozenset())
    return LocalStage(
        program, (0, 1), (), (), (), (), parameters, {}, updates, lambda tensor: None, AccumulationStep(count)
    )


def run_step(stage: LocalStage, log: Log) -> None:
    """What an executor calls in a step of two micro-batches."""
    stage.reset()
    for microbatch in range(2):
        if microbatch == 1:
            stage.expect_last()
        stage.program.layer(torch.ones(1, 3)).sum().backward()
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
    stage.program.layer(torch.ones(1, 3)).sum().backward()
    assert log == ["reset"]
    stage.reset()
    assert stage.gradients() == {}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_phases_come_in_turn(count: int) -> None:
    accumulation, found = AccumulationStep(count), []
    for _ in range(2 * count):
        found.append((accumulation.is_first, accumulation.is_last))
        accumulation.advance()
    assert found == [(index == 0, index == count - 1) for index in range(count)] * 2


def test_what_is_spoilt_stays_so_until_steps_of_another_update_begin() -> None:
    accumulation, found = AccumulationStep(3, number=2), []
    accumulation.advance()
    accumulation.is_spoilt = True
    for _ in range(4):
        found.append(accumulation.is_spoilt)
        accumulation.advance()
    assert found == [True, True, True, False]


VERSIONED = tuple(name for name in names() if not traits(name).synchronous)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, 2.0]))


def update(weights: Weights, changed: nn.Parameter) -> None:
    weights.before_update()
    with torch.no_grad():
        changed.add_(10.0)


def test_without_versions_micro_batches_run_on_the_parameters_themselves() -> None:
    p = parameter()
    weights = Weights([p])
    assert weights.leaves(0) == (p,)
    storage = p.data_ptr()
    update(weights, p)
    assert (p.data_ptr(), weights.num_kept) == (storage, 1)


def test_a_micro_batch_on_its_way_keeps_its_weights_and_the_parameter_stays_the_same_object() -> None:
    p = parameter()
    weights = Weights([p], {0: 1, 1: 1})
    (old,) = weights.leaves(0)
    assert old.data_ptr() == p.data_ptr()  # no copy yet
    y = (old * old).sum()
    update(weights, p)
    (new,) = weights.leaves(1)
    assert (old.tolist(), new.tolist(), p.tolist()) == ([1, 2], [11, 12], [11, 12])
    assert new.data_ptr() == p.data_ptr() != old.data_ptr()
    assert weights.num_kept == 2
    y.backward()
    weights.collect([old], 0)
    assert p.grad.tolist() == [2, 4]  # of the old weights
    assert weights.num_kept == 1


def test_nothing_is_copied_where_no_micro_batch_needs_the_old_weights() -> None:
    p = parameter()
    weights = Weights([p], {0: 1, 1: 1})
    weights.collect(weights.leaves(0), 0)
    storage = p.data_ptr()
    update(weights, p)
    assert (p.data_ptr(), weights.num_kept) == (storage, 1)


def test_old_weights_are_kept_for_a_micro_batch_that_starts_after_the_update() -> None:
    p = parameter()
    weights = Weights([p], {0: 2})
    weights.collect(weights.leaves(0), 0)
    update(weights, p)
    (old,) = weights.leaves(0)
    assert old.tolist() == [1, 2]
    weights.collect([old], 0)
    with pytest.raises(ValueError, match="version 0"):
        weights.leaves(0)


def test_an_update_writes_what_backward_needs_unless_it_is_kept() -> None:
    """Autograd would notice a write to the parameter; it must not notice one that is foreseen."""
    p = parameter()
    weights = Weights([p], {0: 1, 1: 1})
    (leaf,) = weights.leaves(0)
    y = (leaf.exp() * leaf).sum()
    update(weights, p)
    y.backward()
    expected = torch.tensor([1.0, 2.0])
    assert torch.equal(leaf.grad, expected.exp() * (1 + expected))


def test_gradients_of_several_micro_batches_are_added_and_told_of() -> None:
    p, frozen = parameter(), parameter()
    told: list[Tensor] = []
    weights = Weights([p, frozen], {0: 2}, told.append)
    for factor in (1.0, 3.0):
        leaves = weights.leaves(0)
        (leaves[0] * factor).sum().backward()
        weights.collect(leaves, 0)
    assert p.grad.tolist() == [4, 4]
    assert frozen.grad is None
    assert told == [p, p]


def test_a_step_begins_with_version_zero_and_without_old_storage() -> None:
    p = parameter()
    weights = Weights([p], {0: 2})
    weights.leaves(0)
    storage = weakref.ref(p.untyped_storage())
    update(weights, p)
    assert storage() is not None
    weights.reset()
    assert storage() is None
    assert weights.leaves(0)[0].tolist() == [11, 12]


@pytest.mark.parametrize("name", VERSIONED)
@pytest.mark.parametrize("num_microbatches", [1, 4, 7])
def test_no_schedule_keeps_more_versions_than_the_planner_counts(name: str, num_microbatches: int) -> None:
    stages = StageGraph.chain(4, num_microbatches)
    rows = schedule(name)(Pipeline(stages)).rows
    for stage, (row, most) in enumerate(zip(rows, versions_kept(rows, 4), strict=True)):
        kept = replay(row)
        assert max(kept) == most, f"stage {stage}"


def replay(row: tuple[Action, ...]) -> list[int]:
    """Versions kept after each action; the storages that are alive are as many."""
    p = parameter()
    uses = RunConfig.of(row, False, None).version_uses
    weights = Weights([p], uses)
    version_of, leaves, storages, kept = {}, {}, [weakref.ref(p.untyped_storage())], []
    expected: Counter[int] = Counter()
    for action in row:
        m = action.microbatch
        if action.op is Op.FORWARD:
            version_of[m] = action.version
            (leaves[m],) = weights.leaves(action.version)
            assert leaves[m].tolist() == [1 + 10 * action.version, 2 + 10 * action.version]
            expected[action.version] += 1
        elif action.op is Op.BACKWARD:
            weights.collect([leaves.pop(m)], version_of[m])
        elif action.op is Op.UPDATE:
            update(weights, p)
            storages.append(weakref.ref(p.untyped_storage()))
        kept.append(weights.num_kept)
        alive = {id(found) for reference in storages if (found := reference()) is not None}
        assert len(alive) == weights.num_kept
    assert expected == Counter(uses) or not uses
    return kept


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
