"""Which layers are found to mix samples, and which are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from profiler import LoadedModel, mean_of_squares
from profiler.capture.graph import capture
from profiler.source.losses import TrainedLoss
from runtime.captured import CapturedModule


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).sigmoid()


def mixing(function: Callable[[Tensor], Tensor], samples: int = 3) -> tuple[str, ...]:
    graph = capture(LoadedModel(Net(function), (torch.randn(samples, 3, 4),), (), TrainedLoss(mean_of_squares)))
    assert graph.polymorphic
    marked = tuple(layer.name for layer in graph.graph.layers if layer.attributes.get("mixes_samples"))
    assert marked == graph.mixing
    return graph.mixing


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    ("function", "culprit"),
    [
        (lambda x: x - x.mean(0), ("sub",)),
        (lambda x: x.roll(1, 0), ("roll",)),
        (lambda x: x.flip(0), ("flip",)),
        (lambda x: x.softmax(0), ("softmax",)),
        (lambda x: x.cumsum(0), ("cumsum",)),
        (lambda x: x / x.abs().max(), ("max", "div")),
        (lambda x: x.flatten(1) @ x.flatten(1).t(), ("matmul",)),
    ],
    ids=["mean", "roll", "flip", "softmax", "cumsum", "max", "pairs"],
)
def test_a_layer_that_mixes_samples_is_named_and_none_after_it(
    function: Callable[[Tensor], Tensor], culprit: tuple[str, ...], samples: int
) -> None:
    found = mixing(function, samples)
    assert found in (culprit, culprit[:1], culprit[1:])
    assert found


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(1),
        lambda x: x.flatten(0, 1),
        lambda x: x.transpose(0, 1),
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: x + torch.rand_like(x),
        lambda x: nn.functional.batch_norm(x, None, None, training=True),
        lambda x: nn.functional.batch_norm(x, torch.zeros(3), torch.ones(3), training=True),
        lambda x: x * torch.arange(12.0).view(3, 4),
    ],
    ids=["softmax", "flatten", "transpose", "dropout", "noise", "batch norm", "running batch norm", "constant"],
)
def test_what_keeps_samples_apart_is_left_in_peace(function: Callable[[Tensor], Tensor]) -> None:
    assert mixing(function) == ()


def test_samples_in_several_pieces_are_told_from_mixed_ones() -> None:
    net = Net(lambda x: x.transpose(0, 1).reshape(-1, 4).relu().view(3, -1, 4))
    graph = capture(LoadedModel(net, (torch.randn(2, 3, 4),), (), TrainedLoss(mean_of_squares)))
    interleaved = [layer.name for layer in graph.graph.layers if layer.attributes.get("interleaves_samples")]
    assert (graph.mixing, interleaved) == ((), ["reshape", "relu"])


def reduced(reduce: Callable[..., Tensor]) -> CapturedModule:
    inputs = (torch.randn(3, 4),)
    targets = (torch.tensor([1.0, 0.0, 1.0]),)
    return capture(LoadedModel(nn.Linear(4, 4), inputs, targets, TrainedLoss(reduce, unpacked=True)))


JOINING: dict[str, Callable[..., Tensor]] = {
    "root": lambda output, mask: output.square().mean().sqrt(),
    "hinge of a mean": lambda output, mask: (output.square().mean() - 1e-3).relu(),
    "largest": lambda output, mask: output.max(),
    "mean of two means": lambda output, mask: output.mean() * output.square().mean(),
    "sum over what the model keeps": lambda output, mask: output.square().sum() / output.sigmoid().sum(),
    "largest target": lambda output, mask: output.square().mean() / mask.max(),
}


@pytest.mark.parametrize("loss", JOINING)
def test_a_loss_that_parts_do_not_make_up_needs_the_whole_batch(loss: str) -> None:
    found = reduced(JOINING[loss])
    wide = [layer.name for layer in found.graph.layers if layer.attributes.get("needs_whole_batch")]
    assert len(wide) == 1
    assert tuple(wide) == found.mixing


REDUCTIONS: dict[str, tuple[Callable[..., Tensor], dict[str, str]]] = {
    "mean": (lambda output, mask: output.square().mean(), {}),
    "sum": (lambda output, mask: output.square().sum(), {"loss": "sum"}),
    "sum over samples": (lambda output, mask: -(2 * output.square().sum()) / output.shape[0], {}),
    "mean over a mask": (
        lambda output, mask: (output.mean(1) * mask).sum() / mask.sum(),
        {"loss.sum": "sum", "loss.sum_2": "whole sum"},
    ),
    "share of a mask": (
        lambda output, mask: (output.mean(1) * mask).mean() / mask.mean(),
        {"loss.mean_3": "whole mean"},
    ),
    "classes": (lambda output, mask: nn.functional.cross_entropy(output, mask.long()), {"loss": "terms"}),
    "probabilities": (lambda output, mask: nn.functional.cross_entropy(output, output.detach().sigmoid()), {}),
    "a constant beside": (lambda output, mask: output.mean() + 0.1 * torch.ones(3).sum(), {}),
}


ON_2_11 = pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 fixes the samples of such a loss itself")


@pytest.mark.parametrize(
    "loss", [pytest.param(loss, marks=ON_2_11) if loss == "probabilities" else loss for loss in REDUCTIONS]
)
def test_it_is_known_how_parts_make_up_a_loss(loss: str) -> None:
    reduce, expected = REDUCTIONS[loss]
    found = reduced(reduce)
    assert (dict(found.reductions), found.mixing) == (expected, ())


def test_a_frequency_of_the_batch_needs_all_of_it() -> None:
    class Frequent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 4, scale_grad_by_freq=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.table(x)

    found = capture(LoadedModel(Frequent(), (torch.arange(3),), (), TrainedLoss(mean_of_squares)))
    assert [layer.name for layer in found.graph.layers if layer.attributes.get("needs_whole_batch")] == ["table"]


def test_memory_that_is_yet_to_be_filled_tells_no_samples_apart() -> None:
    def skipped(y: Tensor) -> Tensor:
        torch.full((64,), float("nan"))  # what the next tensor may find in its memory
        return y * y.new_empty(y.shape[0], 1, 1).bernoulli_(0.5)

    assert mixing(skipped) == ()


def test_what_mixes_samples_behind_a_draw_is_found() -> None:
    def dropped(y: Tensor) -> Tensor:
        return y * torch.rand(y.shape[0], 1, 1)

    assert mixing(lambda y: dropped(y).tanh()) == ()
    assert mixing(lambda y: dropped(y) - dropped(y).mean(0)) != ()


def test_of_a_fixed_number_of_samples_the_module_itself_is_asked() -> None:
    def to_itself(output: Tensor, mask: Tensor) -> Tensor:
        return torch.cdist(output, output).max(1).values.mean()

    def by_number(output: Tensor, mask: Tensor) -> Tensor:
        return output.view(3, -1, 4).square().mean()

    for loss, is_wide in ((to_itself, True), (by_number, False)):
        found = reduced(loss)
        assert not found.polymorphic
        assert bool(found.graph.layers[-1].attributes.get("needs_whole_batch")) is is_wide


def test_complex_values_of_samples_are_told_from_mixed_ones() -> None:
    assert mixing(lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real) == ()


VECTORS = (4, 5)
ROWS = (4,)
LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[tuple[int, ...], ...]]] = {
    name: (getattr(nn.functional, name), shapes)
    for name, shapes in {
        "binary_cross_entropy_with_logits": (VECTORS,),
        "cosine_embedding_loss": (VECTORS, ROWS),
        "huber_loss": (VECTORS,),
        "hinge_embedding_loss": (VECTORS,),
        "l1_loss": (VECTORS,),
        "margin_ranking_loss": (VECTORS, VECTORS),
        "mse_loss": (VECTORS,),
        "multilabel_soft_margin_loss": (VECTORS,),
        "poisson_nll_loss": (VECTORS,),
        "smooth_l1_loss": (VECTORS,),
        "soft_margin_loss": (VECTORS,),
        "triplet_margin_loss": (VECTORS, VECTORS),
        "triplet_margin_with_distance_loss": (VECTORS, VECTORS),
    }.items()
}
LOSSES |= {
    "triplet_margin_loss, swapped": (partial(nn.functional.triplet_margin_loss, swap=True), (VECTORS, VECTORS)),
    "triplet_margin_with_distance_loss, swapped": (
        partial(nn.functional.triplet_margin_with_distance_loss, swap=True),
        (VECTORS, VECTORS),
    ),
    "kl_div, batchmean": (partial(nn.functional.kl_div, reduction="batchmean"), (VECTORS,)),
    "normalised by the batch": (lambda x, y: (x / x.norm() - y).square().mean(), (VECTORS,)),
    "of pairs": (lambda x, y: (x @ y.t()).logsumexp(1).mean(), (VECTORS,)),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_said_to_need_the_whole_batch_where_it_is_no_mean_of_its_parts(name: str) -> None:
    function, shapes = LOSSES[name]
    x = torch.randn(VECTORS)
    others = [torch.rand(shape).round() * 2 - 1 for shape in shapes]
    if name.startswith(("kl", "binary", "multilabel", "poisson")):
        others = [each.abs() + 0.1 for each in others]
    whole = function(x, *others)
    parts = [function(x[rows], *(each[rows] for each in others)) for rows in (slice(0, 2), slice(2, 4))]
    is_mean = bool(torch.isclose(whole, sum(parts) / 2, rtol=1e-5))
    captured = capture(LoadedModel(nn.Linear(5, 5), (x,), tuple(others), lambda output, aims: function(output, *aims)))
    needs_all = any(layer.attributes.get("needs_whole_batch") for layer in captured.graph.layers)
    assert needs_all != is_mean
