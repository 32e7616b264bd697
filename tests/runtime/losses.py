"""Losses of every reduction on a small network, and what the user's own module gives for the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler.source.losses import TrainedLoss
from profiler.source.model import LoadedModel
from tests.captures import capture
from tests.runtime.engines import Network
from tests.runtime.plans import Trained, sgd

SAMPLES = 10
PLACES = 3
CLASSES = 5

LossOf = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(scores [sample, class, place], classes [sample, place], mask [sample, place]) -> loss."""

_WEIGHT = torch.tensor([1.0, 2.0, 3.0, 0.5, 0.2], dtype=torch.float64)


def _each(scores: Tensor, classes: Tensor) -> Tensor:
    return functional.cross_entropy(scores, classes, reduction="none")


def _two_heads(scores: Tensor, classes: Tensor, mask: Tensor) -> Tensor:
    masked = (scores.abs().mean(1) * mask).sum() / mask.sum().clamp(min=1)
    return functional.cross_entropy(scores, classes) + 0.3 * masked + 0.01 * scores.square().sum() - scores.mean()


EXACT: dict[str, LossOf] = {
    "mean over classes, some ignored": lambda s, c, m: functional.cross_entropy(s, c),
    "classes that weigh differently": lambda s, c, m: functional.cross_entropy(s, c, _WEIGHT),
    "smoothed classes that weigh": lambda s, c, m: functional.cross_entropy(s, c, _WEIGHT, label_smoothing=0.1),
    "log-likelihood": lambda s, c, m: functional.nll_loss(s.log_softmax(1), c, ignore_index=-100),
    "shifted tokens": lambda s, c, m: functional.cross_entropy(s[:, :, :-1], c[:, 1:]),
    "flattened tokens": lambda s, c, m: functional.cross_entropy(s.transpose(1, 2).reshape(-1, CLASSES), c.reshape(-1)),
    "sum": lambda s, c, m: _each(s, c).sum(),
    "sum by the operator": lambda s, c, m: functional.cross_entropy(s, c, reduction="sum"),
    "sum over the number of samples": lambda s, c, m: -0.5 * s.square().sum() / s.shape[0],
    "batchmean": lambda s, c, m: functional.kl_div(s.log_softmax(1), s.detach().sigmoid(), reduction="batchmean"),
    "masked mean": lambda s, c, m: (_each(s, c) * m).sum() / m.sum(),
    "mean over those not ignored": lambda s, c, m: _each(s, c).sum() / (c >= 0).sum(),
    "mean of squares": lambda s, c, m: functional.mse_loss(s.mean(1), m),
    "weights of classes from the batch": lambda s, c, m: functional.cross_entropy(
        s, c, 1 / (1 + functional.one_hot(c.clamp(min=0), CLASSES).sum((0, 1)).double())
    ),
    "weight of positives from the batch": lambda s, c, m: functional.binary_cross_entropy_with_logits(
        s.mean(1), m, pos_weight=(1 - m).sum() / m.sum()
    ),
    "likeliest classes": lambda s, c, m: functional.cross_entropy(s, s.detach().argmax(1)),
    "several terms": _two_heads,
}

JOINING: dict[str, LossOf] = {
    "root of a mean": lambda s, c, m: functional.mse_loss(s.mean(1), m).sqrt(),
    "logarithm of a mean": lambda s, c, m: functional.mse_loss(s.mean(1), m).log(),
    "perplexity": lambda s, c, m: functional.cross_entropy(s, c).exp(),
    "flooding": lambda s, c, m: (functional.cross_entropy(s, c) - 0.1).abs() + 0.1,
    "product of means": lambda s, c, m: functional.cross_entropy(s, c) * s.square().mean(),
    "dice": lambda s, c, m: 1 - 2 * (s.mean(1).sigmoid() * m).sum() / (s.mean(1).sigmoid().sum() + m.sum()),
    "contrast of all pairs": lambda s, c, m: functional.cross_entropy(
        s.flatten(1) @ s.flatten(1).t(), torch.arange(s.shape[0])
    ),
    "variance over the batch": lambda s, c, m: s.var(0).mean(),
    "largest of the batch": lambda s, c, m: s.max(),
    "softmax over the batch": lambda s, c, m: (s.softmax(0) * s).mean(),
}


class Scores(nn.Module):
    """A layer before and one after a cut; scores of classes at places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, CLASSES * PLACES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).view(-1, CLASSES, PLACES)


def targets() -> tuple[Tensor, Tensor]:
    """Classes, of which single samples ignore all, some or none; and a mask that leaves other numbers of places."""
    drawn = torch.Generator().manual_seed(1)
    classes = torch.randint(CLASSES, (SAMPLES, PLACES), generator=drawn)
    classes[torch.rand(SAMPLES, PLACES, generator=drawn) < 0.4] = -100
    classes[2] = -100
    classes[7:] = -100
    classes[9, 1:] = torch.tensor([1, 4])
    return classes, (torch.rand(SAMPLES, PLACES, generator=drawn) < 0.5).double()


@cache
def network(name: str) -> Network:
    """With a loss of :data:`EXACT` or :data:`JOINING`, in float64."""
    return network_of(Scores(), {**EXACT, **JOINING}[name])


class Learned(nn.Module):
    """A loss that learns a temperature and a row a class, weighs classes, and counts how often it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(CLASSES, CLASSES))
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("weight", _WEIGHT.clone())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, scores: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
        self.calls += 1
        turned = functional.linear(scores.transpose(1, 2), self.rows).transpose(1, 2)
        return functional.cross_entropy(turned * self.temperature.exp(), targets[0], self.weight)


def network_of(module: nn.Module, loss_of: LossOf) -> Network:
    return network_with(module, lambda s, t: loss_of(s, *t))


def network_with(module: nn.Module, loss_fn: Callable[..., Tensor]) -> Network:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(SAMPLES, 4, dtype=torch.float64)
    model = LoadedModel(module.double(), (x,), targets(), TrainedLoss(loss_fn))
    return model, capture(model)


def whole(given: Network, steps: int = 2) -> Trained:
    """What the user's own module and loss give, called on the whole batch."""
    model = copy.deepcopy(given[0])
    function = model.loss_fn.function
    own = dict(function.named_parameters()) if isinstance(function, nn.Module) else {}
    parameters = {**dict(model.module.named_parameters()), **{f"loss_fn.{name}": p for name, p in own.items()}}
    optimizer = sgd(parameters.values())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(*model.fed)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    state = {f"loss_fn.{name}": parameter.detach() for name, parameter in own.items()}
    return Trained(losses, gradients, {**model.module.state_dict(), **state})
