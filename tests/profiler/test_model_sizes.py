"""The reference networks, full size on the meta device, against published parameter and operation counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from profiler.models.example import Example, Tensors
from profiler.models.gnmt import gnmt
from profiler.models.gpt import gpt
from profiler.models.mesh_tangling import mesh_tangling_1k, mesh_tangling_2k, mesh_tangling_128
from profiler.models.resnet import resnet18, resnet50
from profiler.models.unet3d import unet3d
from profiler.models.vgg import vgg16

Factory = Callable[..., Example]


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def full_size(factory: Factory) -> tuple[nn.Module, tuple[Tensor, ...], Tensors]:
    with torch.device("meta"):
        module, (inputs, targets), _ = factory()
    return module, inputs if isinstance(inputs, tuple) else (inputs,), targets


def gflop_per_sample(factory: Factory) -> float:
    module, inputs, _ = full_size(factory)
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        module(*inputs)
    return counter.get_total_flops() / 1e9 / inputs[0].shape[0]


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (resnet50, 25_557_032),  # torchvision
        (resnet18, 11_689_512),  # torchvision
        (vgg16, 138_357_544),  # torchvision
        (gpt, 124_439_808 + 50257 * 768),  # GPT-2 small and a head of its own
    ],
)
def test_a_network_has_the_published_number_of_parameters(factory: Factory, expected: int) -> None:
    module, _, _ = full_size(factory)
    assert num_parameters(module) == expected


def test_unet3d_has_the_papers_parameters_without_those_of_batch_norm() -> None:
    module, _, _ = full_size(unet3d)
    norms = sum(num_parameters(layer) for layer in module.modules() if isinstance(layer, nn.BatchNorm3d))
    assert num_parameters(module) - norms == 19_069_955


def test_gnmt_has_the_layers_that_pipedream_profiled() -> None:
    """Parameter bytes, in float32, of the embeddings, LSTMs, attention and classifier in PipeDream's gnmt profile."""
    embedding, bidirectional, joined, plain = 132_382_720, 67_174_400, 50_364_416, 33_587_200
    attention, classifier = 41_979_904 - plain, 132_512_000
    module, _, _ = full_size(gnmt)
    lstms = [4 * num_parameters(layer) for layer in module.modules() if isinstance(layer, nn.LSTM)]
    assert lstms == [bidirectional, joined, plain, plain, plain, joined, joined, joined]
    assert 4 * num_parameters(module) == sum(lstms) + 2 * embedding + attention + classifier


@pytest.mark.parametrize(
    ("factory", "num_convolutions", "million_parameters", "gflop"),
    [
        (mesh_tangling_1k, 31, 34.4, 2365.453),
        (mesh_tangling_2k, 19, 12.4, 1895.456),
        (mesh_tangling_128, 13, 4.2, 6.893),
    ],
)
def test_a_mesh_tangling_network_has_the_size_of_the_published_one(
    factory: Factory, num_convolutions: int, million_parameters: float, gflop: float
) -> None:
    module, inputs, targets = full_size(factory)
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == num_convolutions
    assert all(layer.bias is None for layer in convolutions)
    assert round(num_parameters(module) / 1e6, 1) == million_parameters
    assert gflop_per_sample(factory) == pytest.approx(gflop, abs=5e-4)
    assert isinstance(targets, Tensor)
    assert targets.numel() == inputs[0].numel() // 18, "one answer for each mesh cell"


@pytest.mark.parametrize(("factory", "gflop"), [(resnet50, 8.178), (resnet18, 3.628), (vgg16, 30.941)])
def test_a_classifier_has_twice_the_published_multiply_adds(factory: Factory, gflop: float) -> None:
    assert gflop_per_sample(factory) == pytest.approx(gflop, abs=5e-4)
