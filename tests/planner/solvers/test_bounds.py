"""Bounds never lie above what the simulator says, on every plan of random small problems."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product

import numpy as np
import pytest
from scipy.optimize import linprog

from benchmarks.chains import chain_profile
from benchmarks.scale import scale_profile
from planner.costs.candidate import Candidate
from planner.costs.communication.stage_transfers import least_link
from planner.costs.communication.tables import transfer_s
from planner.costs.cost_model import CostModel
from planner.costs.memory.memory_bound import fewest_kept, kept_by
from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST, Link
from planner.ir.errors import InfeasibleError
from planner.ir.layout import samples_of
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.ir.program import BUCKET_BYTES
from planner.solvers import solver
from planner.solvers.best_first.bound import Suffixes
from planner.solvers.best_first.capacity import Capacity, capacity
from planner.solvers.best_first.counts_columns import Columns, CutPlaces
from planner.solvers.best_first.counts_table import CountsTable, rising_bounds, worths
from planner.solvers.best_first.graph_cuts import cuts_of
from planner.solvers.best_first.leaf_bound import Leaf, Leaves
from planner.solvers.best_first.prefixes import Expansion, Frontier, PipelinePrefix
from planner.solvers.best_first.priced_groups import GroupPrices
from planner.solvers.best_first.share_bound import AnyShares, MeanHandovers, has_open_shares
from planner.solvers.best_first.share_search import OpenShares
from planner.solvers.best_first.warm_start import spaces
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.stage_orders import in_every_order
from tests.planner.check.test_memory import with_levels
from tests.planner.solvers.instances import (
    best_by_exhaustion,
    branching_problem,
    crowded_problem,
    heavy_problem,
    plans,
    random_problem,
    tied_problem,
    with_memory,
)

tied_branches = partial(tied_problem, make=branching_problem)
MAKERS = pytest.mark.parametrize(
    "make",
    [random_problem, branching_problem, heavy_problem, tied_problem, tied_branches],
    ids=["chains", "branches", "heavy", "ties", "branches with ties"],
)


def expansions(
    frontier: Frontier, path: tuple[float, ...], prefix: PipelinePrefix
) -> Iterator[tuple[list[float], Expansion]]:
    """Every expansion, with the bounds of the prefixes before it."""
    expansion = frontier.expand(prefix, float("inf"))
    yield list(path), expansion
    for position in range(len(expansion)):
        child = expansion.child(position)
        if child.cuts[-1] < frontier.suffixes.prices.cuts.last:  # not all layers are placed
            yield from expansions(frontier, (*path, float(expansion.bound_s[position])), child)


def capacity_of(prices: GroupPrices) -> Capacity:
    """All devices of each kind."""
    kinds = [prices.cost_model.kind(rank) for rank in prices.problem.ranks]
    return capacity(prices.capacity_s(), list(Counter(kinds).values()))


def with_open_shares(frontier: Frontier) -> Frontier:
    """The same as the search looks at it: shares that may be several are left open."""
    prices = frontier.suffixes.prices
    devices = frontier.suffixes.devices
    if not has_open_shares(prices, devices):
        return frontier
    every = AnyShares.of(prices, float("inf"))
    return Frontier(Suffixes(every, devices, MeanHandovers(every)))


def with_all_shares(frontier: Frontier, leaf: Leaf, candidate: Candidate) -> Iterator[tuple[float, Candidate]]:
    """A pipeline with every share of its samples, and the largest bound of these, of boxes around them too.

    Infinite where the search drops them, as they do not fit.
    """
    is_open = [choice.group.is_open for choice in leaf.prefix.choices]
    if not any(is_open):
        yield leaf.bound_s, candidate
        return
    size = candidate.micro_batches[0]
    draw = np.random.default_rng(len(candidate.groups))
    every = OpenShares.of(frontier, leaf, candidate, float("inf"))
    ways = [
        [way for way in product(range(1, size + 1), repeat=len(own)) if sum(way) == size] if is_free else [own]
        for own, is_free in zip(candidate.shares, is_open, strict=True)
    ]
    for shares in product(*ways):
        samples = np.array(list(chain.from_iterable(shares)))[:, None]
        if not all(min(samples_of(own, rows)) for own in shares for rows in candidate.micro_batches):
            continue
        inside = len(every.bounds) and (every.boxes[0] <= samples).all() and (samples <= every.boxes[1]).all()
        if not inside:
            yield float("inf"), replace(candidate, shares=shares)
            continue
        least = np.maximum(every.boxes[0], samples - draw.integers(0, 3, (len(samples), 3)))
        most = np.minimum(every.boxes[1], samples + draw.integers(0, 3, (len(samples), 3)))
        around = every.clocks.bounds(np.hstack([least, samples]), np.hstack([most, samples]))
        assert (around <= around[-1] * (1 + 1e-9)).all()
        yield max(leaf.bound_s, float(around[-1])), replace(candidate, shares=shares)


def least_step_s(
    prices: GroupPrices, capacity: Capacity, upper_s: float = float("inf"), mixes_kinds: bool = True
) -> float:
    """The last of the rising bounds of one way to cut the batch."""
    *_, (least_s,) = rising_bounds([(prices, capacity)], upper_s, mixes_kinds)
    return least_s


def pipelines(problem: Problem) -> Iterator[tuple[list[float], float, float]]:
    """Every complete pipeline under every schedule: the bounds of its prefixes, its own, and its step."""
    evaluator = Evaluator(problem, CostModel(problem.profile))
    for frontier in map(with_open_shares, spaces(evaluator)):
        prices = frontier.suffixes.prices
        known = frontier.suffixes.root_s(), least_step_s(prices, capacity_of(prices))
        for path, expansion in expansions(frontier, known, frontier.root()):
            complete = np.flatnonzero(expansion.table.last[expansion.row] == prices.cuts.last)
            if not len(complete):
                continue
            (leaves,) = Leaves.of(frontier, [(expansion, complete)])
            for schedule in prices.freedom.schedules:
                for leaf in leaves.under(schedule, len(prices.micro_batches), float("inf")):
                    candidate = replace(frontier.candidate(leaf.prefix, schedule), windows=leaf.windows)
                    for bound_s, shared in with_all_shares(frontier, leaf, candidate):
                        for one in in_every_order(problem.profile.graph, shared):
                            found = evaluator.evaluate(one)
                            if found.fits:
                                yield path, bound_s, found.step_s


@MAKERS
@pytest.mark.parametrize("recompute", ["never", "auto"])
@pytest.mark.parametrize("seed", range(200, 215))
def test_no_bound_lies_above_the_simulated_step(seed: int, recompute: str, make: Callable[[int], Problem]) -> None:
    for path, bound_s, step_s in pipelines(replace(make(seed), recompute=recompute)):
        assert max(*path, bound_s) <= step_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_no_bound_lies_above_the_step_where_messages_and_sums_share_network_cards(seed: int) -> None:
    for path, bound_s, step_s in pipelines(crowded_problem(seed)):
        assert max(*path, bound_s) <= step_s * (1 + 1e-9)


def on_two_hosts(**figures: float) -> Problem:
    """Two layers on two hosts of two devices, which are joined by links of 1 MB/s; within a host nothing takes time."""
    profile = chain_profile(2, 4, hosts=("n0", "n0", "n1", "n1"), bandwidth_bytes_per_s=1e6, **figures)
    links = {**profile.cluster.links, WITHIN_HOST: Link(0.0, 1e15)}
    cluster = replace(profile.cluster, links=links, collectives=())
    return Problem(replace(profile, cluster=cluster), 8, schedules=("1f1b",), micro_batch_sizes=(2,), confidence=0.0)


def test_all_outputs_of_a_host_pass_its_network_card() -> None:
    (frontier,) = spaces(Evaluator(problem := on_two_hosts(activation_bytes=4096), CostModel(problem.profile)))
    prices = frontier.suffixes.prices
    links = frontier.suffixes.links
    groups = {counts: prices.versions(counts)[0] for counts in ((2, 0), (0, 2), (1, 1))}
    sent = prices.cuts.crossings.forward_bytes > 0
    # four micro-batches of two samples; one channel would have a sample of each, in half of the time
    assert links.between(groups[2, 0], groups[0, 2]).load_forward_s[sent] == pytest.approx(8 * 4.096e-3)
    # of each micro-batch the first sample stays on its host, or the second does
    assert links.between(groups[1, 1], groups[0, 2]).load_forward_s[sent] == pytest.approx(4 * 4.096e-3)
    assert links.between(groups[1, 1], groups[1, 1]).load_forward_s[sent] == pytest.approx(0.0, abs=1e-9)


def test_sums_of_stages_on_the_same_hosts_share_their_network_cards() -> None:
    """Both stages have a device of each host, and sum 10 kB, in 10 ms if alone: both sums are there 20 ms after 13 ms.

    Four F of 1 ms and B of 2 ms, one after another: the second stage is done after 13 ms, the first after 15 ms.
    """
    problem = on_two_hosts(activation_bytes=4, parameter_bytes=10_000)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    (frontier,) = spaces(evaluator)
    steps_s = {}
    for _path, expansion in expansions(frontier, (), frontier.root()):
        for position in range(len(expansion)):
            child = expansion.child(position)
            if child.cuts == (0, 1, 3) and {choice.option.group for choice in child.choices} == {(1, 1)}:
                (leaves,) = Leaves.of(frontier, [(expansion, np.array([position]))])
                (leaf,) = leaves.under("1f1b", 4, float("inf"))
                step_s = evaluator.evaluate(frontier.candidate(child, "1f1b")).step_s
                steps_s = {"step": step_s, "leaf": leaf.bound_s, "prefix": float(expansion.bound_s[position])}
    assert steps_s == pytest.approx(dict.fromkeys(("step", "leaf", "prefix"), 33e-3), rel=1e-3)


@pytest.mark.parametrize("schedule", ["zb-h1", "gpipe-2bp"])
def test_gradients_that_a_later_half_adds_hold_up_nobody(schedule: str) -> None:
    """Where adding gradients takes long, and backwards are split: I adds none, and the stage before waits for I."""
    seen = 0
    for seed in (209, 221, 227):
        problem = random_problem(seed)
        profile = problem.profile
        longest_s = {(k, m.layer): m.forward_s for k, found in profile.measurements.items() for m in found}
        profile = replace(
            profile,
            parameters={
                kind: {layer: replace(cost, accumulate_s=5 * longest_s[kind, layer]) for layer, cost in costs.items()}
                for kind, costs in profile.parameters.items()
            },
            measurements={
                kind: tuple(
                    replace(m, backward_input_s=0.4 * m.backward_s, backward_weight_s=0.6 * m.backward_s) for m in found
                )
                for kind, found in profile.measurements.items()
            },
        )
        for path, bound_s, step_s in pipelines(replace(problem, profile=profile, schedules=(schedule,))):
            assert max(*path, bound_s) <= step_s * (1 + 1e-9)
            seen += 1
    assert seen > 50


@MAKERS
def test_all_work_over_all_devices_is_a_bound(make: Callable[[int], Problem]) -> None:
    for seed in range(220, 235):
        problem = make(seed)
        for frontier in spaces(Evaluator(problem, CostModel(problem.profile))):
            least = frontier.suffixes.prices.capacity_s().min(axis=0).sum() / len(problem.ranks)
            assert least <= frontier.suffixes.root_s() * (1 + 1e-9)


@MAKERS
@pytest.mark.parametrize("mixes_kinds", [True, False])
@pytest.mark.parametrize("seed", range(240, 260))
def test_so_few_devices_are_not_enough_for_a_shorter_step(
    make: Callable[[int], Problem], seed: int, mixes_kinds: bool
) -> None:
    """However samples are shared: the bound by counts of devices lies below every plan, and above all work over all."""
    problem = make(seed)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    spaces_of = {frontier.suffixes.prices.micro_batches: frontier.suffixes.prices for frontier in spaces(evaluator)}
    least_s = dict.fromkeys(spaces_of, float("inf"))
    devices = problem.profile.cluster.devices
    for candidate in plans(problem, every_share=True):
        is_mixed = any(len({devices[rank].kind for rank in group}) > 1 for group in candidate.groups)
        found = evaluator.evaluate(candidate)
        if found.fits and candidate.micro_batches in spaces_of and (mixes_kinds or not is_mixed):
            least_s[candidate.micro_batches] = min(least_s[candidate.micro_batches], found.step_s)
    for micro_batches, prices in spaces_of.items():
        best_s = least_s[micro_batches]
        capacity = capacity_of(prices)
        bound_s = least_step_s(prices, capacity, mixes_kinds=mixes_kinds)
        assert capacity.work_s <= bound_s
        assert least_step_s(prices, capacity, capacity.work_s, mixes_kinds) == capacity.work_s
        assert bound_s <= best_s * (1 + 1e-9)
        if np.isfinite(best_s):  # an upper bound just above the best leaves it in
            assert least_step_s(prices, capacity, best_s * (1 + 1e-6), mixes_kinds) <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("kinds", [1, 2])
def test_columns_taken_together_say_no_more_than_each_by_itself(kinds: int) -> None:
    problem = Problem(scale_profile(12, 24, kinds), 48, confidence=0.0)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    for prices in (frontier.suffixes.prices for frontier in spaces(evaluator)):
        places = CutPlaces.of(prices)
        assert places is not None
        work = capacity_of(prices)
        exact = Columns(prices, places, worths(work.weights))
        for grain in (1.5, 4.0):
            coarse = replace(exact, grain=grain)
            assert coarse.num_shares < exact.num_shares or exact.num_shares <= 3 * kinds
            for upper_s in (1.2 * work.work_s, 2 * work.work_s, 8 * work.work_s):
                least_s = CountsTable(exact, upper_s).least_step_s()
                assert CountsTable(coarse, upper_s).least_step_s() <= least_s * (1 + 1e-9)


def on_several_hosts(seed: int) -> Problem:
    """Three devices of one kind or two on several hosts; gradients that fill a bucket or not, sums by theory."""
    draw = random.Random(seed)
    num_layers = draw.randint(2, 3)
    num_devices = 3
    profile = chain_profile(
        num_layers,
        num_devices,
        forward_s=[draw.uniform(1e-3, 8e-3) for _ in range(num_layers)],
        parameter_bytes=[
            draw.choice([4096, BUCKET_BYTES // 3, BUCKET_BYTES, 3 * BUCKET_BYTES]) for _ in range(num_layers)
        ],
        speeds=[draw.choice([1.0, 1.0, 0.6]) for _ in range(num_devices)],
        hosts=draw.choice([["n0", "n0", "n1"], ["n0", "n1", "n2"]]),
        memory_bytes=2**40,
    )
    links = {WITHIN_HOST: Link(1e-5, 1e11), ACROSS_HOSTS: Link(draw.choice([0.0, 1e-3]), draw.choice([1e9, 1e10]))}
    profile = replace(profile, cluster=replace(profile.cluster, links=links, collectives=()))
    return Problem(profile, draw.choice([3, 4]), schedules=draw.choice([("gpipe",), ("1f1b",)]), confidence=0.0)


@pytest.mark.parametrize("seed", range(16))
def test_on_several_hosts_no_bound_of_sums_bucket_by_bucket_lies_above_the_step(seed: int) -> None:
    problem = on_several_hosts(seed)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    bounds = {
        prices.micro_batches: least_step_s(prices, capacity_of(prices))
        for prices in (frontier.suffixes.prices for frontier in spaces(evaluator))
    }
    for candidate in plans(problem, every_share=True):
        found = evaluator.evaluate(candidate)
        if found.fits and candidate.micro_batches in bounds:
            assert bounds[candidate.micro_batches] <= found.step_s * (1 + 1e-9)
    for path, bound_s, step_s in pipelines(problem):
        assert max(*path, bound_s) <= step_s * (1 + 1e-9)


def test_the_bound_knows_that_many_ranks_wait_for_each_bucket() -> None:
    """Eight gradients of 9 MiB over four hosts: eight sums, each with the latency of its own ring."""
    profile = chain_profile(8, 4, forward_s=1e-6, parameter_bytes=9 * 2**20, hosts=["n0", "n1", "n2", "n3"])
    links = {WITHIN_HOST: Link(0.0, 1e12), ACROSS_HOSTS: Link(1e-3, 1e12)}
    profile = replace(profile, cluster=replace(profile.cluster, links=links, collectives=()))
    problem = Problem(profile, 4, micro_batch_sizes=(4,), max_stages=1, confidence=0.0)
    (frontier,) = spaces(Evaluator(problem, CostModel(profile)))
    (group,) = frontier.suffixes.prices.versions((1, 1, 1, 1))
    stage = group.stage(np.array([0]), np.array([frontier.suffixes.prices.cuts.last]))
    assert stage.tail_s[0] == pytest.approx(8 * 2 * 3 * (1e-3 + 9 * 2**20 / 4 / 1e12), rel=1e-2)


def test_the_bound_sees_that_one_sample_passes_all_layers_in_turn() -> None:
    """Four devices do a quarter of the work each, but not at once; of four samples the pipeline's bubble is left."""
    profile = chain_profile(4, 4, forward_s=1e-3, bandwidth_bytes_per_s=1e15)
    for batch, least_s in ((1, 12e-3), (4, (4 * 3 + 9) * 1e-3)):
        problem = Problem(profile, batch, micro_batch_sizes=(1,), confidence=0.0)
        (frontier,) = spaces(Evaluator(problem, CostModel(profile)))
        prices = frontier.suffixes.prices
        assert least_step_s(prices, capacity_of(prices)) == pytest.approx(least_s, rel=0.01)
        assert capacity_of(prices).work_s == pytest.approx(batch * 3e-3)


