"""The reference networks: the factory convention, what each computes, published counts of parameters and operations."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import profiler.models
from profiler.models.cosmoflow import cosmoflow
from profiler.models.example import Example, TensorOrTuple
from profiler.models.gnmt import AdditiveAttention, gnmt
from profiler.models.gpt import gpt
from profiler.models.llama import llama
from profiler.models.mesh_tangling import mesh_tangling_1k, mesh_tangling_2k, mesh_tangling_128
from profiler.models.parareal import parareal
from profiler.models.resnet import resnet18, resnet50
from profiler.models.unet2d import unet2d
from profiler.models.unet3d import unet3d
from profiler.models.vgg import vgg16

Factory = Callable[..., Example]

# Factory -> (sizes of a sample, keywords of a tiny version).
TINY: dict[Factory, tuple[tuple[int, ...], dict[str, Any]]] = {
    resnet50: ((3, 64, 64), {"num_classes": 5, "width": 4}),
    resnet18: ((3, 64, 64), {"num_classes": 5, "width": 4}),
    vgg16: ((3, 32, 32), {"num_classes": 5, "width": 4, "hidden": 8}),
    gnmt: ((6,), {"vocabulary": 17, "width": 8, "layers": 3}),
    gpt: ((6,), {"vocabulary": 17, "width": 8, "layers": 2, "heads": 2, "context": 9}),
    llama: ((6,), {"vocabulary": 17, "width": 8, "hidden": 12, "layers": 2, "heads": 2, "kv_heads": 1, "context": 9}),
    parareal: ((3, 8, 8), {"slices": 2, "steps": 2, "width": 4, "num_classes": 5}),
    unet2d: ((1, 8, 8), {"width": 2}),
    unet3d: ((3, 8, 8, 8), {"num_classes": 3, "width": 2, "depth": 2}),
    cosmoflow: ((2, 8, 8, 8), {"levels": 2, "width": 2, "dropout": 0.0}),
    mesh_tangling_1k: ((18, 64, 64), {"width": 1 / 64}),
    mesh_tangling_2k: ((18, 128, 128), {"width": 1 / 64}),
    mesh_tangling_128: ((18, 32, 32), {"width": 1 / 64}),
}

OUTPUT_OF_A_SAMPLE = {
    resnet50: (5,),
    resnet18: (5,),
    vgg16: (5,),
    gnmt: (6, 17),
    gpt: (6, 17),
    llama: (6, 17),
    parareal: (5,),
    unet2d: (1, 8, 8),
    unet3d: (3, 8, 8, 8),
    cosmoflow: (4,),
    mesh_tangling_1k: (1024, 2, 2),
    mesh_tangling_2k: (4096, 2, 2),
    mesh_tangling_128: (256, 2, 2),
}

each_network = pytest.mark.parametrize("factory", TINY, ids=lambda factory: factory.__name__)


@pytest.fixture
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tiny(factory: Factory, num_samples: int) -> Example:
    sample, keywords = TINY[factory]
    return factory(input_shape=(num_samples, *sample), **keywords)[:3]  # what varies aside


def as_tuple(tensors: TensorOrTuple) -> tuple[Tensor, ...]:
    return tensors if isinstance(tensors, tuple) else (tensors,)


SPARSE = ("minkunet", "sparse_backbones", "sparse_resnet", "sparse_vgg")
"""Networks of sparse tensors, which tests/profiler/models looks at."""


def test_every_factory_of_the_package_is_tested_here() -> None:
    modules = [getattr(profiler.models, name) for name in profiler.models.__all__ if name not in SPARSE]
    factories = {
        value
        for module in modules
        for name, value in inspect.getmembers(module, inspect.isfunction)
        if value.__module__ == module.__name__ and not name.startswith("_")
    }
    assert factories == set(TINY)


@each_network
def test_the_output_and_the_loss_have_their_shapes(factory: Factory) -> None:
    module, (inputs, targets), loss_fn = tiny(factory, 2)
    output = module(*as_tuple(inputs))
    assert output.shape == (2, *OUTPUT_OF_A_SAMPLE[factory])
    assert isinstance(targets, Tensor)
    assert targets.shape[0] == 2
    assert loss_fn(output, targets).shape == ()


@each_network
@pytest.mark.usefixtures("_float64")
def test_a_small_step_down_the_gradient_lowers_the_loss_as_predicted(factory: Factory) -> None:
    module, (inputs, targets), loss_fn = tiny(factory, 3)
    before = loss_fn(module(*as_tuple(inputs)), targets)
    before.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == []
    square = sum(gradient.square().sum().item() for gradient in gradients.values())
    assert 0 < square < math.inf
    step = 1e-7 / square
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= step * parameter.grad
        after = loss_fn(module(*as_tuple(inputs)), targets)
    assert (before - after).item() == pytest.approx(step * square, rel=0.05)


@each_network
@pytest.mark.usefixtures("_float64")
def test_the_loss_is_a_mean_over_samples(factory: Factory) -> None:
    module, (inputs, targets), loss_fn = tiny(factory, 5)
    output = module(*as_tuple(inputs))
    parts = [loss_fn(output[part], targets[part]) for part in (slice(0, 2), slice(2, 5))]
    torch.testing.assert_close(loss_fn(output, targets), (2 * parts[0] + 3 * parts[1]) / 5)


@each_network
@pytest.mark.usefixtures("_float64")
def test_in_eval_mode_a_sample_does_not_see_the_others(factory: Factory) -> None:
    module, (inputs, _), _ = tiny(factory, 3)
    module.eval()
    together = module(*as_tuple(inputs))
    alone = module(*(tensor[1:2] for tensor in as_tuple(inputs)))
    torch.testing.assert_close(together[1:2], alone)


@each_network
def test_the_example_does_not_depend_on_the_global_generator_but_the_parameters_do(factory: Factory) -> None:
    torch.manual_seed(1)
    first, first_example, _ = tiny(factory, 2)
    torch.rand(1)
    second, second_example, _ = tiny(factory, 2)
    torch.manual_seed(1)
    third, _, _ = tiny(factory, 3)
    torch.testing.assert_close(first_example, second_example, rtol=0, atol=0)
    assert not all(torch.equal(*pair) for pair in zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(*pair) for pair in zip(first.parameters(), third.parameters(), strict=True))


@each_network
def test_a_factory_makes_everything_on_the_meta_device(factory: Factory) -> None:
    with torch.device("meta"):
        module, (inputs, targets), loss_fn = tiny(factory, 2)
        tensors = (*module.parameters(), *module.buffers(), *as_tuple(inputs), *as_tuple(targets))
        assert {tensor.device.type for tensor in tensors} == {"meta"}
        assert loss_fn(module(*as_tuple(inputs)), targets).device.type == "meta"


@pytest.mark.parametrize(
    ("factory", "keywords", "message"),
    [
        (resnet50, {"input_shape": (8, 3)}, r"resnet50: input_shape \(8, 3\) has 2 dims, needs 4"),
        (resnet18, {"input_shape": (0, 3, 32, 32)}, "size below 1"),
        (vgg16, {"input_shape": (8, 3, 16, 32)}, "height or width of 16, .* at least 32"),
        (gnmt, {"input_shape": (8, 4), "layers": 1}, "layers is 1, needs at least 2"),
        (gpt, {"input_shape": (8, 5), "context": 4}, "5 positions, but context is 4"),
        (gpt, {"width": 10, "heads": 3}, "width 10 is no multiple of heads 3"),
        (
            unet3d,
            {"input_shape": (1, 3, 8, 12, 8)},
            "size 12 in dim 3, which is no multiple of 8, .* larger size is 16",
        ),
        (cosmoflow, {"input_shape": (1, 4, 32, 32, 64)}, r"has sides \[32, 32, 64\], needs equal ones"),
        (mesh_tangling_1k, {"input_shape": (1, 3, 64, 64)}, "has 3 channels, needs 18"),
        (mesh_tangling_2k, {"input_shape": (1, 18, 96, 64)}, "size 96 in dim 2, .* larger size is 128"),
    ],
)
def test_a_shape_that_does_not_fit_is_refused_with_its_numbers(
    factory: Factory, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        factory(**keywords)


@pytest.mark.usefixtures("_float64")
def test_gpt_is_causal() -> None:
    module, (tokens, _), _ = tiny(gpt, 2)
    assert isinstance(tokens, Tensor)
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 17
    before = module(tokens)
    after = module(changed)
    torch.testing.assert_close(after[:, :4], before[:, :4])
    assert (after[:, 4:] != before[:, 4:]).any(dim=2).all()


@pytest.mark.usefixtures("_float64")
def test_the_decoder_of_gnmt_sees_the_whole_source_but_no_later_target() -> None:
    module, (inputs, _), _ = tiny(gnmt, 2)
    source, target_in = as_tuple(inputs)
    before = module(source, target_in)
    later = module(source, torch.cat((target_in[:, :4], (target_in[:, 4:] + 1) % 17), dim=1))
    torch.testing.assert_close(later[:, :4], before[:, :4])
    other = module(torch.cat((source[:, :5], (source[:, 5:] + 1) % 17), dim=1), target_in)
    assert (other != before).any(dim=2).all()


@pytest.mark.usefixtures("_float64")
def test_additive_attention_follows_the_papers_formula_for_unequal_lengths() -> None:
    attention = AdditiveAttention(4)
    queries = torch.randn(2, 3, 4)
    memory = torch.randn(2, 5, 4)
    for sample in range(2):
        for position in range(3):
            scores = torch.stack(
                [
                    attention.score(torch.tanh(attention.query(queries[sample, position]) + attention.key(value)))[0]
                    for value in memory[sample]
                ]
            )
            expected = (scores.softmax(0).unsqueeze(1) * memory[sample]).sum(0)
            torch.testing.assert_close(attention(queries, memory)[sample, position], expected)


def test_the_targets_of_a_sequence_network_are_the_next_tokens() -> None:
    for factory in (gnmt, gpt):
        _, (inputs, targets), _ = tiny(factory, 2)
        assert isinstance(targets, Tensor)
        assert torch.equal(as_tuple(inputs)[-1][:, 1:], targets[:, :-1])


def test_dropout_is_a_layer_only_when_asked_for() -> None:
    plain, _, _ = tiny(vgg16, 2)
    dropping, _, _ = vgg16(input_shape=(2, 3, 32, 32), num_classes=5, width=4, hidden=8, dropout=0.5)
    assert not any(isinstance(layer, nn.Dropout) for layer in plain.modules())
    assert sum(isinstance(layer, nn.Dropout) for layer in dropping.modules()) == 2
    assert list(plain.state_dict()) == list(dropping.state_dict())


def num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def full_size(factory: Factory) -> tuple[nn.Module, tuple[Tensor, ...], TensorOrTuple]:
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
    embedding = 132_382_720
    bidirectional = 67_174_400
    joined = 50_364_416
    plain = 33_587_200
    attention = 41_979_904 - plain
    classifier = 132_512_000
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
