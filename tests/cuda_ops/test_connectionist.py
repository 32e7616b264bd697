"""CTC losses as one operator of the samples that are there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.ir.errors import UnsupportedModelError
from profiler.capture.graph import capture
from profiler.source.losses import TrainedLoss
from profiler.source.model import LoadedModel

TIME = 7
CLASSES = 5
SAMPLES = 4


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).log_softmax(-1).transpose(0, 1)


def lengths_of(out: Tensor) -> Tensor:
    return torch.full((out.shape[1],), out.shape[0], dtype=torch.long)


def model_of(loss: object) -> LoadedModel:
    torch.manual_seed(0)
    targets = torch.randint(1, CLASSES, (SAMPLES, 3)), torch.tensor([3, 1, 2, 3])
    return LoadedModel(Recogniser(), (torch.randn(SAMPLES, TIME, 3),), targets, TrainedLoss(loss))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_graph_gives_torchs_loss_for_any_number_of_samples(reduction: str) -> None:
    def loss(out: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        criterion = nn.CTCLoss(blank=0, reduction=reduction, zero_infinity=True)
        return criterion(out, y[0], lengths_of(out), y[1]).mean()

    model = model_of(loss)
    captured = capture(model)
    assert captured.polymorphic
    assert not captured.mixing
    for count in (1, 3):
        given = [each[:count] for each in (*model.inputs, *model.targets)]
        expected = model.loss_fn(model.module(given[0]), tuple(given[1:]))
        assert torch.equal(captured.graph_module(count, *given), expected)


def test_without_samples_there_are_no_losses_and_a_gradient_of_zeros() -> None:
    x = torch.randn(TIME, 0, CLASSES, requires_grad=True)
    nothing = torch.zeros(0, dtype=torch.long)
    losses = torch.ops.halopipe.ctc_losses(x, nothing.view(0, 3), nothing, nothing, 0, False)
    losses.sum().backward()
    assert (tuple(losses.shape), tuple(x.grad.shape)) == ((0,), (TIME, 0, CLASSES))


def test_targets_in_one_vector_and_lengths_as_lists_are_refused_with_what_to_write() -> None:
    def joined(out: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        return F.ctc_loss(out, y[0].flatten(), lengths_of(out), torch.full((out.shape[1],), 3))

    def listed(out: Tensor, y: tuple[Tensor, Tensor]) -> Tensor:
        return F.ctc_loss(out, y[0], [TIME] * out.shape[1], y[1])

    with pytest.raises(UnsupportedModelError, match=r"targets in one vector[\s\S]*padded to one length"):
        capture(model_of(joined))
    with pytest.raises(UnsupportedModelError, match=r"lengths as a list[\s\S]*torch\.full"):
        capture(model_of(listed))
