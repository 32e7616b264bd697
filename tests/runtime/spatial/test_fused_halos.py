"""Inference of an image that is large for one rank: halos of several layers are fetched at once, or not at all."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from planner.ir.plan import Decision
from profiler.capture.graph import capture
from profiler.models.example import normal
from profiler.source.model import LoadedModel
from runtime.engine import Engine
from runtime.pipeline.routing import Piece, slices
from runtime.transport import InProcessTransport, Pending
from tests.runtime.divided import by_stage, divided
from tests.runtime.engines import Network, on_engines

CUTS = {"height": (0, 1, 2), "width": (0, 1, 2)}
MARGINS = {"0": 4, "1": 4, "2": 3, "3": 3, "4": 2, "5": 2, "6": 0}
"""Rows beyond its part that each layer computes, so that the next ones need no message: 2, 1 and 2 are read."""


class Counting(InProcessTransport):
    """Counts messages inside a stage."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.num_messages = 0

    def start_exchange(
        self,
        sent: Mapping[int, Tensor],
        received: Mapping[int, Tensor],
        key: int | None = None,
    ) -> Pending:
        self.num_messages += len(sent)
        return super().start_exchange(sent, received, key)


@cache
def network() -> Network:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 3, 3, padding=1),
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 3, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(3, 2, 5, padding=2),
    ).double()
    image = normal((1, 1, 96, 80), 0).double()
    model = LoadedModel(module, (image,), (normal((1, 2, 96, 80), 1).double(),), _loss)
    return model, capture(model)


def _loss(output: Tensor, targets: tuple[Tensor, ...]) -> Tensor:
    return nn.functional.mse_loss(output, *targets)


def answers(decision: Decision) -> tuple[Tensor, int]:
    """The image that all ranks make together, and the messages that it took inside stages."""

    def work(engine: Engine) -> tuple[list[Piece], int]:
        model, _ = network()
        found = engine.evaluate(model.inputs, model.targets)
        transport: Counting = engine._transport
        judged = list(found.outputs.get(0, {}).values())  # the prediction, then the targets
        return judged[:1], transport.num_messages

    whole = torch.full((1, 2, 96, 80), float("nan"), dtype=torch.float64)
    everybody = on_engines(network(), decision, work, transport=Counting)
    for outputs, _ in everybody:
        for box, tensor in outputs:
            origin = tuple(type(interval)(0, extent) for interval, extent in zip(box, whole.shape, strict=True))
            whole[slices(box, origin)] = tensor
    return whole, sum(count for _, count in everybody)


def with_margins(decision: Decision, margins: Mapping[str, int]) -> Decision:
    layers = {name: replace(placed, margin=margins.get(name, 0)) for name, placed in decision.layers.items()}
    return replace(decision, layers=layers)


@pytest.fixture
def expected() -> Tensor:
    model, _ = network()
    return copy.deepcopy(model.module).eval()(*model.inputs).detach()


def test_wide_margins_spare_all_messages(expected: Tensor) -> None:
    plain = divided(network()[1].graph, CUTS, (1,))
    image, messages = answers(plain)
    torch.testing.assert_close(image, expected, rtol=1e-12, atol=1e-12)
    assert messages > 0
    image, fewer = answers(with_margins(plain, MARGINS))
    torch.testing.assert_close(image, expected, rtol=1e-12, atol=1e-12)
    assert fewer == 0  # the image is read with the halo of all layers


def test_one_wide_exchange_serves_several_layers(expected: Tensor) -> None:
    plain = divided(network()[1].graph, CUTS, (1,))
    _, messages = answers(plain)
    image, fewer = answers(with_margins(plain, {"3": 0, "4": 2, "5": 2}))
    torch.testing.assert_close(image, expected, rtol=1e-12, atol=1e-12)
    assert 0 < fewer < messages


def test_stages_hand_over_what_margins_read(expected: Tensor) -> None:
    decision = by_stage(network()[1].graph, ["2"], [{"height": (0, 1, 2)}, CUTS], (1,))
    margins = {name: rows for name, rows in MARGINS.items() if decision.layers[name].stage == 1}
    image, messages = answers(with_margins(decision, margins))
    torch.testing.assert_close(image, expected, rtol=1e-12, atol=1e-12)
    assert messages == 0  # each stage is handed its part with the halo of all its layers
