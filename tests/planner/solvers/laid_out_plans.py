"""Small networks of every shape, and plans that give their layers any layouts."""

from __future__ import annotations

import random
from dataclasses import replace

from planner.costs.candidate import Candidate
from planner.costs.predict import forecast
from planner.ir.layout import equal_shares
from planner.ir.plan import Plan, Search
from planner.ir.problem import AUTO, Problem
from planner.ir.profile import Optimizer, Profile
from planner.solvers.candidates.candidate import decision_of, micro_batches, plan_of, with_options
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import gives_all_work, joins_all_ranks
from tests.planner.networks import Named, Network, mesh_like, plain, priced, residual
from tests.planner.parts import with_parts

EVERYTHING = ("sample", "spatial", "channel")


def branching(samples: int = 4, height: int = 8) -> tuple[Network, Named]:
    """A strided convolution, two branches that are concatenated, a pool, and a classifier."""
    network = Network(samples, 4, height)
    x = network.conv(network.image, 8, 3, 2)
    left = network.relu(network.conv(x, 4, 1))
    right = network.conv(x, 4, 3, 1, 2)
    return network, network.head(network.pool(network.norm(network.concat(left, right))), 6)


def pooled(samples: int = 4, height: int = 8) -> tuple[Network, Named]:
    """Two convolutions and a mean over all of space: a pending sum."""
    network = Network(samples, 4, height)
    return network, network.head(network.conv(network.conv(network.image, 8), 6), 6, "global_pool")


MADE = (
    branching(),
    pooled(),
    residual(samples=4, height=12, blocks=2),
    mesh_like(samples=4),
    plain(samples=4, filters=(6, 8)),
)


def random_network(draw: random.Random) -> Profile:
    """On two to four devices, alike or not, on one host or two."""
    count = draw.randint(2, 4)
    speeds = [draw.choice([1.0, 1.0, 2.5]) for _ in range(count)]
    hosts = [draw.choice(["a", "b"]) for _ in range(count)] if draw.random() < 0.4 else None
    profile = priced(
        *draw.choice(MADE),
        speeds=speeds,
        hosts=hosts,
        latency_s=draw.choice([0.0, 1e-6, 1e-5]),
        bandwidth_bytes_per_s=draw.choice([1e8, 1e10]),
        duplex=draw.random() < 0.7,
    )
    hungry = {
        kind: tuple(replace(m, workspace_bytes=draw.randint(0, 5000) * m.samples) for m in found)
        for kind, found in profile.measurements.items()
    }
    overhead = dict.fromkeys(profile.measurements, draw.choice([0.0, 1e-5]))
    optimizer = Optimizer("SGD", {"lr": 0.1, "momentum": 0.9}, draw.choice([0.0, 1.0]))
    return replace(profile, measurements=hungry, action_overhead_s=overhead, optimizer=optimizer)


def with_random_parts(draw: random.Random, profile: Profile) -> Profile:
    """Some parts of layers are measured as well: they take less or more than their share of the whole."""
    seed = draw.random()

    def factor(layer: str, samples: int, part: tuple[int, ...]) -> float:
        return random.Random(f"{seed} {layer} {samples} {part}").choice([0.4, 0.8, 1.0, 3.0])

    found = with_parts(profile, draw.choice([(1, 2, 4), (2,)]), len(profile.cluster.devices), factor)
    kept = {kind: tuple(one for one in parts if draw.random() < 0.7) for kind, parts in found.parts.items()}
    return replace(found, parts=kept)


def random_candidate(draw: random.Random, evaluator: Evaluator) -> Candidate:
    """One or two stages, the layers of each with any layouts, some stages cut along samples alone."""
    problem = evaluator.problem
    last = len(problem.profile.graph.layers)
    ranks = problem.ranks
    while True:
        size = draw.choice([2, 3, 4])
        batches = micro_batches(problem, size)
        at = draw.randint(1, len(ranks) - 1)
        groups = draw.choice([(ranks,), (ranks[:at], ranks[at:])])
        bounds = (0, last) if len(groups) == 1 else (0, draw.randint(1, last - 1), last)
        shares = tuple(equal_shares(max(batches), len(group)) for group in groups)
        schedule = draw.choice(["gpipe", "1f1b", "zb-h1"])
        candidate = Candidate.chain(bounds, groups, shares, batches, schedule)
        candidate = replace(candidate, recompute=tuple(draw.random() < 0.3 for _ in groups))
        fits = min(min(share) for share in shares) > 0
        for stage, group in enumerate(groups):
            prices = evaluator.layouts.prices(group, max(batches))
            if draw.random() < 0.8:
                options = {i: draw.choice(prices.options(i)) for i in range(bounds[stage], bounds[stage + 1])}
                candidate = with_options(evaluator.layouts, candidate, options)
                fits = fits and gives_all_work(evaluator.layouts, group, options, set(batches))
            fits = fits and all(
                min(evaluator.pricing.samples(candidate.shares[stage], rows)) > 0 for rows in set(batches)
            )
        if fits and joins_all_ranks(problem.profile.graph, candidate):
            return candidate


def plan_of_candidate(evaluator: Evaluator, candidate: Candidate) -> Plan:
    """The candidate as a plan file, which asks for what the candidate is."""
    margins = [option.margin for option in candidate.options if option is not None]
    problem: Problem = replace(
        evaluator.problem, schedules=(candidate.schedule,), recompute=AUTO, halo_depth=max((0, *margins))
    )
    decision = decision_of(problem, candidate)
    seen = forecast(evaluator.pricing, decision, problem.memory_margin, problem.memory_bytes)
    return plan_of(problem, decision, seen.prediction, Search("by chance", "test", "heuristic", 0.0, 0.0, 1, 1))
