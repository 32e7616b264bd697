"""What moves between layers, against loops over ranks and boxes; what hides behind compute: halos of convolutions."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planner.costs.communication.resharding import Resharding, exposed
from planner.costs.cost_model import CostModel
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import LayoutPrices
from planner.costs.stages.stage_cost import stage_cost
from planner.ir.cluster import PIECES, WITHIN_HOST, Cluster, Collective
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import decision_of
from planner.solvers.candidates.evaluate import Evaluator
from tests.planner.costs.communication.plain_exchange import Moving, part_of
from tests.planner.networks import Named, Network, priced
from tests.planner.solvers.laid_out_plans import EVERYTHING, random_candidate, random_network

H2, S2, C2 = (ShardingSpec(((dim, (0, 1, 2)),)) for dim in ("height", "sample", "channel"))
S2H2 = ShardingSpec((("sample", (0, 1, 2)), ("height", (0, 1, 2))))


def prices_of(made: tuple[Network, Named], ranks: int = 2, **how: object) -> LayoutPrices:
    profile = priced(*made, **{"speeds": (1.0,) * ranks, **how})  # type: ignore[arg-type]
    return LayoutPrices(CostModel(profile), tuple(range(ranks)), 4, EVERYTHING)


def two_convolutions(groups: int = 1) -> tuple[Network, Named]:
    network = Network(4, 3, 16)
    return network, network.conv(network.conv(network.image, 8), 8, groups=groups)


ALONE = Cluster((), {})


def crossing(seconds: float, is_halo: bool, received: float = 0.0) -> Resharding:
    one = np.array([[seconds]])
    bytes_in, none = np.full((1, 1, 2), received), np.zeros((1, 1, 2))
    return Resharding(one, 2 * one, bytes_in, none, one, np.array([[is_halo]]), np.ones((1, 1), dtype=np.int64))


def test_a_halo_costs_what_exceeds_the_compute_of_the_slowest_rank() -> None:
    compute = np.array([[3.0, 5.0]])
    assert [float(x[0, 0]) for x in exposed(crossing(7.0, True), "conv", compute, 2 * compute, ALONE)] == [2.0, 4.0]
    assert [float(x[0, 0]) for x in exposed(crossing(4.0, True), "conv", compute, compute, ALONE)] == [0.0, 3.0]


@pytest.mark.parametrize(("kind", "is_halo"), [("pool", True), ("pointwise", True), ("conv", False)])
def test_nothing_else_hides(kind: str, is_halo: bool) -> None:
    compute = np.array([[100.0, 100.0]])
    assert [float(x[0, 0]) for x in exposed(crossing(7.0, is_halo), kind, compute, compute, ALONE)] == [7.0, 14.0]


@pytest.mark.parametrize(("kind", "expected"), [("conv", [0.5, 4.5]), ("pool", [7.5, 14.5])])
def test_what_ranks_compute_to_exchange_hides_behind_nothing(kind: str, expected: list[float]) -> None:
    measured = Cluster((), {}, (Collective(PIECES, 1, WITHIN_HOST, ((100, 0.5), (200, 2.0))),))
    compute = np.array([[9.0, 10.0]])
    halo = crossing(7.0, True, received=80.0)
    assert [float(x[0, 0]) for x in exposed(halo, kind, compute, compute, measured)] == pytest.approx(expected)


def test_the_same_cuts_of_space_make_a_halo_and_gathered_channels_do_not() -> None:
    prices = prices_of(two_convolutions())
    assert prices.crossing(0, 1, (H2,), (H2,)).is_halo[0, 0]
    assert not prices.crossing(0, 1, (H2,), (S2,)).is_halo[0, 0]
    gathered, shared = (ShardingSpec(C2.cuts, ways=ways) for ways in (1, 2))
    assert not prices.crossing(0, 1, (C2,), (gathered,)).is_halo[0, 0]
    assert not prices.crossing(0, 1, (C2,), (shared,)).is_halo[0, 0]
    in_groups = prices_of(two_convolutions(groups=2))
    assert in_groups.crossing(0, 1, (C2,), (C2,)).is_halo[0, 0]  # each part reads its own channels: nothing moves
    both = prices_of(two_convolutions(), ranks=4)
    assert both.crossing(0, 1, (S2H2,), (S2H2,)).is_halo[0, 0]


def test_a_stage_waits_for_what_its_layers_do_not_hide() -> None:
    quick, slow = (prices_of(two_convolutions(), latency_s=latency_s) for latency_s in (0.0, 1e-2))
    for prices in (quick, slow):
        halo = prices.crossing(0, 1, (H2,), (H2,))
        compute = prices.layer(1, (H2,)).seconds[:2, 0].max(axis=-1)
        cost = stage_cost(prices, dict.fromkeys((0, 1), H2))
        assert cost.exchange_forward_s == pytest.approx(max(0.0, halo.forward_s[0, 0] - compute[0]))
        assert cost.exchange_backward_s == pytest.approx(max(0.0, halo.backward_s[0, 0] - compute[1]))
    assert stage_cost(quick, dict.fromkeys((0, 1), H2)).exchange_forward_s == 0
    assert stage_cost(slow, dict.fromkeys((0, 1), H2)).exchange_forward_s > 5e-3


def test_a_recomputed_layer_waits_once_more() -> None:
    prices = prices_of(two_convolutions(), latency_s=1e-2)
    once = stage_cost(prices, dict.fromkeys((0, 1), H2))
    again = stage_cost(prices, dict.fromkeys((0, 1), ShardingSpec(H2.cuts, recompute=True)))
    waits = again.exchange_backward_s - once.exchange_backward_s
    assert waits == pytest.approx(once.exchange_forward_s)


@pytest.mark.parametrize("seed", range(20))
def test_loops_over_ranks_and_boxes_move_the_same(seed: int) -> None:
    draw = random.Random(seed)
    problem = Problem(random_network(draw), 4, allow=EVERYTHING, halo_depth=draw.choice([0, 2]))
    evaluator = Evaluator(problem, CostModel(problem.profile))
    decision = decision_of(problem, random_candidate(draw, evaluator))
    layers, samples = problem.profile.graph.layers, max(decision.micro_batches)
    placed, index = decision.layers, {layer.name: number for number, layer in enumerate(layers)}
    for number, stage in enumerate(decision.stages):
        mine = set(decision.layers_of(number))
        parts = {x.name: part_of(problem.profile, x, placed[x.name], samples) for x in layers if x.name in mine}
        moving = Moving(problem.profile, placed, stage.ranks, samples, parts)
        prices = LayoutPrices(evaluator.cost_model, stage.ranks, samples, EVERYTHING)
        for maker, reader in {(one.maker, one.reader) for one in moving.crossings}:
            plainly = [one for one in moving.crossings if (one.maker, one.reader) == (maker, reader)]
            options = [(ShardingSpec.placed(placed[name]),) for name in (maker, reader)]
            found = prices.crossing(index[maker], index[reader], *options)
            assert found.forward_s[0, 0] == pytest.approx(sum(one.forward_s for one in plainly), abs=1e-15)
            assert found.backward_s[0, 0] == pytest.approx(sum(one.backward_s for one in plainly), abs=1e-15)
            assert found.is_halo[0, 0] == all(one.is_halo for one in plainly)
            for member, rank in enumerate(stage.ranks):
                sizes = (size for one in plainly for (_, dst), size in one.pieces.items() if dst == rank)
                assert found.received_bytes[0, 0, member] == sum(sizes)
