"""Factories that return clouds: a model on tensors, and a graph whose maps are inputs and whose sites vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.nn import SparseTensor
from cuda_ops.sparse.recipe import PreparedNetwork
from planner.ir.errors import FactoryError
from planner.ir.graph import SAMPLE, Graph
from planner.ir.profile import ModelSource
from planner.layers import check_samples_apart
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule

torch.set_num_threads(1)
COORDINATES = torch.tensor(
    [[0, 0, 0, 1], [1, 2, 2, 2], [0, 0, 0, 0], [0, 3, 3, 3], [1, 2, 2, 1], [0, 1, 1, 1], [1, 5, 5, 5]],
    dtype=torch.int32,
)
FEATURES = torch.arange(14.0).view(7, 2)
ORDER = [2, 0, 5, 3, 4, 1, 6]
"""Rows of the points, sorted."""


class Segmentation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fine = spnn.Conv3d(2, 3, 3)
        self.norm = spnn.BatchNorm(3)
        self.down = spnn.Conv3d(3, 3, 2, 2)
        self.up = spnn.Conv3d(3, 3, 2, 2, transposed=True)

    def forward(self, x: SparseTensor) -> SparseTensor:
        x = self.norm(self.fine(x))
        return x + self.up(self.down(x))


class Classification(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(spnn.Conv3d(2, 3, 3), spnn.MaxPool3d(2), spnn.GlobalMaxPool())

    def forward(self, x: SparseTensor) -> Tensor:
        return self.layers(x)


def tensor() -> SparseTensor:
    return SparseTensor(FEATURES, COORDINATES)


def segmentation() -> Any:
    return Segmentation(), (tensor(), torch.tensor([0, 1, 2, 0, 1, 2, 0])), spnn.SiteCrossEntropy()


def classification() -> Any:
    return Classification(), ((tensor(),), torch.tensor([2, 1])), nn.functional.cross_entropy


def one_cloud() -> Any:
    x = SparseTensor(FEATURES[:3], torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 1]], dtype=torch.int32))
    return Classification(), (x, torch.tensor([2])), nn.functional.cross_entropy


def without_loss() -> Any:
    return Segmentation(), tensor()


def two_inputs() -> Any:
    return Segmentation(), ((tensor(), torch.zeros(2)), torch.zeros(2)), nn.functional.mse_loss


def wrong_channels() -> Any:
    return spnn.Conv3d(5, 3, 3), (tensor(), torch.zeros(2)), spnn.SiteCrossEntropy()


def wrong_targets() -> Any:
    return Segmentation(), (tensor(), torch.zeros(5, dtype=torch.int64)), spnn.SiteCrossEntropy()


def model_of(factory: Callable[[], Any]) -> LoadedModel:
    torch.manual_seed(0)
    return load_model(ModelSource(f"{__name__}:{factory.__name__}", dtype="float64"))


def test_the_users_batch_is_samples_first_and_in_the_order_of_sites() -> None:
    model = model_of(segmentation)
    (coordinates, features, counts), (targets,) = model.fed
    assert counts.tolist() == [4, 3]
    assert (coordinates.shape, features.shape, targets.shape) == ((2, 4, 3), (2, 4, 2), (2, 4))
    assert coordinates[0].tolist() == COORDINATES[ORDER[:4], 1:].tolist()
    assert coordinates[1, :3].tolist() == COORDINATES[ORDER[4:], 1:].tolist()
    assert features[1, :3].tolist() == FEATURES[ORDER[4:]].tolist()
    assert targets[0].tolist() == [2, 0, 2, 0]
    assert targets[1, :3].tolist() == [1, 1, 0]
    assert features.dtype == torch.float64


def test_the_models_inputs_are_what_the_preparation_names() -> None:
    model = model_of(segmentation)
    preparation = model.clouds.preparation
    assert isinstance(model.module, PreparedNetwork)
    assert len(model.inputs) == preparation.num_inputs
    assert preparation.per_site == (True,)
    assert torch.equal(model.inputs[1], FEATURES[ORDER].double())
    assert torch.equal(model.targets[0], torch.tensor([0, 1, 2, 0, 1, 2, 0])[ORDER])
    assert list(model.module.state_dict()) == list(Segmentation().state_dict())


@pytest.mark.parametrize("factory", [segmentation, classification])
def test_the_loss_of_the_users_batch_is_the_networks(factory: Callable[[], Any]) -> None:
    model = model_of(factory)
    network, (x, targets), loss = factory()
    network.double().load_state_dict(model.module.state_dict())
    x = (x[0] if isinstance(x, tuple) else x).double()
    targets = targets[x.order] if factory is segmentation else targets
    assert float(model.loss(*model.fed).detach()) == pytest.approx(float(loss(network(x), targets).detach()), rel=1e-14)


def test_without_a_loss_it_is_the_mean_of_the_squares_of_features() -> None:
    model = model_of(without_loss)
    network = Segmentation().double()
    network.load_state_dict(model.module.state_dict())
    expected = network(tensor().double()).feats.square().mean()
    assert float(model.loss(*model.fed).detach()) == pytest.approx(float(expected.detach()), rel=1e-14)


def test_one_cloud_is_taken_twice() -> None:
    """One is special to the capture."""
    model = model_of(one_cloud)
    assert model.samples == 2
    assert model.inputs[0].tolist() == [3, 3]
    assert model.targets[0].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        (two_inputs, "two_inputs returned a SparseTensor among other inputs\n  2 inputs"),
        (wrong_channels, "does not take its clouds\n.*number of channels: found 2, expected 5"),
        (wrong_targets, "does not take its clouds\n.*target"),
    ],
)
def test_factories_that_cannot_be_run_on_their_clouds_are_refused(factory: Callable[[], Any], says: str) -> None:
    with pytest.raises(FactoryError, match=says):
        model_of(factory)


@pytest.fixture(scope="module")
def captured() -> CapturedModule:
    return capture(model_of(segmentation))


def test_maps_are_inputs_of_the_graph_and_sites_are_sizes(captured: CapturedModule) -> None:
    graph = captured.graph
    dims = {name: spec.dims for name, spec in graph.inputs.items()}
    named = dict(zip(captured.preparation.names, dims.values(), strict=True))
    assert named == {
        "lengths": (SAMPLE,),
        "features": ("sites", "channel"),
        "neighbours_0": ("dim0", "sites"),
        "reverse_0": ("dim0", "sites"),
        "neighbours_1": ("dim0", "sites_1"),
        "reverse_1": ("dim0", "sites"),
        "starts_0": (SAMPLE,),
        "lengths_0": (SAMPLE,),
        "target_0": ("sites",),
    }
    assert captured.polymorphic
    assert set(captured.sizes) == {"sites", "sites_1"}
    assert {name: graph.inputs[source].shape[dim] for name, (source, dim) in captured.sizes.items()} == {
        "sites": 7,
        "sites_1": sites_at_half(),
    }
    assert list(captured.raw) == ["coordinates", "features", "counts", "targets"]
    assert captured.raw["coordinates"].dims == (SAMPLE, "points", "dim2")
    assert captured.raw["counts"].dims == (SAMPLE,)


def sites_at_half() -> int:
    halves = torch.cat([COORDINATES[:, :1], COORDINATES[:, 1:].div(2, rounding_mode="floor")], 1)
    return len(halves.unique(dim=0))


def test_layers_know_their_pairs_and_where_their_sites_are(captured: CapturedModule) -> None:
    model = model_of(segmentation)
    graph = captured.graph
    layers = {layer.name: layer for layer in graph.layers}
    pairs = [int((model.inputs[index] >= 0).sum()) for index in (2, 4)]
    assert layers["fine"].attributes["pairs"] == pairs[0] > 7
    assert layers["down"].attributes["pairs"] == layers["up"].attributes["pairs"] == pairs[1] == 7
    assert [layers[name].kind for name in ("fine", "norm", "down", "up")] == [
        "sparse_conv",
        "batch_norm",
        "sparse_conv",
        "sparse_conv",
    ]
    assert [layers[name].outputs[0].dims[0] for name in ("fine", "down", "up")] == ["sites", "sites_1", "sites"]
    assert layers["up"].inputs[1:] == layers["down"].inputs[:0:-1]
    assert layers["down"].parameters == ("down.kernel",)
    assert not captured.mixing or set(captured.mixing) <= {"norm"}


def test_reductions_leave_samples(captured: CapturedModule) -> None:
    graph: Graph = capture(model_of(classification)).graph
    kinds = [(layer.kind, layer.outputs[0].dims) for layer in graph.layers]
    assert kinds == [
        ("sparse_conv", ("sites", "channel")),
        ("sparse_pool", ("sites_1", "channel")),
        ("segment", (SAMPLE, "channel")),
        ("loss", ()),
    ]


@pytest.mark.parametrize("samples", [(0,), (1, 0, 1), (0, 1, 1, 0, 0)], ids=str)
def test_the_captured_network_runs_on_other_clouds(captured: CapturedModule, samples: tuple[int, ...]) -> None:
    """More samples, other numbers of sites, and a cloud without any."""
    model = model_of(segmentation)
    index = list(samples)
    coordinates, features, counts = (each[index] for each in model.fed[0])
    counts = torch.where(torch.arange(len(index)) == 2, 0, counts)
    batch = (coordinates, features, counts), (model.fed[1][0][index],)
    inputs, targets = model.clouds.prepared(*batch)
    given = dict(zip(captured.graph.inputs, (*inputs, *targets), strict=True))
    sizes = [given[source].shape[dim] for source, dim in captured.sizes.values()]
    (found,) = [captured.graph_module(len(index), *sizes, *given.values())]
    found = found[0] if isinstance(found, tuple) else found
    assert float(found.detach()) == pytest.approx(float(model.loss(*batch).detach()), rel=1e-13)


@pytest.mark.parametrize(
    "name", ["minkunet:minkunet_tiny", "sparse_vgg:sparse_vgg16_tiny", "sparse_resnet:sparse_resnet_tiny"]
)
def test_no_layer_of_the_reference_networks_mixes_samples(name: str) -> None:
    model = load_model(ModelSource(f"profiler.models.{name}"))
    assert check_samples_apart(capture(model).graph) == ()
