"""Sums over ranks: pending ones, and ways to contract that a plan fixes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.costs.communication.collectives import collective_s
from planner.costs.cost_model import CostModel
from planner.costs.shards.partial_sums import reduction_rate
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import LayoutPrices
from planner.costs.stages.stage_cost import stage_cost, with_ways
from planner.ir.cluster import GRADIENT_SUMS, PARTIAL_SUMS, STATISTICS, WITHIN_HOST, Collective
from tests.planner.networks import Named, Network, priced

EVERYTHING = ("sample", "spatial", "channel")
H2, S2, C2, ALL = (ShardingSpec(((dim, (0, 1, 2)),)) for dim in ("height", "sample", "channel", "replica"))


def prices_of(made: tuple[Network, Named], ranks: int = 2, samples: int = 4, **how: object) -> LayoutPrices:
    profile = priced(*made, **{"speeds": (1.0,) * ranks, "latency_s": 1e-5, **how})  # type: ignore[arg-type]
    return LayoutPrices(CostModel(profile), tuple(range(ranks)), samples, EVERYTHING)


def pooled() -> tuple[Network, Named]:
    network = Network(4, 8, 16)
    return network, network.pool_all(network.relu(network.image))


def summed_s(prices: LayoutPrices, ranks: tuple[int, ...], num_bytes: int) -> float:
    return float(collective_s(prices.cost_model.profile.cluster, STATISTICS, ranks, num_bytes))


def test_a_global_pool_over_cut_space_sums_its_output_there_and_back() -> None:
    prices = prices_of(pooled())
    forward, backward = prices.layer(1, (H2, S2, C2, ALL)).statistics_s
    expected = summed_s(prices, (0, 1), 4 * 8 * 4)
    assert expected > 0
    assert forward == pytest.approx([expected, 0, 0, expected])  # copies take part in the sum
    assert backward == pytest.approx([expected, 0, 0, expected])


def test_what_each_rank_computes_around_a_sum_and_around_its_gradients_is_paid_by_those_that_meet() -> None:
    profile = priced(*pooled(), speeds=(1.0, 1.0), latency_s=1e-5)
    calls = tuple(
        Collective(each, 1, WITHIN_HOST, ((64, 0.5), (1 << 20, 0.5))) for each in (PARTIAL_SUMS, GRADIENT_SUMS)
    )
    known = replace(profile, cluster=replace(profile.cluster, collectives=(*profile.cluster.collectives, *calls)))
    before, after = (LayoutPrices(CostModel(each), (0, 1), 4, EVERYTHING) for each in (profile, known))
    for index in range(len(before.layers)):
        longer, shorter = (each.layer(index, (H2, S2, C2, ALL)).statistics_s for each in (after, before))
        assert longer - shorter == pytest.approx(np.array([[0.5, 0, 0, 0.5]] * 2) * (index == 1))
    total = int(CostModel(profile).tables.graph.parameter_bytes[-1])
    rates = [reduction_rate(CostModel(each), (0, 1)) for each in (profile, known)]
    assert (rates[1] - rates[0]) * total == pytest.approx(0.5 if total else 0.0)
    assert reduction_rate(CostModel(known), (0,)) == 0.0


def test_only_ranks_with_parts_of_one_sum_meet() -> None:
    prices = prices_of(pooled(), ranks=4)
    mixed = ShardingSpec((("sample", (0, 1, 2)), ("height", (0, 1, 2))))
    forward, _ = prices.layer(1, (mixed,)).statistics_s
    assert forward[0] == pytest.approx(summed_s(prices, (0, 1), 2 * 8 * 4))


def test_the_loss_costs_no_sum() -> None:
    prices = prices_of(pooled())
    assert prices.layers[-1].kind == "loss"
    assert not prices.layer(len(prices.layers) - 1, (S2,)).statistics_s.any()


def test_a_pool_costs_half_on_half_of_the_image_and_is_held_whole() -> None:
    prices = prices_of(pooled())
    table = prices.layer(1, (H2,))
    assert table.shards.share.tolist() == [[0.5, 0.5]]
    assert (table.shards.owned[0][0, 0] == table.shards.owned[0][0, 1]).all()


def narrowing() -> tuple[Network, Named]:
    """64 channels, then 2: sharing input channels moves less than gathering them."""
    network = Network(4, 8, 16)
    return network, network.conv(network.conv(network.image, 64), 2)


def test_what_is_cheapest_is_what_is_written_down_and_priced() -> None:
    prices = prices_of(narrowing())
    chosen = {0: C2, 1: C2}
    settled = with_ways(prices, chosen)
    assert {index: option.ways for index, option in settled.items()} == {0: 1, 1: 2}
    assert stage_cost(prices, settled).exchange_forward_s == stage_cost(prices, chosen).exchange_forward_s
    for index, option in settled.items():
        assert ShardingSpec.placed(option.placement(3)) == option, index


def test_a_fixed_number_of_ways_is_kept_though_it_costs_more() -> None:
    prices = prices_of(narrowing())
    gathered = ShardingSpec(C2.cuts, ways=1)
    assert with_ways(prices, {0: C2, 1: gathered})[1].ways == 1
    crossing = prices.crossing(0, 1, (C2,), (gathered, ShardingSpec(C2.cuts, ways=2), C2))
    assert crossing.ways.tolist() == [[1, 2, 2]]
    assert crossing.forward_s[0, 0] > crossing.forward_s[0, 1] == crossing.forward_s[0, 2]
    assert crossing.moved_bytes[0].tolist() == [4 * 64 * 16 * 16 * 4, 4 * 2 * 16 * 16 * 4, 4 * 2 * 16 * 16 * 4]


def test_partial_sums_of_what_is_read_from_outside_are_paid_for() -> None:
    prices = prices_of(narrowing())
    alone = {way: stage_cost(prices, {1: ShardingSpec(C2.cuts, ways=way)}).exchange_forward_s for way in (1, 2)}
    assert alone[1] == 0
    inside = prices.crossing(0, 1, (C2,), (ShardingSpec(C2.cuts, ways=2),)).forward_s[0, 0]
    assert alone[2] == pytest.approx(inside)  # nothing but the sums moves in either


def test_ways_that_do_not_exist_are_one_way() -> None:
    prices = prices_of(narrowing(), ranks=3, samples=3)
    thirds = ShardingSpec((("sample", (0, 1, 2, 3)),), ways=2)
    assert prices.crossing(0, 1, (thirds,), (thirds,)).ways.tolist() == [[1]]