def test_what_unlike_devices_can_do_is_the_best_of_all_ways_to_share_layers() -> None:
    """The dual at its best weights is the linear program, here by its solver."""
    draw = np.random.default_rng(1)
    for _ in range(20):
        kinds = int(draw.integers(1, 4))
        layers = int(draw.integers(1, 6))
        seconds = draw.uniform(1.0, 3.0, (kinds, layers))
        counts = draw.integers(1, 5, kinds)
        share = np.zeros((kinds, kinds * layers + 1))
        for kind in range(kinds):
            share[kind, kind * layers : (kind + 1) * layers] = seconds[kind]
            share[kind, -1] = -counts[kind]
        whole = np.hstack([np.tile(np.eye(layers), kinds), np.zeros((layers, 1))])
        objective = np.append(np.zeros(kinds * layers), 1.0)
        best = linprog(objective, share, np.zeros(kinds), whole, np.ones(layers))
        found = capacity(seconds, counts.tolist())
        assert 0.97 * best.fun <= found.work_s <= best.fun * (1 + 1e-9)
        assert max(found.weights) == pytest.approx(1.0)


def test_where_members_are_alike_the_bound_of_a_pipeline_is_its_step() -> None:
    profile = chain_profile(
        4, 2, forward_s=(1e-3, 3e-3, 2e-3, 2e-3), activation_bytes=4096, latency_s=1e-4, bandwidth_bytes_per_s=1e7
    )
    problem = replace(random_problem(0), profile=profile, global_batch=4, schedules=(), micro_batch_sizes=(1, 2))
    ratios = [bound_s / step_s for _, bound_s, step_s in pipelines(problem)]
    assert len(ratios) > 50
    assert min(ratios) > 1 - 1e-9


