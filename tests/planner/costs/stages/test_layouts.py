"""Prices of layers under layouts: by hand where numbers are round, by boxes elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from planner.costs.cost_model import CostModel
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import BACKWARD, FORWARD, LayoutPrices
from planner.costs.stages.stage_cost import StageCost, stage_cost
from planner.ir.box import volume
from planner.ir.cluster import FAMILY, INTERPOLATED, MEASURED
from planner.ir.layout import Layout
from planner.ir.profile import Profile
from tests.oracles.boxes import parts, transfers
from tests.planner.networks import BYTES_PER_S, CALL_S, Named, Network, plain, priced, residual
from tests.planner.solvers.layouts.stage_memory import stage_bytes

EVERYTHING = ("sample", "spatial", "channel")
H2, W2 = ShardingSpec((("height", (0, 1, 2)),)), ShardingSpec((("width", (0, 1, 2)),))
S2, C2, ALL = (ShardingSpec(((dim, (0, 1, 2)),)) for dim in ("sample", "channel", "replica"))
BANDWIDTH = 1e10


def prices_of(made: tuple[Network, Named], ranks: int = 2, samples: int = 4, **how: object) -> LayoutPrices:
    profile = priced(*made, **{"speeds": (1.0,) * ranks, **how})  # type: ignore[arg-type]
    return LayoutPrices(CostModel(profile), tuple(range(ranks)), samples, EVERYTHING)


def conv_then_conv(samples: int = 4, height: int = 16, filters: int = 8) -> tuple[Network, Named]:
    network = Network(samples, 3, height)
    return network, network.conv(network.conv(network.image, filters), filters)


def everywhere(prices: LayoutPrices, option: ShardingSpec) -> StageCost:
    return stage_cost(prices, dict.fromkeys(range(len(prices.layers)), option))


def prices_of_shares(made: tuple[Network, Named], samples: int = 4) -> LayoutPrices:
    """Of measurements at one number of samples: too few shapes for models of families."""
    return prices_of(made, samples=samples, sizes=(samples,))


def one_conv(samples: int = 4, height: int = 16) -> tuple[Network, Named]:
    network = Network(samples, 3, height)
    return network, network.conv(network.image, 8)


def test_half_of_the_image_costs_half_of_the_call_where_there_is_no_family() -> None:
    prices = prices_of_shares(one_conv())
    whole = prices.layer(0, (ALL,)).seconds[:, 0]
    for option in (H2, W2, C2):
        assert prices.layer(0, (option,)).seconds[:, 0] == pytest.approx(whole / 2)


def test_half_of_the_image_costs_the_call_and_half_of_the_rest_where_the_family_says_so() -> None:
    prices = prices_of(plain(height=64))
    whole = prices.layer(0, (ALL,)).seconds[FORWARD, 0, 0]
    for option in (H2, W2):
        half = prices.layer(0, (option,)).seconds[FORWARD, 0, 0]
        assert half == pytest.approx((whole - CALL_S) / 2 + CALL_S, rel=0.1)


def test_half_of_the_samples_costs_what_was_measured_for_them() -> None:
    prices = prices_of(plain())
    half, whole = prices.layer(0, (S2,)).seconds[FORWARD, 0], prices.layer(0, (ALL,)).seconds[FORWARD, 0]
    assert half == pytest.approx((whole + CALL_S) / 2)


def test_uneven_parts_cost_in_proportion() -> None:
    prices = prices_of_shares(one_conv(height=8))
    table = prices.layer(0, (ShardingSpec((("height", (0, 3, 8)),)),))
    whole = prices.layer(0, (ALL,)).seconds[BACKWARD, 0, 0]
    assert table.seconds[BACKWARD, 0] == pytest.approx([whole * 3 / 8, whole * 5 / 8])


def test_a_halo_of_one_row_moves_each_way() -> None:
    prices = prices_of(conv_then_conv())
    crossing = prices.crossing(0, 1, (H2,), (H2,))
    row = 4 * 8 * 16 * 4  # samples x channels x width x bytes
    assert crossing.moved_bytes[0, 0] == 2 * row
    assert crossing.received_bytes[0, 0].tolist() == [row, row]
    assert crossing.forward_s[0, 0] == crossing.backward_s[0, 0] == pytest.approx(row / BANDWIDTH)
    assert crossing.is_halo[0, 0]


def test_without_duplex_both_ways_follow_one_another() -> None:
    row = 4 * 8 * 16 * 4
    prices = prices_of(conv_then_conv(), duplex=False)
    assert prices.crossing(0, 1, (H2,), (H2,)).forward_s[0, 0] == pytest.approx(2 * row / BANDWIDTH)


def test_from_rows_to_samples_half_of_everything_moves() -> None:
    prices = prices_of(conv_then_conv())
    crossing = prices.crossing(0, 1, (H2,), (S2,))
    assert crossing.moved_bytes[0, 0] == 4 * 8 * 16 * 16 * 4 / 2
    assert not crossing.is_halo[0, 0]


@pytest.mark.parametrize("seed_ranks", [(2, 4), (4, 4), (4, 3)])
def test_all_crossings_move_what_the_access_relations_say(seed_ranks: tuple[int, int]) -> None:
    ranks, samples = seed_ranks
    prices = prices_of(residual(samples=samples, height=12, blocks=2), ranks, samples)
    for maker, reader in prices.edges(tuple(range(len(prices.layers)))):
        of_maker, of_reader = prices.options(maker), prices.options(reader)
        found = prices.crossing(maker, reader, of_maker, of_reader)
        layer, sized = prices.layers[maker], prices.sized(reader)
        position = sized.layer.inputs.index(layer.name)
        for k, source in enumerate(of_maker):
            owned = dict(enumerate(parts(source.layout, prices.sized(maker).layer.outputs[0], samples)))
            for l, destination in enumerate(of_reader[:6]):
                if found.ways[k, l] > 1:
                    continue
                works = parts(destination.layout, sized.work, samples)
                needed = {rank: sized.input_boxes(work)[position] for rank, work in enumerate(works)}
                moves = [move for move in transfers(owned, needed) if move.src != move.dst]
                assert found.moved_bytes[k, l] == 4 * sum(volume(move.box) for move in moves)


def test_the_cheapest_contraction_moves_least() -> None:
    """3 channels in, 8 out: gathering the input is cheap; 8 in, 2 out: scattering partial sums is."""
    network = Network(4, 8, 16)
    wide = network.conv(network.relu(network.image), 64)
    narrow = network.conv(wide, 2)
    prices = prices_of((network, narrow))
    gather, scatter = prices.crossing(0, 1, (C2,), (C2,)), prices.crossing(1, 2, (C2,), (C2,))
    assert (gather.ways[0, 0], scatter.ways[0, 0]) == (1, 2)
    assert gather.moved_bytes[0, 0] == 4 * 8 * 16 * 16 * 4  # every rank gets the other's half of 8 channels
    assert scatter.moved_bytes[0, 0] == 4 * 2 * 16 * 16 * 4  # of 2 filters' partial sums
    assert scatter.received_bytes[0, 0].tolist() == [0, 0]


def test_a_cut_of_channels_cuts_the_weights_and_needs_no_sum() -> None:
    prices = prices_of(plain(filters=(8, 8)))
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


def test_a_stage_cut_by_samples_costs_what_the_sums_of_the_profile_say() -> None:
    prices = prices_of(plain(), latency_s=1e-5)
    cost = everywhere(prices, S2)
    table = prices.cost_model.tables.at("kind-1", 2)
    assert cost.compute_s[FORWARD] == pytest.approx((table.forward_s[-1],))
    assert cost.compute_s[BACKWARD] == pytest.approx((table.backward_s[-1],))
    assert (cost.exchange_forward_s, cost.exchange_backward_s) == (0, 0)
    assert cost.reduction_s == pytest.approx(
        prices.cost_model.network.all_reduce_s((0, 1), prices.cost_model.profile.graph.parameter_bytes())
    )
    assert cost.saved_bytes == pytest.approx([table.saved_bytes[-1]] * 2)
    assert cost.evidence == MEASURED
    assert everywhere(prices, H2).evidence == FAMILY
    assert everywhere(prices_of_shares(one_conv()), H2).evidence == INTERPOLATED


def test_the_slowest_rank_counts() -> None:
    profile = priced(*plain(samples=8, height=256), speeds=(1.0, 3.0))
    prices = LayoutPrices(CostModel(profile), (0, 1), 8, EVERYTHING)
    even, fair = everywhere(prices, S2), everywhere(prices, ShardingSpec((("sample", (0, 2, 8)),)))
    slowest = prices.cost_model.tables.at(prices.cost_model.kind(0), 4)
    assert even.compute_s[FORWARD] == pytest.approx((slowest.forward_s[-1],))
    assert fair.compute_s[FORWARD][0] < 0.6 * even.compute_s[FORWARD][0]


def test_working_beyond_ones_part_saves_the_halo_and_costs_the_rows() -> None:
    prices = prices_of(conv_then_conv(height=16))
    wide = ShardingSpec(H2.cuts, margin=1)
    crossing = prices.crossing(0, 1, (H2, wide), (H2,))
    assert crossing.moved_bytes[:, 0].tolist() == [2 * 4 * 8 * 16 * 4, 0]
    plain_s, wide_s = prices.layer(0, (H2, wide)).seconds[FORWARD].max(axis=-1)
    assert plain_s < wide_s < plain_s * 9 / 8  # the call itself is not longer
    shares = prices_of_shares(one_conv())  # no model of the family: rows alone count
    plain_s, wide_s = shares.layer(0, (H2, wide)).seconds[FORWARD].max(axis=-1)
    assert wide_s == pytest.approx(plain_s * 9 / 8)


def test_a_wide_halo_is_fetched_once_for_two_layers() -> None:
    network = Network(4, 3, 16)
    x = network.relu(network.image)
    prices = prices_of((network, network.conv(network.conv(x, 8), 8)))
    wide = ShardingSpec(H2.cuts, margin=1)
    row = 4 * 3 * 16 * 4
    assert prices.crossing(0, 1, (H2,), (wide,)).moved_bytes[0, 0] == 2 * 2 * row
    assert prices.crossing(1, 2, (wide,), (H2,)).moved_bytes[0, 0] == 0


def test_recomputing_runs_the_forward_twice_and_keeps_less() -> None:
    prices = prices_of(plain())
    layers = range(len(prices.layers))
    kept = stage_cost(prices, dict.fromkeys(layers, S2))
    again = stage_cost(prices, dict.fromkeys(layers, ShardingSpec(S2.cuts, recompute=True)))
    assert again.compute_s[BACKWARD][0] == pytest.approx(kept.compute_s[BACKWARD][0] + kept.compute_s[FORWARD][0])
    assert again.saved_bytes.tolist() == [0, 0]
    assert again.transient_bytes.tolist() == kept.saved_bytes.tolist()
    assert np.all(stage_bytes(again, 4, 0.0) < stage_bytes(kept, 4, 0.0))


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


def test_layers_of_one_signature_share_their_tables_but_not_their_times() -> None:
    prices = prices_of(plain(filters=(8, 8, 8)))
    options = prices.options(2)
    assert prices.sized(2).signature == prices.sized(4).signature
    assert prices.shards(2, options) is prices.shards(4, options)
    first, second = prices.crossing(1, 2, options, options), prices.crossing(3, 4, options, options)
    assert first is second
    assert first.moved_bytes.any()


def test_a_value_that_is_read_twice_moves_once() -> None:
    network = Network(4, 3, 16)
    x = network.relu(network.image)
    prices = prices_of((network, network.concat(x, x)))
    # Of 6 channels each rank makes 3: the first all of one copy, the second all of the other.
    assert prices.crossing(0, 1, (S2,), (C2,)).moved_bytes[0, 0] == 4 * 3 * 16 * 16 * 4
    assert prices.crossing(0, 1, (C2,), (C2,)).moved_bytes[0, 0] == 4 * 3 * 16 * 16 * 4


def test_messages_of_a_rank_follow_one_another() -> None:
    made = conv_then_conv()
    profile: Profile = priced(*made, speeds=(1.0,) * 4, hosts=("a", "a", "b", "b"), latency_s=1e-4)
    prices = LayoutPrices(CostModel(profile), (0, 1, 2, 3), 4, EVERYTHING)
    rows = ShardingSpec.of(Layout({"height": (0, 1, 2, 3, 4)}))
    row = 4 * 8 * 16 * 4
    # Inner ranks receive from both neighbours, one after another. (Tables are read in log-log: within 0.1 %.)
    both_s = 2 * (1e-4 + row / BANDWIDTH)
    assert prices.crossing(0, 1, (rows,), (rows,)).forward_s[0, 0] == pytest.approx(both_s, rel=1e-3)
