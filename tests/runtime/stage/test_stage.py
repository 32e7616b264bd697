from __future__ import annotations

import torch
from torch import Tensor, nn

from runtime.stage.stage import LeftGradients


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def test_each_parameter_is_told_of_once_and_not_before_its_gradient_is_complete() -> None:
    once, twice, never = parameters(3)
    told: list[tuple[Tensor, object]] = []
    left = LeftGradients([once, twice, never], lambda p: told.append((p, None if p.grad is None else p.grad.tolist())))
    left.note((twice, None), lambda: (torch.ones(2), None))
    left.note((once, twice), lambda: (torch.ones(2), torch.ones(2)))
    assert told == []
    left.run()
    assert told == [(never, None), (once, [1, 1]), (twice, [2, 2])]


def test_nobody_needs_to_listen() -> None:
    (parameter,) = parameters(1)
    left = LeftGradients([parameter], None)
    left.note((parameter, None), lambda: (torch.ones(2), None))
    left.run()
    assert parameter.grad.tolist() == [1, 1]
