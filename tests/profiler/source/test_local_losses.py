"""A factory's sequence as blocks that train by losses of their own: gradients, heads, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from planner.ir.errors import FactoryError
from planner.ir.profile import ModelSource
from profiler.source.local_losses import LocalBlocks, with_local_losses
from profiler.source.source import load_model


def pictures() -> tuple[nn.Module, object, object]:
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
    network = nn.Sequential(body, nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 5))
    return network, (torch.randn(3, 1, 6, 6), torch.randint(5, (3,))), nn.CrossEntropyLoss()


def places() -> tuple[nn.Module, object, object]:
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 7))
    return network, (torch.randn(3, 5, 4), torch.randn(3, 5, 7)), nn.MSELoss()


def bare() -> nn.Module:
    return nn.Linear(3, 2)


def changing() -> tuple[nn.Module, object, object]:
    network = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Conv1d(4, 4, 1), nn.Flatten(), nn.Linear(16, 5))
    return network, (torch.randn(3, 2, 6), torch.randn(3, 5)), nn.MSELoss()


@pytest.mark.parametrize(("factory", "count"), [(pictures, 1), (pictures, 3), (pictures, 5), (places, 2)])
def test_every_block_gets_the_gradient_of_its_own_loss(factory: Callable[[], object], count: int) -> None:
    model = load_model(ModelSource(f"{__name__}:{factory.__name__}", dtype="float64", local_losses=count))
    module = model.module
    loss = model.loss_fn
    assert isinstance(module, LocalBlocks)
    assert len(module.blocks) == count
    module.train()
    (x,) = model.inputs
    (targets,) = model.targets
    twin = copy.deepcopy(module)
    torch.manual_seed(1)
    loss(module(x), targets).backward()
    torch.manual_seed(1)
    single = loss.function.loss_fn if hasattr(loss, "function") else loss.loss_fn
    for block, head in zip(twin.blocks, (*twin.heads, nn.Identity()), strict=True):
        x = block(x.detach())
        single(head(x), targets).backward()
    for (name, mine), theirs in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=0, atol=1e-13, msg=name)


def test_finding_the_heads_leaves_modes_and_statistics_alone() -> None:
    made = pictures()
    before = copy.deepcopy(made[0].state_dict())
    module, *_ = with_local_losses("pictures", made, 3)
    assert all(torch.equal(before[name], each) for name, each in made[0].state_dict().items())
    assert all(each.training for each in module.modules())


@pytest.mark.parametrize(
    ("factory", "count", "why"),
    [
        (bare, 2, "this is a Linear"),
        (pictures, 6, "6 blocks of 5 layers with parameters"),
        (changing, 3, r"block 0 makes \(3, 4, 4\), the model \(3, 5\): no head is known"),
    ],
)
def test_what_has_no_blocks_or_no_heads_is_refused(factory: Callable[[], object], count: int, why: str) -> None:
    with pytest.raises(FactoryError, match=why):
        load_model(ModelSource(f"{__name__}:{factory.__name__}", local_losses=count))
