"""What a network asks of its geometry is noted once; given it back, the prepared network is the network."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from cuda_ops.sparse import nn as spnn
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import BuiltGeometry, MapSpec, RouteStep
from cuda_ops.sparse.nn import SparseTensor
from cuda_ops.sparse.recipe import GivenGeometry, PreparedNetwork, Recipe, record

torch.set_num_threads(1)
HALF = RouteStep("strided", (2, 2, 2), (2, 2, 2))


class Unet(nn.Module):
    """With a parameter and buffers of its own, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(spnn.Conv3d(2, 4, 3), spnn.BatchNorm(4), spnn.ReLU(), spnn.Dropout(0.5))
        self.down = spnn.Conv3d(4, 6, 2, 2)
        self.inner = spnn.Conv3d(6, 6, 3)
        self.up = spnn.Conv3d(6, 4, 2, 2, transposed=True)
        self.again = spnn.Conv3d(4, 4, 3)
        self.pool = spnn.GlobalAvgPool()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("hidden", torch.ones(1), persistent=False)

    def forward(self, x: SparseTensor) -> Tensor:
        fine = self.first(x)
        joined = self.again(fine + self.up(self.inner(self.down(fine))))
        return self.pool(joined) * self.weight * self.scale * self.hidden


def clouds(seed: int = 0, samples: int = 3) -> SparseTensor:
    generator = torch.Generator().manual_seed(seed)
    found = [torch.unique(torch.randint(-3, 3, (25 + 7 * s, 3), generator=generator), dim=0) for s in range(samples)]
    coordinates = torch.cat([torch.cat([torch.full((len(c), 1), s), c], 1) for s, c in enumerate(found)]).int()
    return SparseTensor(torch.randn(len(coordinates), 2, generator=generator), coordinates)


def called(network: nn.Module, recipe: Recipe, x: SparseTensor) -> Tensor:
    tensors = recipe.prepare(x.geometry)
    assert tuple(tensors) == recipe.names
    return PreparedNetwork(network, recipe)(x.geometry.segments(()).lengths, x.feats, *tensors.values())


def test_maps_are_noted_once_in_the_order_in_which_they_are_asked_for() -> None:
    recipe = record(network := Unet(), clouds(), network)
    assert recipe == Recipe(
        (
            MapSpec((), (), (3, 3, 3)),
            MapSpec((), (HALF,), (2, 2, 2), (2, 2, 2)),
            MapSpec((HALF,), (HALF,), (3, 3, 3)),
        ),
        ((),),
    )
    maps = [f"{half}_{index}" for index in range(3) for half in ("neighbours", "reverse")]
    assert recipe.names == (*maps, "starts_0", "lengths_0")
    assert recipe.routes == ((), (HALF,))
    assert recipe.sites["neighbours_1"] == {1: (HALF,)}
    assert recipe.sites["reverse_1"] == {1: ()}
    assert recipe.sites["starts_0"] == {}


def test_a_route_stands_behind_those_that_lead_to_it() -> None:
    deep = MapSpec((HALF, HALF), (HALF, HALF), (3, 3, 3))
    assert Recipe((deep,), ()).routes == ((), (HALF,), (HALF, HALF))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("training", [False, True])
def test_the_prepared_network_is_the_network(seed: int, training: bool) -> None:
    """On other clouds than those it was recorded on as well, forward and backward; buffers too."""
    torch.manual_seed(0)
    network = Unet().train(training)
    network.first[3].p = 0.0
    twin = copy.deepcopy(network)
    recipe = record(network, clouds(), network)
    x = clouds(seed, 4 - seed)
    expected = twin(x)
    found = called(network, recipe, x)
    assert torch.equal(found, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    for (name, there), here in zip(twin.named_parameters(), network.parameters(), strict=True):
        assert torch.equal(here.grad, there.grad), name
    for (name, there), here in zip(twin.named_buffers(), network.buffers(), strict=True):
        assert torch.equal(here, there), name


def test_names_are_those_of_the_network_and_values_the_very_same() -> None:
    network = Unet()
    prepared = PreparedNetwork(network, record(network, clouds(), network))
    assert list(prepared.state_dict()) == list(network.state_dict())
    assert "hidden" not in prepared.state_dict()
    for name, parameter in network.named_parameters():
        assert prepared.get_parameter(name) is parameter
    assert [name for name, _ in prepared.named_buffers()] == [name for name, _ in network.named_buffers()]


def test_a_cast_or_a_copy_is_of_the_network_as_well() -> None:
    """Buffers are replaced by a cast, not written."""
    network = Unet().eval()
    x = clouds()
    prepared = PreparedNetwork(network, record(network, x, network)).double().eval()
    assert {each.dtype for each in (*network.parameters(), *network.buffers())} == {torch.float64, torch.int64}
    twin = copy.deepcopy(prepared)
    twin.user_module.scale.zero_()
    assert twin.scale.sum() == 0
    assert prepared.scale.sum() == 8
    tensors = prepared.recipe.prepare(x.geometry).values()
    out = prepared(x.geometry.segments(()).lengths, x.feats.double(), *tensors)
    torch.testing.assert_close(out, network(x.double()), rtol=0, atol=0)


def test_a_layer_alone_may_be_the_network() -> None:
    layer = spnn.Conv3d(2, 3, 3)
    x = clouds()
    prepared = PreparedNetwork(layer, record(layer, x, layer))
    assert list(prepared.state_dict()) == ["kernel"]
    assert torch.equal(called(layer, prepared.recipe, x).feats, layer(x).feats)


def test_training_mode_reaches_the_network() -> None:
    network = Unet()
    prepared = PreparedNetwork(network, record(network, clouds(), network))
    assert not prepared.eval().user_module.training
    assert not network.first.training
    assert prepared.train().user_module.training


def test_recording_leaves_buffers_random_numbers_and_gradients_alone() -> None:
    network = Unet()
    before = copy.deepcopy(network.state_dict())
    state = torch.get_rng_state()
    record(network, clouds(), network)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in network.parameters())


def test_what_a_layer_made_is_no_input_of_a_network() -> None:
    network = spnn.Conv3d(2, 2, 2, 2)
    x = clouds()
    with pytest.raises(SparseInputError, match="found a tensor after 1 steps"):
        record(network, network(x), network)
    recipe = record(network, x, network)
    given = GivenGeometry(recipe, recipe.prepare(x.geometry), len(x), 3)
    with pytest.raises(SparseInputError, match="what a network is recorded on"):
        record(network, SparseTensor.on(given, x.feats), network)


def test_a_given_geometry_has_what_was_recorded_and_no_more() -> None:
    network = Unet()
    x = clouds()
    recipe = record(network, x, network)
    given = GivenGeometry(recipe, recipe.prepare(x.geometry), len(x), 3)
    assert given.num_samples == 3
    assert [given.num_sites(route) for route in recipe.routes] == [x.geometry.num_sites(r) for r in recipe.routes]
    assert torch.equal(given.map(recipe.maps[1]).reverse, x.geometry.map(recipe.maps[1]).reverse)
    assert torch.equal(given.segments(()).lengths, x.geometry.segments(()).lengths)
    with pytest.raises(SparseInputError, match=r"not recorded: .* expected one of 3 maps and 1 site sets"):
        given.map(MapSpec((), (), (5, 5, 5)))
    with pytest.raises(SparseInputError, match="not recorded"):
        given.segments((HALF,))
    with pytest.raises(SparseInputError, match="coordinates in a prepared network"):
        given.coordinates(())


def test_the_geometry_of_an_example_is_built() -> None:
    assert isinstance(clouds().geometry, BuiltGeometry)
