"""The best layouts of a stage: against all choices on small networks, and what must hold of every answer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from planner.costs.cost_model import CostModel
from planner.costs.shards.sharding_spec import ShardingSpec
from planner.costs.stages.layouts import LayoutPrices
from planner.costs.stages.stage_cost import stage_cost
from planner.ir.profile import Profile
from planner.solvers.layouts.solve import INFEASIBLE, PROVEN
from planner.solvers.layouts.stage import Question, best_layouts, labelled_graph, options_of
from planner.solvers.layouts.variable_elimination import all_spans, order_of
from tests.planner.networks import mesh_like, plain, priced, residual
from tests.planner.solvers.laid_out_plans import MADE
from tests.planner.solvers.layouts.stage_memory import stage_bytes

SAMPLES = ("sample",)
SPACE = ("sample", "spatial")
EVERYTHING = ("sample", "spatial", "channel")


def prices_of(profile: Profile, allow: Sequence[str], samples: int, halo_depth: int = 0) -> LayoutPrices:
    ranks = tuple(range(len(profile.cluster.devices)))
    return LayoutPrices(CostModel(profile), ranks, samples, tuple(allow), halo_depth)


def asked(prices: LayoutPrices, **how: object) -> Question:
    return Question(tuple(range(len(prices.layers))), **how)  # type: ignore[arg-type]


def by_trying(prices: LayoutPrices, question: Question) -> float:
    """The least step of all choices that fit, each priced on its own."""
    best = float("inf")
    state = prices.cost_model.profile.optimizer.state_bytes_per_parameter_byte
    for choice in itertools.product(*options_of(prices, question)):
        cost = stage_cost(prices, dict(zip(question.layers, choice, strict=True)))
        needs = stage_bytes(cost, question.in_flight, state)
        if not question.memory_limit_bytes or np.all(needs <= np.array(question.memory_limit_bytes) + 0.5):
            best = min(best, cost.step_s(question.micro_batches))
    return best


NETWORKS = {
    "plain": priced(*plain(samples=2, height=8, filters=(4, 6)), latency_s=1e-6),
    "unequal": priced(*plain(samples=4, height=8, filters=(4, 6)), speeds=(1.0, 2.5), latency_s=1e-7),
    "one sample": priced(*plain(samples=1, height=32, filters=(8, 4)), latency_s=1e-7, bandwidth_bytes_per_s=1e11),
}


@pytest.mark.parametrize("allow", [SAMPLES, SPACE, EVERYTHING])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_choice_of_layouts_is_better(name: str, allow: tuple[str, ...]) -> None:
    profile = NETWORKS[name]
    prices = prices_of(profile, allow, profile.graph.samples)
    question = asked(prices, micro_batches=3.0)
    found = best_layouts(prices, question)
    assert found.answer.status == PROVEN
    assert found.cost is not None
    assert found.answer.cost == pytest.approx(by_trying(prices, question), rel=1e-12)
    assert found.cost.step_s(3.0) == pytest.approx(found.answer.cost, rel=1e-12)


@pytest.mark.parametrize("share", [0.7, 0.85, 0.95])
@pytest.mark.parametrize("recompute", ["never", "auto"])
def test_no_choice_that_fits_is_better(share: float, recompute: str) -> None:
    profile = priced(*plain(samples=2, height=8, filters=(6,)), speeds=(1.0, 2.0), latency_s=1e-7)
    prices = prices_of(profile, EVERYTHING, 2)
    free = asked(prices, micro_batches=2.0, in_flight=3, recompute=recompute)
    cost = best_layouts(prices, replace(free, recompute="never")).cost
    assert cost is not None
    limit = int(share * stage_bytes(cost, 3, 0.0).max())
    question = replace(free, memory_limit_bytes=(limit, limit))
    found = best_layouts(prices, question)
    best = by_trying(prices, question)
    assert found.answer.cost == pytest.approx(best, rel=1e-9)
    assert found.answer.status == (PROVEN if np.isfinite(best) else INFEASIBLE)
    if found.cost is not None:
        assert np.all(stage_bytes(found.cost, 3, 0.0) <= limit * (1 + 1e-9))


def test_the_best_choice_within_memory_and_workspace_is_the_best_of_all() -> None:
    profile = priced(*plain(samples=4, height=8, filters=(6,)))
    hungry = tuple(
        replace(m, workspace_bytes=5000 * m.samples) if m.layer == "conv0" else m
        for m in profile.measurements["kind-1"]
    )
    profile = replace(profile, measurements={"kind-1": hungry})
    prices = prices_of(profile, EVERYTHING, 4)
    free = best_layouts(prices, asked(prices, in_flight=2)).cost
    assert free is not None
    for less in (1000, 3000, 6000, 9000, 12000):
        limit = int(stage_bytes(free, 2, 0.0).max()) - less
        question = asked(prices, in_flight=2, memory_limit_bytes=(limit, limit), recompute="auto")
        found = best_layouts(prices, question)
        best = by_trying(prices, question)
        assert found.answer.cost == pytest.approx(best, rel=1e-9)
        assert found.answer.status == (PROVEN if np.isfinite(best) else INFEASIBLE)
        if found.cost is not None:
            assert np.all(stage_bytes(found.cost, 2, 0.0) <= limit * (1 + 1e-9))


@pytest.mark.parametrize("made", [plain(), residual(blocks=2), mesh_like()], ids=["plain", "residual", "mesh"])
@pytest.mark.parametrize("latency_s", [0.0, 1e-5])
def test_more_freedom_is_never_worse(made: tuple, latency_s: float) -> None:
    profile = priced(*made, speeds=(1.0, 1.0, 2.0, 2.0), latency_s=latency_s)
    samples = profile.graph.samples
    costs = [
        best_layouts(prices, asked(prices, micro_batches=4.0)).answer.cost
        for prices in (
            *(prices_of(profile, allow, samples) for allow in (SAMPLES, SPACE, EVERYTHING)),
            prices_of(profile, EVERYTHING, samples, halo_depth=1),
        )
    ]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(costs))


def test_like_devices_in_another_order_cost_the_same() -> None:
    made = residual(samples=4, height=12)
    profile = priced(*made, speeds=(1.0,) * 4)
    cost_model = CostModel(profile)
    costs = set()
    for ranks in ((0, 1, 2, 3), (3, 1, 0, 2)):
        prices = LayoutPrices(cost_model, ranks, 4, EVERYTHING)
        costs.add(round(best_layouts(prices, asked(prices)).answer.cost, 15))
    assert len(costs) == 1


def test_a_single_sample_is_cut_along_space_and_a_classifier_along_channels() -> None:
    profile = priced(*residual(samples=1, height=128), speeds=(1.0,) * 4, bandwidth_bytes_per_s=1e12)
    prices = prices_of(profile, EVERYTHING, 1)
    found = best_layouts(prices, asked(prices))
    dims = {layer.name: {dim for dim, _ in found.chosen[k].cuts} for k, layer in enumerate(prices.layers)}
    assert dims["conv0"] & {"height", "width"}
    assert "sample" not in dims["conv0"]
    assert found.cost is not None
    alone = sum(prices.cost_model.tables.at("kind-1", 1).forward_s[-1:])
    assert found.cost.compute_s[0][0] < 0.5 * alone


def test_where_latency_rules_one_wide_halo_serves_several_layers() -> None:
    profile = priced(*plain(samples=1, height=64, filters=(8,) * 5), latency_s=1.5e-5, bandwidth_bytes_per_s=1e11)
    shallow, deep = (prices_of(profile, SPACE, 1, depth) for depth in (0, 4))
    costs = []
    for prices in (shallow, deep):
        question = asked(prices)
        found = best_layouts(prices, question)
        costs.append(found.answer.cost)
        margins = {option.margin for option in found.chosen.values()}
        assert (max(margins) > 1) == (prices is deep)
    assert costs[1] < costs[0]


@pytest.mark.parametrize("latency_s", [0.0, 1e-5, 1e-3])
def test_halos_of_convolutions_hide_behind_their_compute(latency_s: float) -> None:
    profile = priced(*plain(samples=1, height=64, filters=(8,) * 3), latency_s=latency_s)
    prices = prices_of(profile, SPACE, 1)
    rows = ShardingSpec((("height", (0, 1, 2)),))
    found = best_layouts(prices, asked(prices), options=((rows,),) * len(prices.layers))
    assert found.cost is not None
    tables = [prices.layer(index, (rows,)) for index in range(len(prices.layers))]
    waits = [0.0, 0.0]
    edges = prices.edges(tuple(range(len(tables))))
    for maker, reader in edges:
        seconds = prices.crossing(maker, reader, (rows,), (rows,)).forward_s[0, 0]
        hides = prices.layers[reader].kind == "conv"
        for way in (0, 1):
            waits[way] += max(0.0, seconds - (tables[reader].seconds[way, 0].max() if hides else 0.0))
    assert found.cost.exchange_forward_s == pytest.approx(waits[0], abs=1e-15)
    assert found.cost.exchange_backward_s == pytest.approx(waits[1], abs=1e-15)
    assert waits[0] < sum(prices.crossing(u, v, (rows,), (rows,)).forward_s[0, 0] for u, v in edges)


@pytest.mark.parametrize("made", [residual(blocks=2), mesh_like()], ids=["residual", "mesh"])
def test_every_span_of_layers_at_once(made: tuple) -> None:
    prices = prices_of(priced(*made), SPACE, made[0].samples)
    question = asked(prices)
    graph = labelled_graph(prices, question, options_of(prices, question))
    spans = all_spans(graph)
    for first, last in ((0, 3), (2, 9), (5, graph.num_nodes)):
        alone = best_layouts(prices, Question(tuple(range(first, last)))).answer.cost
        assert spans[first, last] == pytest.approx(alone, rel=1e-12)


def test_networks_are_narrow() -> None:
    for made, width in ((plain(filters=(4,) * 6), 1), (residual(blocks=3), 2)):
        prices = prices_of(priced(*made), SAMPLES, made[0].samples)
        question = asked(prices)
        assert order_of(labelled_graph(prices, question, options_of(prices, question))).width == width


def test_fewer_options_can_be_given() -> None:
    prices = prices_of(priced(*residual()), EVERYTHING, 4)
    question = asked(prices)
    rows = tuple(
        tuple(
            option for option in each if dict(option.grid).get("height", 2) == 2 and "sample" not in dict(option.grid)
        )
        for each in options_of(prices, question)
    )
    found = best_layouts(prices, question, options=rows)
    assert all(option in each for option, each in zip(found.chosen.values(), rows, strict=True))
    assert found.answer.cost >= best_layouts(prices, question).answer.cost


def uniform_cost(prices: LayoutPrices, question: Question, options: tuple[tuple[ShardingSpec, ...], ...]) -> float:
    """The least step of all grids that are the same for every layer, as far as it can be cut so."""
    graph = labelled_graph(prices, question, options)
    best = float("inf")
    for grid in {option.grid for each in options for option in each}:
        wanted = {dim: parts for dim, parts in grid if not dim.startswith("replica")}
        picked = []
        for index, each in enumerate(options):
            own = {dim: parts for dim, parts in wanted.items() if dim in prices.sized(index).divisible}
            grids = [{dim: n for dim, n in option.grid if not dim.startswith("replica")} for option in each]
            picked += [grids.index(own)] if own in grids else []
        if len(picked) == len(options):
            best = min(best, graph.cost(picked))
    return best


def drawn_prices(seed: int) -> LayoutPrices:
    """Of a network of several shapes, on devices and links that are drawn."""
    draw = random.Random(seed)
    made = draw.choice([residual(samples=8, height=32, blocks=2), mesh_like(samples=8, height=64), *MADE])
    profile = priced(
        *made,
        speeds=[draw.choice([1.0, 1.0, 2.0]) for _ in range(draw.choice([4, 6, 8]))],
        latency_s=draw.choice([1e-7, 1e-6, 1e-5]),
        bandwidth_bytes_per_s=draw.choice([1e9, 1e10, 1e11]),
    )
    return prices_of(profile, draw.choice([SPACE, EVERYTHING]), 8)


@pytest.mark.parametrize("seed", range(12))
def test_it_is_never_worse_than_the_best_uniform_layout(seed: int) -> None:
    prices = drawn_prices(seed)
    question = asked(prices, micro_batches=2.0)
    best = best_layouts(prices, question).answer
    assert best.status == PROVEN
    uniform = uniform_cost(prices, question, options_of(prices, question))
    assert np.isfinite(uniform)
    assert best.cost <= uniform * (1 + 1e-12)
