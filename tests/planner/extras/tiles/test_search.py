"""Forward plans in blocks and tiles: against every parting of small chains, and what must hold of every answer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest

from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.ir.errors import InfeasibleError
from planner.ir.layout import Layout
from planner.ir.plan import Block, Plan
from planner.ir.problem import LATENCY, Problem
from planner.ir.profile import Profile
from planner.layers.division import overlap
from planner.solvers.best_first.solver import solve
from planner.solvers.candidates.evaluate import Evaluator
from tests.oracles.plans import check
from tests.planner.networks import Network, priced


def chain(height: int = 64, filters: tuple[int, ...] = (4, 8, 4), latency_s: float = 1e-6, ranks: int = 2) -> Profile:
    """Convolutions over one image, an activation behind each."""
    made = Network(1, 2, height)
    x = made.image
    for number in filters:
        x = made.relu(made.conv(x, number))
    return per_pixel(priced(made, x, speeds=(1.0,) * ranks, latency_s=latency_s, sizes=(1,)))


def skipping(height: int = 64) -> Profile:
    """A skip over two convolutions and a pool; what is joined is twice as wide."""
    made = Network(1, 2, height)
    x = made.relu(made.conv(made.image, 8))
    y = made.conv(made.conv(x, 8), 8)
    return per_pixel(priced(made, made.pool(made.conv(made.concat(x, y), 8)), sizes=(1,)))


def per_pixel(profile: Profile) -> Profile:
    """With a loss that is a mean over elements."""
    graph = profile.graph
    loss = replace(graph.layers[-1], attributes={"op": "mse", "terms": "elements"})
    inputs = {**graph.inputs, "y": graph.layers[-2].outputs[0]}
    return replace(profile, graph=replace(graph, inputs=inputs, layers=(*graph.layers[:-1], loss)))


def planned(profile: Profile, memory_bytes: int = 0, **asked: object) -> Plan:
    problem = Problem(
        profile,
        1,
        objective=LATENCY,
        allow=("spatial",),
        memory_bytes=memory_bytes,
        memory_margin=0.0,
        **{"confidence": 0.0, **asked},
    )
    plan = solve(problem)
    assert check(plan, profile) == ()
    return plan


def peak(plan: Plan) -> int:
    return max(rank.peak_bytes for rank in plan.prediction.ranks)


def blocks(plan: Plan) -> tuple[Block, ...]:
    return tuple(block for stage in plan.decision.stages for block in stage.blocks)


@pytest.mark.parametrize("make", [chain, skipping])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tiles_keep_to_limits_that_nothing_else_keeps_to(make: object, num_ranks: int) -> None:
    """Less and less memory: as long as a plan is found it keeps to it, and tiles become more and steps longer."""
    profile = make()
    fixed = sum(spec.num_bytes for spec in profile.graph.inputs.values()) + profile.graph.parameter_bytes()
    found: list[Plan] = []
    for values in (400_000, 180_000):
        found.append(planned(profile, fixed + values, num_ranks=num_ranks))
        assert peak(found[-1]) <= fixed + values
    assert max(block.num_tiles for block in blocks(found[-1])) > 1
    assert found[-1].prediction.step_s > found[0].prediction.step_s
    with pytest.raises(InfeasibleError, match="no plan fits"):
        planned(profile, fixed, num_ranks=num_ranks)


def test_where_latency_rules_layers_exchange_nothing() -> None:
    profile = chain(latency_s=1e-4)
    found = planned(replace_costs(profile, 10))
    (block,) = blocks(found)
    assert block.num_tiles == 1
    assert len(block.layers) >= 5
    assert len(found.decision.stages[0].ranks) == 2
    assert 0 < overlap(profile.graph, found.decision, 0) < 0.2


def replace_costs(profile: Profile, times: float) -> Profile:
    """So much slower that sharing pays."""
    return replace(
        profile,
        measurements={
            kind: tuple(replace(one, forward_s=one.forward_s * times) for one in measured)
            for kind, measured in profile.measurements.items()
        },
    )


def test_where_links_are_free_halos_are_exchanged_layer_by_layer() -> None:
    profile = replace_costs(chain(latency_s=0.0), 1e3)
    assert blocks(planned(profile)) == ()


@pytest.mark.parametrize("values", [400_000, 250_000])
def test_the_best_of_all_partings_of_a_chain(values: int) -> None:
    """Tiles at the edges are priced by the one in the middle, so that the best may be missed by a little."""
    profile = chain(filters=(4, 8))
    fixed = sum(spec.num_bytes for spec in profile.graph.inputs.values()) + profile.graph.parameter_bytes()
    limit = fixed + values
    best_s = min(every_parting(profile, limit))
    found = planned(profile, limit, num_ranks=1)
    assert found.prediction.step_s <= best_s * 1.02


def every_parting(profile: Profile, limit: int) -> Iterator[float]:
    """Steps of all plans on one rank that fit: all stretches of layers, in strips and in squares."""
    problem = Problem(
        profile,
        1,
        objective=LATENCY,
        allow=("spatial",),
        memory_bytes=limit,
        memory_margin=0.0,
        num_ranks=1,
        confidence=0.0,
    )
    evaluator = Evaluator(problem, CostModel(profile))
    names = [layer.name for layer in profile.graph.layers]
    grids = [{}, {"height": 2}, {"height": 2, "width": 2}, {"height": 4, "width": 4}]
    plain = Candidate.chain((0, len(names)), ((0,),), ((1,),), (1,), "forward")
    plain = replace(plain, options=(ShardingSpec.of(Layout()),) * len(names))
    for count in range(len(names)):
        for cuts in itertools.combinations(range(1, len(names)), count):
            bounds = (0, *cuts, len(names))
            if any(first % 2 for first in cuts):
                continue  # an activation stays with its convolution
            for chosen in itertools.product(grids, repeat=len(bounds) - 1):
                parts = zip(itertools.pairwise(bounds), chosen, strict=True)
                made = tuple(Block(tuple(names[a:b]), grid) for (a, b), grid in parts)
                found = evaluator.evaluate(replace(plain, blocks=(made,)))
                if found.fits:
                    yield found.step_s


def test_normalisation_by_running_statistics_waits_for_nobody() -> None:
    """Batch norms of forward plans exchange nothing, whatever sums of statistics take."""
    made = Network(1, 2, 64)
    x = made.norm(made.conv(made.image, 8))
    profile = priced(made, x, latency_s=1e-6, sizes=(1,))
    slow = replace(profile, cluster=replace(profile.cluster, collectives=()))
    assert planned(profile).prediction.step_s == pytest.approx(planned(slow).prediction.step_s, rel=1e-6)


def test_a_plan_that_trains_has_no_blocks() -> None:
    profile = chain()
    plan = solve(Problem(profile, 1, allow=("spatial",), memory_margin=0.0, confidence=0.0))
    names = tuple(layer.name for layer in profile.graph.layers[:2])
    stage = replace(plan.decision.stages[0], blocks=(Block(names),))
    spoilt = replace(plan, decision=replace(plan.decision, stages=(stage,)))
    assert any("forward passes alone" in fault for fault in check(spoilt, profile))


@pytest.mark.parametrize(
    ("layers", "tiles", "words"),
    [
        (("relu", "conv0"), {}, "no stretch"),
        (("conv0", "pointwise1"), {"sample": 2}, "tiles are 1 or more, along"),
        (("conv0", "pointwise1"), {"height": 0}, "tiles are 1 or more, along"),
    ],
)
def test_blocks_written_by_hand_are_checked(layers: tuple[str, ...], tiles: dict[str, int], words: str) -> None:
    profile = chain()
    plan = planned(profile, num_ranks=1)
    stage = replace(plan.decision.stages[0], blocks=(Block(layers, tiles),))
    spoilt = replace(plan, decision=replace(plan.decision, stages=(stage,)))
    assert any(words in fault for fault in check(spoilt, profile))
