from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.profile import Optimizer
from runtime.optimizer import maker_of

PARAMETERS = [nn.Parameter(torch.zeros(2))]


def test_the_class_and_its_arguments_are_those_named() -> None:
    made = maker_of(Optimizer("AdamW", {"lr": 0.5}))(PARAMETERS)
    assert type(made) is torch.optim.AdamW
    assert made.defaults["lr"] == 0.5


def test_an_unknown_optimiser_is_named() -> None:
    for name in ("Sdg", "Optimizer.step", "lr_scheduler"):
        with pytest.raises(UnknownNameError, match=name):
            maker_of(Optimizer(name))


def test_arguments_that_it_does_not_take_are_named() -> None:
    with pytest.raises(UsageError, match="lr=-1") as caught:
        maker_of(Optimizer("SGD", {"lr": -1.0}))(PARAMETERS)
    assert "Invalid learning rate" in caught.value.details[0]
    with pytest.raises(UsageError, match="speed=3"):
        maker_of(Optimizer("SGD", {"speed": 3.0}))(PARAMETERS)
