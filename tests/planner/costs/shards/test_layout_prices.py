"""Layouts that planners look at, and by hand what sums, ways to contract and values cost under them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from planner.costs.communication.collectives import collective_s
from planner.costs.cost_model import CostModel
from planner.costs.shards.device_mesh import axes_of, candidate_layouts
from planner.costs.shards.partial_sums import reduction_rate
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import LayoutPrices
from planner.costs.stages.stage_cost import stage_cost, with_ways
from planner.ir.cluster import (
    GRADIENT_SUMS,
    PARTIAL_SUMS,
    STATISTICS,
    WITHIN_HOST,
    Collective,
)
from planner.ir.layout import Layout
from planner.layers.boxes import as_tuples
from tests.oracles.boxes import grown, parts
from tests.planner.networks import BYTES_PER_S, Named, Network, plain, priced, residual
from tests.planner.solvers.laid_out_plans import EVERYTHING, MADE

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


def test_boxes_of_different_names_are_one_candidate() -> None:
    profile = priced(*plain(), speeds=(1.0, 1.0))
    prices = LayoutPrices(CostModel(profile), (0, 1), 1, ("sample",))
    assert [option.layout for option in prices.options(0)] == [Layout({"replica": (0, 1, 2)})]


BANDWIDTH = 1e10


def test_a_cut_of_channels_cuts_the_weights_and_needs_no_sum() -> None:
    prices = prices_of(plain(filters=(8, 8)), latency_s=0.0)
    tables = prices.layer(2, (C2, S2, H2, ALL))
    size = 8 * 8 * 3 * 3 * 4
    assert tables.parameter_bytes.tolist() == [[size / 2] * 2, [size] * 2, [size] * 2, [size] * 2]
    assert tables.reduction_s[0] == 0
    assert tables.reduction_s[1:] == pytest.approx([size / BANDWIDTH] * 3)  # a ring of 2 moves n bytes
    assert tables.update_s[0] == pytest.approx([size / 2 / BYTES_PER_S] * 2)


def test_statistics_are_summed_where_samples_or_space_are_cut() -> None:
    prices = prices_of(residual())
    norm = next(k for k, layer in enumerate(prices.layers) if layer.kind == "batch_norm")
    forward, backward = prices.layer(norm, (S2, H2, C2, ALL)).statistics_s
    cost_model = prices.cost_model.norms_s((0, 1))
    expected = [float(sums[norm + 1] - sums[norm]) for sums in cost_model]
    assert forward == pytest.approx([expected[0], expected[0], 0, expected[0]])  # copies take part
    assert backward == pytest.approx([expected[1], expected[1], 0, expected[1]])


def test_a_tied_parameter_is_held_and_summed_once() -> None:
    network, end = plain(filters=(8, 8))
    first = network.layers[2]
    network.conv(end, 8)
    last = network.layers.pop()
    tied = type(last)(last.name, last.kind, last.inputs, last.outputs, first.parameters, last.attributes)
    network.layers.append(tied)
    del network.parameters[f"{last.name}.p0"]
    prices = prices_of((network, (last.name, last.outputs[0])))
    index = [layer.name for layer in prices.layers].index(last.name)
    assert prices.layer(index, (S2,)).parameter_bytes.tolist() == [[0, 0]]
    assert prices.layer(2, (S2,)).parameter_bytes.tolist() == [[8 * 8 * 9 * 4] * 2]


def test_a_value_that_is_read_twice_moves_once() -> None:
    network = Network(4, 3, 16)
    x = network.relu(network.image)
    prices = prices_of((network, network.concat(x, x)))
    # Of 6 channels each rank makes 3: the first all of one copy, the second all of the other.
    assert prices.crossing(0, 1, (S2,), (C2,)).moved_bytes[0, 0] == 4 * 3 * 16 * 16 * 4
    assert prices.crossing(0, 1, (C2,), (C2,)).moved_bytes[0, 0] == 4 * 3 * 16 * 16 * 4


def random_prices(draw: random.Random) -> LayoutPrices:
    count = draw.randint(2, 6)
    profile = priced(*draw.choice(MADE), speeds=[draw.choice([1.0, 2.5]) for _ in range(count)])
    return LayoutPrices(CostModel(profile), tuple(range(count)), draw.choice([2, 3, 4]), EVERYTHING, halo_depth=2)


@pytest.mark.cases(10)
@pytest.mark.parametrize("seed", range(25))
def test_every_rank_does_holds_and_reads_what_loops_over_ranks_say(seed: int) -> None:
    prices = random_prices(random.Random(seed))
    for index in range(len(prices.layers)):
        sized = prices.sized(index)
        options = prices.options(index)
        shards = prices.shards(index, options)
        relation = sized.relation
        specs = (sized.work, *sized.layer.outputs)
        for k, option in enumerate(options):
            own = [parts(option.layout, spec, prices.samples) for spec in specs]
            held = [
                tuple(grown(box, spec, option.layout, option.margin) for box in boxes)
                for boxes, spec in zip(own, specs, strict=True)
            ]
            read = [relation.input_boxes(sized.layer, sized.inputs, box) for box in held[0]]
            used = [relation.weight_boxes(sized.layer, sized.parameters, box) for box in held[0]]
            assert [as_tuples(boxes[k]) for boxes in (shards.own, *shards.owned)] == own
            assert [as_tuples(boxes[k]) for boxes in (shards.done, *shards.held)] == held
            assert [as_tuples(boxes[k]) for boxes in shards.needed] == [*zip(*read, strict=True)]
            assert [as_tuples(boxes[k]) for boxes in shards.weights] == [*zip(*used, strict=True)]
