"""The bounds that the search over layouts rests on: never above a plan, and exact where nothing is left out."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.chains import chain_profile
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.ir.layout import equal_shares
from planner.ir.problem import Problem
from planner.solvers.best_first.capacity import least_work_s
from planner.solvers.best_first.layer_links import links_of
from planner.solvers.best_first.layout_bound import GroupTable, TableMaker
from planner.solvers.best_first.layout_chains import Chains
from planner.solvers.budget import Budget
from planner.solvers.candidates.candidate import micro_batches, pools, with_options
from planner.solvers.candidates.constraints import Constraints
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import cut_positions, gives_all_work, joins_all_ranks
from planner.solvers.layouts.stage import LEAST, WHOLE
from tests.planner.networks import Named, Network, plain, priced, residual
from tests.planner.parts import with_parts
from tests.planner.solvers.laid_out_plans import EVERYTHING, MADE, random_candidate, random_network, with_random_parts


def made_at(problem: Problem, size: int) -> tuple[Evaluator, Chains]:
    evaluator = Evaluator(problem, CostModel(problem.profile))
    maker = TableMaker(evaluator, Constraints.of(problem), size, WHOLE, Budget(60.0), 60.0)
    sorts = tuple((pool,) for pool in pools(problem))
    tables = {
        (number, count): maker.table(pool.ranks[:count])
        for number, (pool,) in enumerate(sorts)
        for count in range(1, len(pool.ranks) + 1)
    }
    links = links_of(problem, size, WHOLE)
    positions = cut_positions(problem.profile.graph)
    return evaluator, Chains(sorts, tables, positions, links, maker.num_full, 0, maker.budget)


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_takes_less_device_time_than_the_least_work(seed: int) -> None:
    draw = random.Random(seed)
    profile = random_network(draw)
    profile = with_random_parts(draw, profile) if seed % 2 else profile
    problem = Problem(profile, draw.choice([4, 6, 8]), allow=EVERYTHING)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    candidate = random_candidate(draw, evaluator)
    backward = "least" if candidate.schedule == "zb-h1" else WHOLE
    work_s = least_work_s(evaluator, max(candidate.micro_batches), backward).sum()
    assert evaluator.evaluate(candidate).step_s * len(problem.ranks) >= work_s * (1 - 1e-9)


def test_the_work_of_costs_in_proportion_to_samples_is_exact() -> None:
    profile = chain_profile(4, 1, forward_s=(1e-3, 2e-3, 1e-3, 3e-3))
    evaluator = Evaluator(Problem(profile, 8), CostModel(profile))
    for size in (1, 2, 8):
        assert least_work_s(evaluator, size, WHOLE).sum() == pytest.approx(8 * 3 * 7e-3)
        assert least_work_s(evaluator, size, "none").sum() == pytest.approx(8 * 7e-3)


@pytest.mark.parametrize("latency_s", [0.0, 1e-5])
def test_of_one_micro_batch_on_single_ranks_only_updates_are_left_out(latency_s: float) -> None:
    profile = priced(*plain(samples=4, height=16), speeds=(1.0, 1.0), latency_s=latency_s, bandwidth_bytes_per_s=1e8)
    evaluator, chains = made_at(Problem(profile, 4, allow=EVERYTHING), 4)
    last = len(profile.graph.layers)
    num_checked = 0
    for chain in chains.best_first(lambda: math.inf):
        if [len(ranks) for _, _, ranks, _ in chain.stages] != [1, 1]:
            continue
        cut = chain.stages[0][1]
        candidate = Candidate.chain(
            (0, cut, last), ((0,), (1,)), ((4,), (4,)), micro_batches(evaluator.problem, 4), "gpipe"
        )
        step_s = evaluator.evaluate(candidate).step_s
        update_s = sum(cost.update_s for cost in profile.parameters["kind-1"].values())
        assert chain.bound_s <= step_s * (1 + 1e-9)
        assert chain.bound_s >= (step_s - update_s) * (1 - 1e-9) or cut == last - 1  # the loss reads in its own way
        num_checked += 1
    assert num_checked == last - 1


def test_chains_come_by_their_bounds_and_none_is_below_that_of_all() -> None:
    profile = priced(*plain(samples=4, height=32), speeds=(1.0,) * 3, latency_s=1e-6)
    _, chains = made_at(Problem(profile, 8, allow=EVERYTHING), 2)
    found = [chain.bound_s for chain in chains.best_first(lambda: math.inf)]
    assert len(found) > 20
    assert found == sorted(found)
    assert found[0] >= chains.bound_s()
    limit = found[len(found) // 2]
    assert [chain.bound_s for chain in chains.best_first(lambda: limit)] == [each for each in found if each < limit]


def test_parts_that_take_less_than_their_share_lower_the_least_work() -> None:
    profile = priced(*plain(samples=4, height=32), speeds=(1.0, 1.0))
    quick = with_parts(profile, (1, 2, 4), 2, lambda layer, samples, part: 0.25)
    least = [
        least_work_s(Evaluator(Problem(each, 4, allow=EVERYTHING), CostModel(each)), 4, WHOLE)
        for each in (profile, quick)
    ]
    cut = [k for k, layer in enumerate(profile.graph.layers) if layer.kind == "conv"]
    assert (least[1][cut] < 0.3 * least[0][cut]).all()


def apart(samples: int = 4, height: int = 32) -> tuple[Network, Named]:
    """Two convolutions of the image, which are concatenated: the second waits for nothing."""
    network = Network(samples, 4, height)
    both = network.concat(network.conv(network.image, 8), network.conv(network.image, 8))
    return network, network.head(network.conv(both, 6), 6)


def any_pipeline(draw: random.Random, evaluator: Evaluator, sizes: tuple[int, ...]) -> Candidate:
    """One to three stages within the hosts of like devices, the layers of each with any layouts."""
    problem = evaluator.problem
    graph = evaluator.problem.profile.graph
    last = len(graph.layers)
    hosts = [pool.ranks for pool in pools(problem)]
    while True:
        batches = micro_batches(problem, draw.choice(sizes))
        at = [0] * len(hosts)
        groups = []
        for _ in range(draw.randint(1, 3)):
            host = draw.randrange(len(hosts))
            count = draw.randint(1, len(hosts[host]))
            groups.append(hosts[host][at[host] : at[host] + count])
            at[host] += count
        if not all(groups):
            continue
        cuts = draw.choice([tuple(draw.sample(range(1, last), len(groups) - 1)), (1, 2)[: len(groups) - 1]])
        bounds = (0, *sorted(cuts), last)
        shares = tuple(equal_shares(max(batches), len(group)) for group in groups)
        schedule = draw.choice(["gpipe", "1f1b", "zb-h1"])
        candidate = Candidate.chain(bounds, tuple(groups), shares, batches, schedule)
        fits = all(min(evaluator.pricing.samples(share, rows)) > 0 for share in shares for rows in set(batches))
        for group, (first, stop) in zip(groups, itertools.pairwise(bounds), strict=True):
            prices = evaluator.layouts.prices(group, max(batches))
            if draw.random() < 0.7:
                options = {index: draw.choice(prices.options(index)[:6]) for index in range(first, stop)}
                candidate = with_options(evaluator.layouts, candidate, options)
                fits = fits and gives_all_work(evaluator.layouts, group, options, set(batches))
        if fits and joins_all_ranks(graph, candidate):
            return candidate


@pytest.mark.parametrize("seed", range(120))
def test_no_pipeline_is_faster_than_the_bound_of_its_stretches_of_layers(seed: int) -> None:
    draw = random.Random(seed)
    hosts = draw.choice([None, ("a", "a", "b", "b")])
    profile = priced(
        *draw.choice((*MADE, apart(), apart())),
        speeds=(1.0,) * 4,
        hosts=hosts,
        latency_s=draw.choice([0.0, 1e-6, 1e-5]),
        bandwidth_bytes_per_s=draw.choice([1e8, 1e10]),
    )
    evaluator = Evaluator(problem := Problem(profile, draw.choice([4, 6, 8]), allow=EVERYTHING), CostModel(profile))
    candidate = any_pipeline(draw, evaluator, (1, 2, 3, 4))
    size = max(candidate.micro_batches)
    backward = LEAST if candidate.schedule == "zb-h1" else WHOLE
    maker = TableMaker(evaluator, Constraints.of(problem), size, backward, Budget(60.0), 60.0)
    like = pools(problem)
    used = {len(group) for group in candidate.groups}
    tables = {
        (0, count): maker.table(like[0].ranks[:count]) if count in used else None
        for count in range(1, len(like[0].ranks) + 1)
    }
    positions = tuple(sorted({candidate.stage_of.index(stage) for stage in range(candidate.num_stages)}))
    chains = Chains(
        (like,),
        tables,
        (*positions, len(profile.graph.layers)),
        links_of(problem, size, backward),
        maker.num_full,
        0,
        maker.budget,
    )
    step_s = evaluator.evaluate(candidate).step_s
    assert chains.bound_s() <= step_s * (1 + 1e-9)
    counts = [len(group) for group in candidate.groups]
    own = [chain for chain in chains.best_first(lambda: math.inf) if [len(each[2]) for each in chain.stages] == counts]
    assert all(chain.bound_s <= step_s * (1 + 1e-9) for chain in own if len(chain.stages) == len(positions))
    assert own


def test_a_pipeline_of_one_micro_batch_takes_its_way_there_and_back_whatever_is_skipped() -> None:
    made = residual(samples=4, height=32, blocks=2)
    profile = priced(*made, speeds=(1.0,) * 4, latency_s=0.0, bandwidth_bytes_per_s=1e12)
    _, chains = made_at(Problem(profile, 4, allow=EVERYTHING), 4)
    alone = chains.tables[0, 1]
    assert alone is not None
    for chain in itertools.islice(chains.best_first(lambda: math.inf), 200):
        if {len(ranks) for _, _, ranks, _ in chain.stages} == {1}:
            assert chain.bound_s >= 0.9 * alone.least_s[1, 0, -1]


def test_like_hosts_are_one_and_stages_are_within_hosts() -> None:
    profile = priced(*plain(samples=4, height=32), speeds=(1.0,) * 4, hosts=("a", "a", "b", "b"))
    problem = Problem(profile, 4, allow=EVERYTHING)
    evaluator = Evaluator(problem, CostModel(profile))
    maker = TableMaker(evaluator, Constraints.of(problem), 2, WHOLE, Budget(60.0), 60.0)
    like = pools(problem)
    tables = {(0, count): maker.table(like[0].ranks[:count]) for count in (1, 2)}
    links = links_of(problem, 2, WHOLE)
    positions = cut_positions(profile.graph)
    chains = Chains((like,), tables, positions, links, maker.num_full, 0, maker.budget)
    placed = [[ranks for _, _, ranks, _ in chain.stages] for chain in chains.best_first(lambda: math.inf)]
    assert [(0, 1), (2, 3)] in placed
    assert [(2,), (0, 1), (3,)] in placed
    for groups in placed:
        assert len({rank for ranks in groups for rank in ranks}) == sum(map(len, groups))
        assert all(len({rank // 2 for rank in ranks}) == 1 for ranks in groups)


@pytest.mark.parametrize("seed", range(24))
def test_no_stage_on_all_ranks_is_faster_than_its_work_and_its_statistics(seed: int) -> None:
    draw = random.Random(seed)
    made = residual(samples=4, height=draw.choice([8, 16]), blocks=2)
    profile = priced(
        *made, speeds=(1.0,) * 4, hosts=draw.choice([None, ("a", "a", "b", "b")]), latency_s=draw.choice([1e-6, 1e-5])
    )
    problem = Problem(profile, 8, allow=("sample", "spatial"))
    evaluator = Evaluator(problem, CostModel(profile))
    size = draw.choice([2, 4, 8])
    last = len(profile.graph.layers)
    maker = TableMaker(evaluator, Constraints.of(problem), size, WHOLE, Budget(60.0), 60.0)
    statistics_s = maker.least_statistics_s(problem.ranks)
    assert statistics_s > 0
    bound_s = float(least_work_s(evaluator, size, WHOLE).sum()) / 4 + statistics_s
    table = maker.table(problem.ranks, of_stretches=False)
    assert table is not None
    assert bound_s <= table.step_s[0, last] * (1 + 1e-9)
    assert (whole := maker.table(problem.ranks)) is not None
    assert table.step_s[0, last] == pytest.approx(whole.step_s[0, last])
    prices = evaluator.layouts.prices(problem.ranks, size)
    batches = micro_batches(problem, size)
    plain_plan = Candidate.chain((0, last), (problem.ranks,), (equal_shares(size, 4),), batches, "1f1b")
    for _ in range(5):
        options = {index: draw.choice(prices.options(index)) for index in range(last)}
        candidate = with_options(evaluator.layouts, plain_plan, options)
        if gives_all_work(evaluator.layouts, problem.ranks, options, set(batches)):
            assert evaluator.evaluate(candidate).step_s >= bound_s * (1 - 1e-9)


def test_statistics_of_a_stage_are_not_bounded_where_channels_are_cut() -> None:
    problem = Problem(priced(*residual(samples=4, height=8), speeds=(1.0,) * 4, latency_s=1e-6), 8, allow=EVERYTHING)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    maker = TableMaker(evaluator, Constraints.of(problem), 4, WHOLE, Budget(60.0), 60.0)
    assert maker.least_statistics_s(problem.ranks) == 0.0


def test_what_passes_between_whole_hosts_is_on_their_cards() -> None:
    profile = priced(
        *plain(samples=4, height=32),
        speeds=(1.0,) * 4,
        hosts=("a", "a", "b", "b"),
        latency_s=1e-6,
        bandwidth_bytes_per_s=1e8,
    )
    problem = Problem(profile, 8, allow=EVERYTHING)
    evaluator = Evaluator(problem, CostModel(profile))
    maker = TableMaker(evaluator, Constraints.of(problem), 2, WHOLE, Budget(60.0), 60.0)
    like = pools(problem)
    tables = {(0, count): maker.table(like[0].ranks[:count]) for count in (1, 2)}
    links = links_of(problem, 2, WHOLE)
    last = len(profile.graph.layers)
    chains = Chains((like,), tables, (0, 1, last), links, maker.num_full, 0, maker.budget)
    (value,) = profile.graph.layers[0].outputs
    card_s = value.at(8, profile.graph.samples).num_bytes / evaluator.cost_model.network.most_card_bytes_per_s
    bounds = {
        tuple(len(ranks) for _, _, ranks, _ in chain.stages): chain.bound_s
        for chain in chains.best_first(lambda: math.inf)
    }
    assert bounds[2, 2] > card_s
    assert bounds[1, 1] < bounds[2, 2]  # on one host


@pytest.mark.parametrize("seed", range(24))
def test_rough_tables_say_no_more_than_those_of_priced_options(seed: int) -> None:
    draw = random.Random(seed)
    made = draw.choice((*MADE, residual(samples=4, height=16, blocks=2)))
    profile = priced(*made, speeds=(1.0,) * 4, latency_s=draw.choice([0.0, 1e-6, 1e-5]))
    profile = with_random_parts(draw, profile) if seed % 2 else profile
    problem = Problem(profile, 8, allow=draw.choice([EVERYTHING, ("sample", "spatial"), ("spatial",)]))
    evaluator = Evaluator(problem, CostModel(profile))
    backward = draw.choice([WHOLE, LEAST])
    maker = TableMaker(evaluator, Constraints.of(problem), draw.choice([2, 3, 4]), backward, Budget(60.0), 60.0)
    for count in (1, 2, 3, 4):
        rough = maker.rough(problem.ranks[:count])
        table = maker.table(problem.ranks[:count])
        if table is not None:
            assert (rough.by_samples_s == table.by_samples_s).all()
            assert (np.triu(rough.laid_out_s) <= np.triu(table.laid_out_s) * (1 + 1e-9) + 1e-15).all()


def test_stages_that_follow_one_another_on_a_host_are_no_larger_than_it_together() -> None:
    profile = priced(*plain(samples=4, height=32), speeds=(1.0,) * 6, hosts=("a", "a", "a", "b", "b", "b"))
    within, across = profile.cluster.links.values()
    slow = {"within-host": within, "across-hosts": replace(across, latency_s=1.0, points=())}
    problem = Problem(replace(profile, cluster=replace(profile.cluster, links=slow)), 4, allow=EVERYTHING)
    evaluator = Evaluator(problem, CostModel(problem.profile))
    maker = TableMaker(evaluator, Constraints.of(problem), 2, WHOLE, Budget(60.0), 60.0)
    like = pools(problem)
    last = len(profile.graph.layers)
    stages = (0, 1), (1, 2), (2, last)
    for counts, crosses in (((2, 1, 2), True), ((1, 1, 1), False)):  # on hosts of three; neighbours fit onto one
        tables = {}
        for count in (1, 2, 3):
            table = maker.table(like[0].ranks[:count])
            own = [stage for stage, ranks in zip(stages, counts, strict=True) if ranks == count]
            tables[0, count] = only(table, own) if table is not None and own else None
        chains = Chains((like,), tables, (0, 1, 2, last), links_of(problem, 2, WHOLE), maker.num_full, 0, maker.budget)
        assert (chains.bound_s() > 1.0) is crosses


def only(table: GroupTable, stages: Sequence[tuple[int, int]]) -> GroupTable:
    """The table of these stages alone."""
    is_open = np.zeros(table.step_s.shape, dtype=bool)
    is_open[tuple(zip(*stages, strict=True))] = True
    by_samples_s = np.where(is_open, table.by_samples_s, np.inf)
    return replace(table, by_samples_s=by_samples_s, laid_out_s=np.where(is_open, table.laid_out_s, np.inf))
