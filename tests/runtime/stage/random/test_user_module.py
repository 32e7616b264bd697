"""The user's own module draws what a plan draws, where it is answered as its captured graph would be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler.capture.graph import capture
from profiler.source.losses import mean_of_squares
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from runtime.numerics.single_device import serial_step
from runtime.stage.random.streams import CounterRng
from runtime.stage.random.user_module import Answers, UnlikeDrawsError
from tests.runtime.engines import drawing_loss
from tests.runtime.plans import Trained, assert_equal, batch_of, sgd

SEED = 5
ROWS = (3, 1, 2)


class Calls(nn.Module):
    """A function of a hidden value, between two layers."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.function = function
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Recurrent(nn.Module):
    def __init__(self, kind: Any, batch_first: bool) -> None:
        super().__init__()
        self.layers = kind(4, 6, 3, dropout=0.3, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        found = self.layers(x if self.batch_first else x.transpose(0, 1))[0]
        return found if self.batch_first else found.transpose(0, 1)


def attended(x: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.3)


def noisy(x: Tensor) -> Tensor:
    x = x * x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.7) + torch.randn_like(x)
    x = x + torch.normal(x, x.exp()) + torch.bernoulli(x.sigmoid()) + torch.rand(x.shape, dtype=x.dtype)
    return x + functional.gumbel_softmax(x) + torch.empty_like(x).uniform_(-1, 1)


FUNCTIONS: dict[str, Any] = {
    "dropout": lambda x: functional.dropout(functional.dropout(x, 0.3), 0.5),
    "in place": lambda x: functional.dropout(x * 1, 0.5, inplace=True),
    "channels": lambda x: functional.dropout1d(x, 0.4),
    "all and nothing": lambda x: functional.dropout(functional.dropout(functional.dropout(x, 0.0), 1.0), 0.5) + x,
    "alpha": lambda x: functional.alpha_dropout(
        functional.feature_alpha_dropout(x, 0.2, training=True), 0.3, training=True
    ),
    "slopes": lambda x: functional.rrelu(x, training=True),
    "attention": attended,
    "numbers": noisy,
}
MODELS: dict[str, Any] = {
    **{name: lambda function=function: Calls(function) for name, function in FUNCTIONS.items()},
    "lstm": lambda: Recurrent(nn.LSTM, batch_first=True),
    "gru, time first": lambda: Recurrent(nn.GRU, batch_first=False),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.2, batch_first=True),
    "attention with its weights": lambda: Weighed(),
}


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found, weights = self.attention(x, x, x)
        return found * weights.sum()


def loaded(module: nn.Module) -> tuple[LoadedModel, CapturedModule]:
    module.double()
    model = LoadedModel(module, (torch.randn(4, 5, 4, dtype=torch.float64),), (), lambda y, _: mean_of_squares(y))
    return model, capture(model)


def trained(model: LoadedModel, captured: CapturedModule, way: str) -> Trained:
    """By the captured graph, by the module in micro-batches, or by the module in one call."""
    model = copy.deepcopy(model)
    captured = copy.deepcopy(captured)
    draw = CounterRng(SEED)
    answers = None
    losses = []
    if way == "graph":
        model_of_graph = captured
        loss_of = drawing_loss(model_of_graph, draw)
        parameters = dict(model_of_graph.graph_module.named_parameters())
    else:
        loss_of = model.loss
        answers = Answers(captured, draw)
        parameters = dict(model.module.named_parameters())
        assert answers.in_parts
    optimizer = sgd(parameters.values())
    for step in range(2):
        draw.step = step
        batch = batch_of(model, sum(ROWS), step)
        if way == "whole":
            losses.append(serial_step(loss_of, optimizer, *batch, ROWS, answers=answers, whole=True))
        else:
            losses.append(serial_step(loss_of, optimizer, *batch, ROWS, draw, answers=answers))
    return Trained(losses, {name: each.grad for name, each in parameters.items()}, {})


@pytest.mark.parametrize("name", MODELS)
def test_the_module_itself_draws_what_its_graph_draws(name: str) -> None:
    torch.manual_seed(0)
    model, captured = loaded(MODELS[name]())
    by_graph, by_module = (trained(model, captured, way) for way in ("graph", "module"))
    assert_equal(by_module, by_graph)
    if name != "attention with its weights":  # which are summed over all samples
        assert_equal(trained(model, captured, "whole"), by_module)


def test_a_module_that_draws_nothing_needs_no_answers() -> None:
    model, captured = loaded(Calls(torch.tanh))
    answers = Answers(captured, CounterRng(SEED))
    assert not answers
    with answers.given((4,)):
        model.loss(*model.fed)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            lambda x: functional.dropout(functional.dropout(x, 0.3), 0.3),
            "once more than its captured graph, which draws 1 t",
        ),
        (
            lambda x: x + torch.randn_like(x),
            "draw 1 is by randn_like in the module, by aten.dropout.default in its graph",
        ),
    ],
)
def test_a_module_that_draws_otherwise_than_its_graph_is_refused(asked: Any, said: str) -> None:
    model, captured = loaded(Calls(FUNCTIONS["in place"]))
    model.module.function = asked
    with pytest.raises(UnlikeDrawsError, match=said), Answers(captured, CounterRng(SEED)).given((4,)):
        model.loss(*model.fed)


def test_a_module_that_draws_less_often_than_its_graph_is_refused() -> None:
    model, captured = loaded(Calls(FUNCTIONS["in place"]))
    model.module.function = torch.tanh
    said = "drew 0 times, its captured graph draws 1 times"
    with pytest.raises(UnlikeDrawsError, match=said), Answers(captured, CounterRng(SEED)).given((4,)):
        model.loss(*model.fed)