def test_a_branch_that_reads_the_input_need_not_wait() -> None:
    profile = chain_profile(4, 4, forward_s=(10e-3, 1e-4, 10e-3, 1e-4), bandwidth_bytes_per_s=1e12)
    l0, l1, l2, l3, loss = profile.graph.layers
    branched = (l0, l1, replace(l2, inputs=("x",)), replace(l3, kind="opaque", inputs=("l1", "l2")), loss)
    profile = replace(profile, graph=replace(profile.graph, layers=branched))
    found = list(pipelines(Problem(profile, 2, micro_batch_sizes=(2,), confidence=0.0)))
    assert all(max(*path, bound_s) <= step_s * (1 + 1e-9) for path, bound_s, step_s in found)
    assert min(step_s for _, _, step_s in found) < 61e-3  # one after the other the branches take twice as long


def test_a_table_that_falls_is_flattened_from_behind() -> None:
    link = Link(0.0, 1.0, ((10, 5.0), (100, 2.0), (1000, 8.0)))
    sizes = np.array([10.0, 50.0, 100.0, 500.0, 1000.0])
    assert (transfer_s(least_link(link), sizes) <= transfer_s(link, sizes) + 1e-12).all()
    assert (np.diff(transfer_s(least_link(link), sizes)) >= 0).all()


