"""A model captured in training mode, cut for evaluation, computes what the module itself does in evaluation mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from planner.ir.errors import UnsupportedModelError
from planner.ir.profile import ModelSource
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.stage.cut import cut_stage
from runtime.stage.modes import in_evaluation


class Convolutional(nn.Module):
    """Normalisation with and without running statistics, and every dropout of nn."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.kept = nn.BatchNorm2d(4)
        self.unkept = nn.BatchNorm2d(4, track_running_stats=False)
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
        self.plain = nn.InstanceNorm2d(4)
        self.drops = nn.ModuleList([nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout()])
        self.random_slope = nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.instance(self.unkept(self.kept(self.conv(x))))
        for drop in self.drops:
            y = drop(y)
        return self.random_slope(self.plain(y))


class Sequential(nn.Module):
    """Dropout inside a recurrent layer and inside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, 2, batch_first=True, dropout=0.5)
        self.gru = nn.GRU(6, 6, 2, batch_first=True, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        z, _ = self.gru(y)
        return functional.scaled_dot_product_attention(y, z, z, dropout_p=0.5 if self.training else 0.0)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def convolutional(*, input_shape: tuple[int, ...] = (4, 3, 6, 6)) -> nn.Module:
    return Convolutional()


def sequential(*, input_shape: tuple[int, ...] = (4, 5, 4)) -> nn.Module:
    return Sequential()


def noisy(*, input_shape: tuple[int, ...] = (4, 3)) -> nn.Module:
    return Noisy()


SHAPES = {"convolutional": (4, 3, 6, 6), "sequential": (4, 5, 4), "noisy": (4, 3)}


def loaded(name: str) -> LoadedModel:
    return load_model(ModelSource(f"{__name__}:{name}", {}, SHAPES[name], "float64"))


@pytest.mark.parametrize("name", ["convolutional", "sequential"])
def test_evaluation_is_that_of_the_module(name: str) -> None:
    torch.manual_seed(0)
    model = loaded(name)
    for buffer in model.module.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    captured = capture(model)
    names = [layer.name for layer in captured.graph.layers]
    maps = captured.layer_of_node, captured.node_of_value
    stage = cut_stage(captured.graph_module, names, *maps, (captured.graph.loss,), in_evaluation)
    x = torch.randn(3, *SHAPES[name][1:], dtype=torch.float64)
    state = tuple(
        tensor.clone() if key in stage.mutated else tensor for key, tensor in stage.attributes.items()
    )  # batches are counted nevertheless
    (found,) = stage.function(3, x, *state)
    model.module.eval()
    torch.testing.assert_close(found, model.loss((x,), ()), rtol=1e-14, atol=0)
    model.module.train()
    assert not torch.allclose(found, model.loss((x,), ()), rtol=1e-6)


def test_a_graph_that_draws_on_its_own_cannot_be_evaluated() -> None:
    captured = capture(loaded("noisy"))
    maps = captured.layer_of_node, captured.node_of_value
    names = [layer.name for layer in captured.graph.layers]
    with pytest.raises(UnsupportedModelError, match="randn_like"):
        cut_stage(captured.graph_module, names, *maps, (captured.graph.loss,), in_evaluation)
