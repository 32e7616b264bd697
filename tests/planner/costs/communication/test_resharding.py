"""What moves between layers, against loops over ranks and boxes; what hides behind compute: halos of convolutions."""

from __future__ import annotations

import random

import numpy as np
import pytest

from planner.costs.communication.resharding import Resharding, exposed
from planner.costs.cost_model import CostModel
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import LayoutPrices
from planner.ir.cluster import PIECES, WITHIN_HOST, Cluster, Collective
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import decision_of
from planner.solvers.candidates.evaluate import Evaluator
from tests.planner.costs.communication.plain_exchange import Moving, part_of
from tests.planner.solvers.laid_out_plans import EVERYTHING, random_candidate, random_network

CALLS = Cluster((), {}, (Collective(PIECES, 1, WITHIN_HOST, ((100, 0.5), (200, 2.0))),))
"""What ranks compute to exchange."""


@pytest.mark.parametrize(
    ("kind", "is_halo", "seconds", "compute_s", "cluster", "expected"),
    [
        ("conv", True, 7.0, (5.0, 10.0), Cluster((), {}), [2.0, 4.0]),  # what exceeds the compute of the slowest rank
        ("conv", True, 4.0, (5.0, 5.0), Cluster((), {}), [0.0, 3.0]),
        ("pool", True, 7.0, (100.0, 100.0), Cluster((), {}), [7.0, 14.0]),
        ("pointwise", True, 7.0, (100.0, 100.0), Cluster((), {}), [7.0, 14.0]),
        ("conv", False, 7.0, (100.0, 100.0), Cluster((), {}), [7.0, 14.0]),
        ("conv", True, 7.0, (10.0, 10.0), CALLS, [0.5, 4.5]),  # calls hide behind nothing
        ("pool", True, 7.0, (10.0, 10.0), CALLS, [7.5, 14.5]),
    ],
)
def test_halos_of_convolutions_hide_behind_their_compute_and_nothing_else_does(
    kind: str, is_halo: bool, seconds: float, compute_s: tuple[float, float], cluster: Cluster, expected: list[float]
) -> None:
    one = np.array([[seconds]])
    received = np.full((1, 1, 2), 80.0)
    none = np.zeros((1, 1, 2))
    moving = Resharding(one, 2 * one, received, none, one, np.array([[is_halo]]), np.ones((1, 1), dtype=np.int64))
    own = (np.array([[slowest - 1.0, slowest]]) for slowest in compute_s)
    assert [float(each[0, 0]) for each in exposed(moving, kind, *own, cluster)] == pytest.approx(expected)


@pytest.mark.cases(12)
@pytest.mark.parametrize("seed", range(20))
def test_loops_over_ranks_and_boxes_move_the_same(seed: int) -> None:
    draw = random.Random(seed)
    problem = Problem(random_network(draw), 4, allow=EVERYTHING, halo_depth=draw.choice([0, 2]))
    evaluator = Evaluator(problem, CostModel(problem.profile))
    decision = decision_of(problem, random_candidate(draw, evaluator))
    layers = problem.profile.graph.layers
    samples = max(decision.micro_batches)
    placed = decision.layers
    index = {layer.name: number for number, layer in enumerate(layers)}
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
