"""Stages without rows: layers that torch refuses to run on them give what they would have given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from planner.ir.profile import ModelSource
from profiler.capture.graph import capture
from profiler.source.source import load_model
from runtime.stage.cut import StageFunction, cut_stage
from runtime.stage.functions import without_rows


class Refused(nn.Module):
    """A view with -1 (refused forward), a Fourier transform (likewise) and a shuffle (refused backward)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.last = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.pixel_shuffle(self.conv(x), 2)
        z = torch.fft.fft2(y).real
        return self.last(z.view(2 * x.shape[0], -1)[:, :32])


def refused(*, input_shape: tuple[int, ...] = (4, 3, 4, 4)) -> nn.Module:
    return Refused()


def cut(empty: bool) -> StageFunction:
    captured = capture(load_model(ModelSource(f"{__name__}:refused", {}, (4, 3, 4, 4), "float64")))

    def rule(node: fx.Node) -> None:
        return None

    names = [layer.name for layer in captured.graph.layers if layer.name != captured.graph.loss]
    maps = captured.layer_of_node, captured.node_of_value
    return cut_stage(captured.graph_module, names, *maps, ("last",), without_rows(rule) if empty else rule)


def test_torch_refuses_such_layers() -> None:
    stage = cut(empty=False)
    with pytest.raises(RuntimeError):
        stage.function(0, torch.empty(0, 3, 4, 4, dtype=torch.float64), *stage.attributes.values())


def test_results_without_rows_have_the_right_shapes_and_gradients_flow_back() -> None:
    stage = cut(empty=True)
    x = torch.empty(0, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    (y,) = stage.function(0, x, *stage.attributes.values())
    assert y.shape == (0, 2)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert all(parameter.grad.count_nonzero() == 0 for parameter in stage.parameters.values())


def test_with_rows_nothing_changes_and_errors_stay_errors() -> None:
    stage, plain = cut(empty=True), cut(empty=False)
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    state = tuple(plain.attributes.values())
    assert torch.equal(plain.function(2, x, *state)[0], stage.function(2, x, *state)[0])
    with pytest.raises(RuntimeError):
        stage.function(2, x[:, :2], *state)
