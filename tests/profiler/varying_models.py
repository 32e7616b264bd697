"""Models whose inputs vary in other dims than samples, for the tests of capture and of shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler import LoadedModel, mean_of_squares
from profiler.models.gnmt import gnmt
from profiler.models.gpt import gpt
from profiler.source.losses import TrainedLoss

Sizes = dict[str, int]


@dataclass(frozen=True)
class VaryingModel:
    """A model, and how its batches are made.

    Attributes:
        make: from the sizes of the example, the model with them.
        batch: from a number of samples and sizes, inputs and targets.
        sizes: those of the example, and others that batches have.
    """

    make: Callable[[Sizes], LoadedModel]
    batch: Callable[[int, Sizes], tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
    sizes: tuple[Sizes, ...]

    def load(self, autocast: torch.dtype | None = None) -> LoadedModel:
        """The model with its example of two samples."""
        torch.manual_seed(0)
        model = self.make(self.sizes[0])
        inputs, targets = self.batch(2, self.sizes[0])
        return LoadedModel(model.module, inputs, targets, model.loss_fn, model.varying, autocast)


class Function(nn.Module):
    """A module whose forward is a function of itself and its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


def model_of(
    function: Callable[..., Any], *inputs: Tensor, varying: dict[str, tuple[tuple[str, int], ...]], **parts: Any
) -> LoadedModel:
    """A model without targets."""
    return LoadedModel(Function(function, **parts), inputs, (), TrainedLoss(mean_of_squares), varying)


def _tokens(samples: int, sizes: Sizes) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    tokens = torch.randint(17, (samples, sizes["time"] + 1))
    return (tokens[:, :-1].contiguous(),), (tokens[:, 1:].contiguous(),)


def _translation(samples: int, sizes: Sizes) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    tokens = torch.randint(17, (samples, sizes["time"] + 1))
    source = torch.randint(17, (samples, sizes["source_time"]))
    return (source, tokens[:, :-1].contiguous()), (tokens[:, 1:].contiguous(),)


def _gpt(sizes: Sizes) -> LoadedModel:
    module, _, loss = gpt(input_shape=(2, sizes["time"]), vocabulary=17, width=8, layers=2, heads=2, context=12)
    return LoadedModel(module, (), (), TrainedLoss(loss, True), {"time": (("inputs", 1), ("targets", 1))})


def _gnmt(sizes: Sizes) -> LoadedModel:
    module, _, loss = gnmt(input_shape=(2, sizes["time"]), vocabulary=17, width=8, layers=2)
    varying = {"source_time": (("inputs", 1),), "time": (("inputs_2", 1), ("targets", 1))}
    return LoadedModel(module, (), (), TrainedLoss(loss, True), varying)


def _pointnet(sizes: Sizes) -> LoadedModel:
    """A feature of the whole cloud beside that of every point, as in Qi et al. 2017; a label for each point."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.points(x.transpose(1, 2)).relu()
        whole = m.cloud(y.amax(2)).unsqueeze(2).expand(-1, -1, x.shape[1])
        return m.head(torch.cat((y, whole), 1))

    parts = {"points": nn.Conv1d(3, 8, 1), "cloud": nn.Linear(8, 4), "head": nn.Conv1d(12, 5, 1)}
    varying = {"points": (("inputs", 1), ("targets", 1))}
    return LoadedModel(Function(forward, **parts), (), (), TrainedLoss(functional.cross_entropy, True), varying)


def _clouds(samples: int, sizes: Sizes) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return (torch.randn(samples, sizes["points"], 3),), (torch.randint(5, (samples, sizes["points"])),)


def _convnet(sizes: Sizes) -> LoadedModel:
    module = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        nn.Conv2d(4, 6, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    )
    varying = {"height": (("inputs", 2),), "width": (("inputs", 3),)}
    return LoadedModel(module, (), (), TrainedLoss(functional.cross_entropy, True), varying)


def _images(samples: int, sizes: Sizes) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return (torch.randn(samples, 3, sizes["height"], sizes["width"]),), (torch.randint(5, (samples,)),)


TIMES: tuple[Sizes, ...] = ({"time": 6}, {"time": 5}, {"time": 7}, {"time": 11}, {"time": 1})

MODELS = {
    "gpt": VaryingModel(_gpt, _tokens, TIMES),
    "gnmt": VaryingModel(
        _gnmt,
        _translation,
        (
            {"source_time": 6, "time": 6},
            {"source_time": 5, "time": 7},
            {"source_time": 11, "time": 3},
            {"source_time": 2, "time": 11},
        ),
    ),
    "pointnet": VaryingModel(_pointnet, _clouds, ({"points": 20}, {"points": 3}, {"points": 37}, {"points": 1})),
    "convnet": VaryingModel(
        _convnet,
        _images,
        ({"height": 16, "width": 18}, {"height": 11, "width": 24}, {"height": 9, "width": 9}),
    ),
}
