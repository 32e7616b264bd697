from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.fx.experimental import _config as shapes_config

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import MapSpec
from cuda_ops.sparse.nn import SparseTensor
from cuda_ops.sparse.recipe import PreparedNetwork, record
from profiler.models.minkunet import MinkUNet, minkunet, minkunet_tiny
from profiler.models.sparse_backbones import SparseResNet21D, SparseResUNet, SparseResUNet42
from profiler.models.sparse_blocks import ResidualBlock, shapes
from profiler.models.sparse_resnet import SparseResNetClassifier, sparse_resnet, sparse_resnet_tiny
from profiler.models.sparse_vgg import SparseVGG16, sparse_vgg16, sparse_vgg16_tiny

Factory = Callable[..., Any]
FACTORIES: list[Factory] = [minkunet_tiny, sparse_resnet_tiny, sparse_vgg16_tiny]
SITES = 90
each_network = pytest.mark.parametrize("factory", FACTORIES, ids=lambda factory: factory.__name__)


@pytest.fixture(autouse=True)
def _plain_one_thread_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HALOPIPE_SPARSE", "torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)


def example(factory: Factory, samples: int = 2, sites: int = SITES) -> tuple[nn.Module, SparseTensor, Tensor, Any]:
    channels = 1 if factory is sparse_vgg16_tiny else 4
    module, (x, targets), loss = factory(input_shape=(samples, sites, channels))
    return module, x, targets, loss


def part(x: SparseTensor, samples: list[int], targets: Tensor, empty: bool = False) -> tuple[SparseTensor, Tensor]:
    """These samples alone, as a batch of their own, or with the others empty; and their targets."""
    rows = (x.coords[:, :1] == torch.tensor(samples)).any(1)
    coords = x.coords[rows].clone()
    if not empty:
        coords[:, 0] = torch.tensor([samples.index(each) for each in coords[:, 0].tolist()])
    y = SparseTensor(x.feats[rows], coords, num_samples=x.num_samples if empty else len(samples))
    return y, targets[rows] if len(targets) == len(x) else targets[samples]


def plain(output: SparseTensor | Tensor) -> Tensor:
    return output.feats if isinstance(output, SparseTensor) else output


