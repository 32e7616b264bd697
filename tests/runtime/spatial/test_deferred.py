"""Work that is put off is done once, in order, not without bound, and tells of gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runtime.spatial.deferred import DeferredGradients


def test_work_is_done_in_the_order_in_which_it_was_put_and_only_once() -> None:
    done: list[int] = []
    later = DeferredGradients(most_kept=5)
    for number in range(3):
        later.put(lambda number=number: done.append(number))
    assert not done
    later.run()
    later.run()
    assert done == [0, 1, 2]


def test_of_too_much_work_the_oldest_is_done_at_once() -> None:
    done: list[int] = []
    later = DeferredGradients(most_kept=2)
    for number in range(4):
        later.put(lambda number=number: done.append(number))
    assert (done, len(later)) == ([0, 1], 2)


def test_what_is_forgotten_is_not_done() -> None:
    later = DeferredGradients()
    later.put(lambda: 1 / 0)
    later.clear()
    later.run()


def test_gradients_are_added_and_told_of_when_they_are_there() -> None:
    told: list[Tensor] = []
    later = DeferredGradients(told.append)
    weight, bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(1))
    for _ in range(2):
        later.put_gradients((weight, bias, None), lambda: (2 * weight, None, torch.ones(1)))
        assert len(told) == (0 if weight.grad is None else 1)
        later.run()
    assert torch.equal(weight.grad, torch.full((2,), 4.0))
    assert bias.grad is None
    assert [each is weight for each in told] == [True, True]
    assert not weight.grad.requires_grad
