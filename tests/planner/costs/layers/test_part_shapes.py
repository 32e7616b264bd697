"""Which parts are worth measuring: all that the candidates' layouts give to any rank, and no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.costs.cost_model import CostModel
from planner.costs.layers.shards import group_sizes, part_of, part_shapes
from planner.costs.stages.layouts import LayoutPrices
from planner.ir.profile import Profile
from tests.planner.networks import Named, Network, mesh_like, plain, priced, residual

Parts = set[tuple[str, int, tuple[int, ...]]]


def in_candidates(profile: Profile, sizes: tuple[int, ...], allow: tuple[str, ...], num_ranks: int) -> Parts:
    """(layer, samples, extents) of every rank's box under every option that a search looks at."""
    found: Parts = set()
    cost_model = CostModel(profile)
    for size in sizes:
        for count in group_sizes(num_ranks):
            prices = LayoutPrices(cost_model, tuple(range(count)), size, allow)
            for index, layer in enumerate(prices.layers):
                shards = prices.shards(index, prices.options(index))
                whole = part_of(shards.sized, shards.sized.work.shape)
                for samples, boxes in zip(shards.samples, shards.done, strict=True):
                    for count_here, box in zip(samples.tolist(), boxes, strict=True):
                        part = part_of(shards.sized, [stop - start for start, stop in box.tolist()])
                        if part != whole and 0 not in part:
                            found.add((layer.name, count_here, part))
    return found


@pytest.mark.parametrize("make", [plain, residual, mesh_like])
@pytest.mark.parametrize("allow", [("sample", "spatial"), ("spatial",), ("channel",), ("sample", "spatial", "channel")])
def test_parts_are_those_of_all_candidate_layouts(
    make: Callable[[], tuple[Network, Named]], allow: tuple[str, ...]
) -> None:
    profile = priced(*make(), speeds=(1.0,) * 4)
    found = part_shapes(profile.graph, (1, 2, 4), allow, 4)
    said = [(layer, shape.samples, shape.part) for shape in found for layer in shape.layers]
    assert set(said) == in_candidates(profile, (1, 2, 4), allow, 4)
    assert len(set(said)) == len(said) > 0


def test_uneven_extents_give_both_parts() -> None:
    network = Network(1, 3, 7)
    profile = priced(network, network.conv(network.image, 5))
    shapes = part_shapes(profile.graph, (1,), ("spatial",), 2)
    found = {shape.part for shape in shapes if shape.layers == ("conv0",)}
    assert found == {(5, 4, 7), (5, 3, 7), (5, 7, 4), (5, 7, 3)}


def test_layers_that_are_alike_are_measured_once() -> None:
    profile = priced(*plain(filters=(8, 8, 8)))
    convs = {s.layers for s in part_shapes(profile.graph, (4,), ("spatial",), 2) if s.layers[0].startswith("conv")}
    assert convs == {("conv0",), ("conv2", "conv4")}


def test_a_layer_that_needs_no_gradient_of_its_input_is_not_like_one_that_does() -> None:
    network = Network(2, 8, 16)
    profile = priced(network, network.conv(network.conv(network.image, 8), 8))
    assert {s.layers for s in part_shapes(profile.graph, (2,), ("spatial",), 2)} >= {("conv0",), ("conv1",)}


def test_samples_alone_make_no_parts() -> None:
    profile = priced(*residual(), speeds=(1.0,) * 4)
    assert part_shapes(profile.graph, (1, 2, 4), ("sample",), 4) == ()
    assert part_shapes(profile.graph, (1, 2, 4), ("sample", "spatial", "channel"), 1) == ()


@pytest.mark.parametrize(
    ("num_ranks", "sizes"), [(1, ()), (2, (2,)), (3, (2, 3)), (6, (2, 3, 4, 6)), (8, (2, 4, 8)), (9, (2, 3, 4, 8, 9))]
)
def test_groups_are_powers_and_divisors(num_ranks: int, sizes: tuple[int, ...]) -> None:
    assert group_sizes(num_ranks) == sizes
