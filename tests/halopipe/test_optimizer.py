from __future__ import annotations

import pytest

from halopipe.optimizer import parse_optimizer
from planner.ir.errors import UnknownNameError, UsageError
from planner.ir.profile import Optimizer


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ("SGD", Optimizer("SGD", {"lr": 0.01, "momentum": 0.9}, 1.0)),
        ("SGD:lr=0.1", Optimizer("SGD", {"lr": 0.1}, 0.0)),
        ("SGD:lr=0.1, momentum=0.5", Optimizer("SGD", {"lr": 0.1, "momentum": 0.5}, 1.0)),
        ("AdamW", Optimizer("AdamW", {"lr": 0.001}, 2.0)),
        ("RMSprop:lr=1e-3,momentum=0.9", Optimizer("RMSprop", {"lr": 0.001, "momentum": 0.9}, 2.0)),
    ],
)
def test_an_optimiser_is_read_with_the_state_it_keeps(text: str, optimizer: Optimizer) -> None:
    assert parse_optimizer(text) == optimizer


@pytest.mark.parametrize("text", ["SGD", "SGD:lr=0.1", "SGD:lr=0.1,momentum=0.5", "Adam", "RMSprop", "Adagrad"])
def test_the_state_is_what_torch_keeps(text: str) -> None:
    import torch

    spelled = parse_optimizer(text)
    parameter = torch.nn.Parameter(torch.zeros(1000))
    parameter.grad = torch.ones_like(parameter)
    optimizer = getattr(torch.optim, spelled.name)([parameter], **spelled.arguments)
    optimizer.step()
    state = [value for value in optimizer.state[parameter].values() if torch.is_tensor(value) and value.numel() > 1]
    assert sum(value.numel() for value in state) == 1000 * spelled.state_bytes_per_parameter_byte


def test_an_unknown_optimiser_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"no optimiser 'Adan'") as caught:
        parse_optimizer("Adan")
    assert caught.value.remedies == ("Adam (did you mean that?)",)


@pytest.mark.parametrize("text", ["SGD:", "SGD:lr", "SGD:lr=fast", "SGD:=1"])
def test_an_argument_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not key=number"):
        parse_optimizer(text)