def test_schedules_are_known_by_what_they_keep() -> None:
    assert [kept_by("gpipe", depth, 4) for depth in (1, 3)] == [(4,), (4, 4, 4)]
    assert [kept_by("1f1b", depth, 4)[0] for depth in (1, 2, 3, 9)] == [1, 2, 3, 4]
    assert fewest_kept("1f1b", 5, 4) == (1, 2, 3, 4, 4)
    assert [kept_by("zb-h1", depth, 4)[0] for depth in (1, 2, 3)] == [1, 2, 3]


def test_layers_that_cost_nothing_stay_with_a_neighbour() -> None:
    def profile(activation_bytes: tuple[int, ...]) -> Profile:
        return chain_profile(
            4,
            forward_s=(1e-3, 0.0, 1e-3, 1e-3),
            parameter_bytes=(4, 0, 4, 4),
            saved_bytes=(4, 0, 4, 4),
            activation_bytes=activation_bytes,
        )

    merged = cuts_of(CostModel(profile((8, 8, 8, 8))))
    assert [merged.layers(0, cut) for cut in range(5)] == [(), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4)]
    growing = cuts_of(CostModel(profile((8, 16, 8, 8))))  # l1 hands on more than it reads: it stays with its reader
    assert [growing.layers(0, cut) for cut in range(5)] == [(), (0,), (0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4)]


@pytest.mark.parametrize("seed", [0, 2, 4, 5])
def test_where_levels_are_known_and_memory_binds_the_best_is_that_of_exhaustion(seed: int) -> None:
    """Whether gradients of values are known (``seed`` above 0) or not, no bound on memory prunes what fits."""
    problem = random_problem(seed)
    problem = with_memory(replace(problem, profile=with_levels(problem.profile, seed)), 2**40)
    free, _ = best_by_exhaustion(problem)
    assert free is not None
    most = max(memory.peak_bytes for memory in free.memories)
    for share in (0.9, 0.7):
        tight = with_memory(problem, round(share * most))
        expected, _ = best_by_exhaustion(tight)
        if expected is None:
            with pytest.raises(InfeasibleError):
                solver("best-first")(tight, None)
        else:
            assert solver("best-first")(tight, None).prediction.step_s == pytest.approx(expected.step_s, rel=1e-9)
