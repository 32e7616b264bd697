"""Candidate layouts: every grid once, shares by speed, more freedom only adds."""

from __future__ import annotations

from planner.costs.cost_model import CostModel
from planner.costs.shards.device_mesh import at_least_one, axes_of, candidate_layouts, proportional
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import LayoutPrices
from planner.ir.layout import Layout
from tests.planner.networks import plain, priced, residual

EQUAL = (1.0,) * 4


def grids_of(allow: tuple[str, ...], speeds: tuple[float, ...] = EQUAL, index: int = 0, samples: int = 4) -> list[str]:
    profile = priced(*plain(), speeds=speeds)
    prices = LayoutPrices(CostModel(profile), tuple(range(len(speeds))), samples, allow)
    layouts = candidate_layouts(prices.sized(index), speeds, axes_of(profile.graph, allow))
    return [str(ShardingSpec.of(layout)) for layout in layouts]


def test_samples_alone_are_cut_or_held_by_all() -> None:
    assert grids_of(("sample",)) == ["sample:4", "sample:2 x replica:2", "replica:4"]


def test_samples_vary_slowest_and_channels_fastest() -> None:
    found = grids_of(("sample", "spatial", "channel"))
    assert "sample:2 x height:2" in found
    assert "height:2 x channel:2" in found
    assert not any(text.startswith("channel:2 x height") for text in found)
    assert len(found) == len(set(found)) == 15  # ways to write 4 as a product of 5 ordered factors


def test_no_rank_is_left_without_work() -> None:
    assert grids_of(("sample",), samples=2) == ["sample:2 x replica:2", "replica:4"]
    assert grids_of(("sample",), samples=1) == ["replica:4"]


def test_an_axis_that_a_layer_lacks_is_held_by_all_along_it() -> None:
    profile = priced(*residual(), speeds=EQUAL)
    names = [layer.kind for layer in profile.graph.layers]
    prices = LayoutPrices(CostModel(profile), (0, 1, 2, 3), 4, ("sample", "spatial"))
    found = {str(option) for option in prices.options(names.index("linear"))}
    assert found == {"replica:4", "sample:2 x replica:2", "sample:4", "replica:2 x sample:2"} - {"replica:2 x sample:2"}
    assert {str(option) for option in prices.options(names.index("conv"))} > {
        "height:2 x width:2",
        "sample:2 x width:2",
    }


def test_unequal_devices_get_unequal_shares() -> None:
    profile = priced(*plain(samples=8), speeds=(1.0, 3.0))
    prices = LayoutPrices(CostModel(profile), (0, 1), 8, ("sample", "spatial"))
    cuts = {option.cuts for option in prices.options(0)}
    assert {(("sample", (0, 2, 8)),), (("height", (0, 4, 16)),), (("width", (0, 4, 16)),)} <= cuts


def test_more_freedom_only_adds_layouts() -> None:
    profile = priced(*residual(height=8), speeds=(1.0, 2.0, 1.0, 2.0))
    cost_model = CostModel(profile)
    families = (("sample",), ("sample", "spatial"), ("sample", "spatial", "channel"))
    for index in range(len(profile.graph.layers)):
        narrower: set[ShardingSpec] = set()
        for allow in families:
            options = set(LayoutPrices(cost_model, (0, 1, 2, 3), 4, allow).options(index))
            assert options >= narrower
            narrower = options


def test_shares_are_whole_and_sum_to_the_extent() -> None:
    assert proportional(10, (1.0, 1.0, 1.0, 1.0)) == (3, 3, 2, 2)
    assert proportional(8, (1.0, 3.0)) == (2, 6)
    assert at_least_one((0, 5, 0, 1)) == (1, 3, 1, 1)
    assert at_least_one((0, 1)) == (0, 1)


def test_boxes_of_different_names_are_one_candidate() -> None:
    profile = priced(*plain(), speeds=(1.0, 1.0))
    prices = LayoutPrices(CostModel(profile), (0, 1), 1, ("sample",))
    assert [option.layout for option in prices.options(0)] == [Layout({"replica": (0, 1, 2)})]
