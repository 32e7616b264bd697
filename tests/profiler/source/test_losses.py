"""What a loss function gives is one number, or terms of a sum: nothing is added that a loop of one's own would not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halopipe as hp
from planner.ir.errors import UnsupportedModelError
from profiler.source.losses import own_loss, summed

X = torch.linspace(-1, 1, 24).view(4, 6)
Y = torch.tensor([0, 1, 2, 1])


def right(out: Tensor) -> Tensor:
    return (out.argmax(1) == Y).float()


def terms(out: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(out, Y), 0.1 * out.square().mean()


@pytest.fixture
def out() -> Tensor:
    torch.manual_seed(0)
    return nn.Linear(6, 3)(X)


def test_terms_are_added_and_of_a_dict_with_the_loss_that_is_taken(out: Tensor) -> None:
    first, second = terms(out)
    assert torch.equal(summed((first, second)), first + second)
    assert torch.equal(summed({"classes": first, "size": second}), first + second)
    assert torch.equal(summed({"loss": first, "accuracy": right(out).mean(), "of": first.detach()}), first)
    assert summed(first) is first
    with torch.no_grad():  # an evaluation: which of them are terms was judged at capture
        assert torch.equal(summed((first.detach(), second.detach())), first + second)


@pytest.mark.parametrize(
    "returned",
    [
        lambda out: (terms(out)[0], right(out).mean()),
        lambda out: (terms(out)[0], terms(out)[0].detach()),
        lambda out: [terms(out)[0], torch.zeros(())],
        lambda out: {"classes": terms(out)[0], "accuracy": right(out).mean()},
    ],
)
def test_a_number_without_a_gradient_is_no_term(returned: Callable[[Tensor], Any], out: Tensor) -> None:
    pattern = r"H204[\s\S]*(1|'accuracy') of [\s\S]*as an accuracy or a count has none[\s\S]*return the loss alone"
    with pytest.raises(UnsupportedModelError, match=pattern):
        summed(returned(out))
    with pytest.raises(UnsupportedModelError, match=pattern):
        own_loss(returned(out))


def test_a_number_that_is_in_another_one_already_is_no_term(out: Tensor) -> None:
    first, second = terms(out)
    with pytest.raises(UnsupportedModelError, match=r"would count one of them twice[\s\S]*0 is made of 1 already"):
        summed((first + second, first, second))
    with pytest.raises(UnsupportedModelError, match=r"'mean' is made of 'one' already"):
        summed({"one": first, "mean": first / 2})


@pytest.mark.parametrize("count", [lambda out: right(out).long().sum(), lambda out: right(out).mean().item()])
def test_what_is_no_tensor_of_floats_says_how_to_return_the_loss_alone(count: Callable[[Tensor], Any]) -> None:
    out = X[:, :3].clone().requires_grad_()
    with pytest.raises(UnsupportedModelError, match=r"not a sum of numbers[\s\S]*1 is a [\s\S]*return the loss alone"):
        summed((terms(out)[0], count(out)))


@pytest.mark.exhaustive("it starts processes that load torch: ten seconds for one refusal")
def test_profiling_a_model_with_such_a_loss_is_refused_before_anything_is_measured() -> None:
    def loss_and_accuracy(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(out, y), (out.argmax(1) == y).float().mean()

    with pytest.raises(UnsupportedModelError, match="have no gradient"):
        hp.parallelize(nn.Linear(6, 3), (X, Y), loss_fn=loss_and_accuracy, devices=1)
