"""Modules that are called several times in a step: statistics are updated in order, gradients add up."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.ir.errors import UnsupportedModelError
from planner.ir.plan import Decision
from profiler.source.losses import TrainedLoss
from profiler.source.model import LoadedModel
from tests.captures import capture
from tests.runtime.cases import trained_alone
from tests.runtime.divided import divided
from tests.runtime.engines import Network, trained_on
from tests.runtime.plans import assert_equal, decide, split_backward

MICRO_BATCHES = (3, 5)


class Siamese(nn.Module):
    """One encoder for two inputs."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(6, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.head((self.encoder(a) - 2 * self.encoder(b)).tanh())


class Recursive(nn.Module):
    """One cell, over and over."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.first = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        h = self.first(a)
        for _ in range(3):
            h = self.cell(h).tanh()
        return self.head(h + self.first(b))


class Counting(nn.Module):
    """Counts its calls, and reads the count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * (1 + 1 / self.calls)


def _lstm() -> nn.Module:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x.unsqueeze(1).expand(-1, 3, -1))[0][:, -1]

    return Last()


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: Siamese(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())),
    "batch norm without parameters": lambda: Siamese(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, affine=False))),
    "layer norm": lambda: Siamese(nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))),
    "recurrent": lambda: Siamese(_lstm()),
    "a cell": lambda: Recursive(nn.Linear(6, 6)),
    "a cell with batch norm": lambda: Recursive(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))),
    "a counter": lambda: Siamese(Counting()),
}


@cache
def network(name: str) -> Network:
    torch.manual_seed(0)
    inputs = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    loss = TrainedLoss(functional.cross_entropy, unpacked=True)
    model = LoadedModel(NETWORKS[name]().double(), inputs, (torch.arange(8) % 3,), loss)
    return model, capture(model)


def require_equal(given: Network, decision: Decision) -> None:
    batch = given[0].fed
    found = trained_on(given, decision, lambda engine: [engine.step(*batch).loss for _ in range(2)])
    assert_equal(found, trained_alone(given, [batch] * 2, [decision.micro_batches] * 2))


@pytest.mark.parametrize("name", NETWORKS)
def test_in_a_pipeline(name: str) -> None:
    given = network(name)
    require_equal(given, decide(given[1].graph, ["head"], MICRO_BATCHES, schedule=split_backward))


@pytest.mark.parametrize("name", [name for name in NETWORKS if "batch" not in name and "counter" not in name])
def test_with_parameters_tied_across_stages(name: str) -> None:
    given = network(name)
    require_equal(given, decide(given[1].graph, [0.25, 0.6], MICRO_BATCHES))


@pytest.mark.parametrize("name", NETWORKS)
def test_on_ranks_that_share_samples(name: str) -> None:
    given = network(name)
    require_equal(given, decide(given[1].graph, [], MICRO_BATCHES, [(0, 1)], [(2, 1)]))


@pytest.mark.parametrize("name", NETWORKS)
def test_on_ranks_that_share_channels(name: str) -> None:
    given = network(name)
    require_equal(given, divided(given[1].graph, {"channel": (0, 1, 2)}, MICRO_BATCHES))


@pytest.mark.parametrize("name", ["batch norm without parameters", "a counter"])
def test_a_buffer_that_two_stages_would_write_is_named(name: str) -> None:
    given = network(name)
    second = [layer.name for layer in given[1].graph.layers if layer.name.startswith("encoder")][-1]
    with pytest.raises(UnsupportedModelError, match=r"the buffer encoder\.\S+ is used by layer encoder"):
        require_equal(given, decide(given[1].graph, [second], MICRO_BATCHES))
