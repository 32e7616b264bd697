"""Micro-batches run on the versions of weights that the program says, and no more versions are kept than they need."""

from __future__ import annotations

import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from planner.ir.schedule import Action, Op, Pipeline, StageGraph
from planner.passes.versions import versions_kept
from planner.schedules import names, schedule, traits
from runtime.stage.modes import RunConfig
from runtime.stage.weight_versions import Weights

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
    p = parameter()
    frozen = parameter()
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
    version_of = {}
    leaves = {}
    storages = [weakref.ref(p.untyped_storage())]
    kept = []
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