class OfTensors(nn.Module):
    """A sparse network as a function of coordinates and features of two samples."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, coords: Tensor, feats: Tensor) -> Tensor:
        return plain(self.network(SparseTensor(feats, coords, num_samples=2)))


@each_network
def test_a_small_step_down_the_gradient_lowers_the_loss_as_predicted(factory: Factory) -> None:
    module, x, targets, loss = example(factory, 3)
    before = loss(module(x), targets)
    before.backward()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None] == []
    square = sum(gradient.square().sum().item() for gradient in gradients.values())
    assert square > 0
    step = 1e-8 / square
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= step * parameter.grad
        after = loss(module(x), targets)
    assert (before - after).item() == pytest.approx(step * square, rel=0.05)


@each_network
def test_the_loss_is_a_mean_over_samples_and_no_sample_sees_another(factory: Factory) -> None:
    module, x, targets, loss = example(factory, 5)
    module.eval()
    parts = []
    for samples in ([0, 1], [2, 3, 4]):
        y, aims = part(x, samples, targets)
        parts.append(len(samples) * loss(module(y), aims))
    torch.testing.assert_close(loss(module(x), targets), sum(parts) / 5)


@each_network
@pytest.mark.parametrize("emptied", [0, 1, 2])
def test_an_empty_cloud_in_a_batch_does_not_change_the_others(factory: Factory, emptied: int) -> None:
    module, x, targets, _ = example(factory, 3)
    module.eval()
    kept = [sample for sample in range(3) if sample != emptied]
    found = module(part(x, kept, targets, empty=True)[0])
    wanted = module(part(x, kept, targets)[0])
    if isinstance(found, SparseTensor):
        torch.testing.assert_close(found.feats, wanted.feats)
    else:
        torch.testing.assert_close(found[kept], wanted)
        assert found[emptied].isfinite().all()


@each_network
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_exported_graph_computes_other_clouds(factory: Factory, training: bool) -> None:
    module, x, _, _ = example(factory)
    network = OfTensors(module.train(training))
    sites = Dim.DYNAMIC if training else Dim("sites")
    exported = export(network, (x.coords, x.feats), strict=False, dynamic_shapes=({0: sites}, {0: sites}))
    for number in (40, 130):
        other = example(factory, sites=number)[1]
        shuffled = torch.randperm(len(other))
        arguments = other.coords[shuffled], other.feats[shuffled]
        torch.testing.assert_close(exported.module()(*arguments), network(*arguments))
    called = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert {name for name in called if name.startswith("halopipe")} >= {"halopipe.sparse_conv.default"}
    assert "aten.batch_norm.default" in called


@pytest.mark.parametrize("factory", [minkunet_tiny, sparse_vgg16_tiny], ids=lambda factory: factory.__name__)
def test_compiled_it_computes_the_same_in_one_graph(factory: Factory) -> None:
    module, x, _, _ = example(factory)
    network = OfTensors(module)
    torch._dynamo.reset()
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True),
        shapes_config.patch(translation_validation=False),
    ):
        compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
        found = compiled(x.coords, x.feats)
        found.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in network.parameters()]
    network.zero_grad()
    wanted = network(x.coords, x.feats)
    wanted.square().sum().backward()
    torch.testing.assert_close(found, wanted)
    for one, parameter in zip(gradients, network.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad)


@each_network
def test_prepared_it_reads_maps_alone_and_computes_the_same(factory: Factory) -> None:
    module, x, _, _ = example(factory)
    recipe = record(module, x, module)
    other = example(factory, sites=70)[1]
    tensors = recipe.prepare(other.geometry).values()
    prepared = PreparedNetwork(module, recipe)(other.segments.lengths, other.feats, *tensors)
    torch.testing.assert_close(plain(prepared), plain(module(other)))


def test_the_vgg_is_sparsepipes() -> None:
    with torch.device("meta"):
        network = SparseVGG16(in_channels=1, num_classes=40)
    assert sum(parameter.numel() for parameter in network.parameters()) == 63_182_824  # of the published profiles
    kernels = [tuple(p.shape[1:]) for name, p in network.named_parameters() if name.endswith("kernel")]
    channels = [1, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    assert kernels == list(pairwise(channels))
    names = [type(layer).__name__ for layer in network.features]
    assert names.count("MaxPool3d") == 5
    assert names[:7] == ["Conv3d", "BatchNorm", "ReLU", "Conv3d", "BatchNorm", "ReLU", "MaxPool3d"]


def test_a_stage_of_the_vgg_may_end_in_a_convolution() -> None:
    module, (x, _), _ = sparse_vgg16_tiny(input_shape=(2, SITES, 1), between="convolution")
    assert module(x).shape == (2, 5)
    assert module.features(x).stride == (32, 32, 32)
    with_dropout, *_ = sparse_vgg16(input_shape=(1, 20, 1), width=2, hidden=4, dropout=0.5)
    assert sum(isinstance(layer, nn.Dropout) for layer in with_dropout.modules()) == 2


def test_the_minkunet_has_the_layers_and_names_of_torchsparses() -> None:
    with torch.device("meta"):
        network = MinkUNet(in_channels=4, num_classes=20)
    shapes = {name: tuple(value.shape) for name, value in network.named_parameters()}
    assert shapes["stem.0.kernel"] == (27, 4, 32)
    assert shapes["downs.3.0.0.kernel"] == (8, 128, 128)
    assert shapes["downs.3.1.shortcut.0.kernel"] == (128, 256)
    assert shapes["ups.0.0.0.kernel"] == (8, 256, 256)
    assert shapes["ups.1.1.0.main.0.kernel"] == (27, 128 + 64, 128)
    assert shapes["ups.3.1.1.main.3.kernel"] == (27, 96, 96)
    assert shapes["head.weight"] == (20, 96)


def test_the_resnet_is_a_backbone_without_classes() -> None:
    with torch.device("meta"):
        full = SparseResNetClassifier(in_channels=4, num_classes=None)
    assert sum(name.endswith("kernel") for name, _ in full.named_parameters()) == 21
    small = SparseResNetClassifier(in_channels=4, num_classes=None, channels=(4, 4, 4, 4), blocks=(0, 1, 0, 0))
    y = small(shapes("test", (2, SITES, 4)))
    assert isinstance(y, SparseTensor)
    assert y.stride == (8, 16, 8)


def test_the_backbones_have_the_layers_and_names_of_torchsparses() -> None:
    with torch.device("meta"):
        networks = SparseResUNet42(in_channels=5), SparseResNet21D(width_multiplier=0.5)
    unet, resnet = ({name: tuple(value.shape) for name, value in each.named_parameters()} for each in networks)
    assert unet["stem.3.kernel"] == (27, 32, 32)
    assert unet["encoders.2.1.shortcut.0.kernel"] == (64, 128)
    assert unet["decoders.0.upsample.0.kernel"] == (8, 256, 256)
    assert unet["decoders.1.fuse.0.main.0.kernel"] == (27, 128 + 64, 128)
    assert unet["decoders.3.fuse.1.main.3.kernel"] == (27, 96, 96)
    assert sum(name.endswith("kernel") and "shortcut" not in name for name in unet) == 42
    assert resnet["1.0.0.kernel"] == (27, 8, 16)
    assert resnet["3.2.main.3.kernel"] == (27, 64, 64)
    assert resnet["4.0.0.kernel"] == (3, 64, 64)
    assert sum(name.endswith("kernel") for name in resnet) == 21


def test_the_backbones_return_every_level() -> None:
    x = shapes("test", (2, 4 * SITES, 4))
    levels = SparseResUNet42(width_multiplier=0.125)(x)
    strides = [y.stride[0] for y in levels]
    assert strides == [1, 2, 4, 8, 16, 8, 4, 2, 1]
    assert [y.route for y in levels[5:]] == [y.route for y in levels[3::-1]]
    assert [y.stride for y in SparseResNet21D(width_multiplier=0.25)(x)[-2:]] == [(8, 8, 8), (8, 16, 8)]
    with pytest.raises(SparseInputError, match="found 2 down, 1 up, expected as many up as down"):
        SparseResUNet(4, [4, 4], [4])
    with pytest.raises(SparseInputError, match="stride of a residual block: found 2"):
        ResidualBlock(4, 4, 3, stride=2)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: minkunet(input_shape=(2, 100)), r"minkunet: input_shape \(2, 100\) has 2 dims, needs 3: sample, site"),
        (lambda: sparse_vgg16_tiny(input_shape=(0, 10, 1)), "size below 1"),
        (lambda: MinkUNet(in_channels=1, num_classes=2, channels=(4, 4)), "2 channels, needs an odd number"),
        (
            lambda: SparseResNetClassifier(in_channels=1, num_classes=2, channels=(4, 4), blocks=(1,)),
            "2 channels, but 1 numbers",
        ),
    ],
)
def test_what_makes_no_network_is_refused(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("sites", [1, 7, 500])
def test_a_cloud_has_the_sites_asked_for_in_order(sites: int) -> None:
    x = shapes("test", (3, sites, 2))
    assert x.segments.lengths.tolist() == [sites] * 3
    assert torch.equal(x.order, torch.arange(3 * sites))
    assert not torch.equal(x.coords[:sites, 1:], x.coords[sites : 2 * sites, 1:]) or sites < 10


def test_the_sites_of_a_cloud_have_neighbours_as_on_a_surface() -> None:
    x = shapes("test", (2, 3224, 1))
    pairs = x.geometry.map(MapSpec((), (), (3, 3, 3))).num_pairs() / len(x)
    assert 7 < pairs < 18


def test_examples_do_not_depend_on_the_global_generator_but_parameters_do() -> None:
    one, first, labels, _ = example(minkunet_tiny)
    other, second, same, _ = example(minkunet_tiny)
    assert torch.equal(first.coords, second.coords)
    assert torch.equal(first.feats, second.feats)
    assert torch.equal(labels, same)
    assert not torch.equal(one.head.weight, other.head.weight)


def test_the_large_factories_scale_with_their_width() -> None:
    module, *_ = minkunet(input_shape=(1, 30, 2), num_classes=3, width=0.125)
    assert module.stem[0].kernel.shape == (27, 2, 4)
    module, *_ = sparse_resnet(input_shape=(1, 30, 2), num_classes=3, width=0.25)
    assert module.stem[0][0].kernel.shape == (27, 2, 4)
