"""Replicas that do the same are simulated once: the same steps and memories as where all of them are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.scale import scale_profile
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.costs.simulator.symmetry import Symmetry, slices
from planner.ir.layout import equal_shares
from planner.ir.problem import Problem
from planner.solvers.candidates.candidate import decision_of, micro_batches
from planner.solvers.candidates.evaluate import Evaluator


def _drawn(seed: int) -> tuple[Problem, Candidate]:
    """Stages of replicas, on hosts of their own or beside one another, on links that take a core's time or not."""
    draw = random.Random(seed)
    profile = scale_profile(12, 32, seed=seed)
    if seed % 3 == 0:
        cores = {"sender_core": ((1000, 1e-6), (10**6, 1e-4)), "receiver_core": ((1000, 1e-6), (10**6, 2e-4))}
        links = {name: replace(link, **cores) for name, link in profile.cluster.links.items()}
        devices = tuple(replace(device, core_share=1.0) for device in profile.cluster.devices)
        profile = replace(profile, cluster=replace(profile.cluster, links=links, devices=devices))
    problem = Problem(profile, 64)
    sizes = [draw.choice([2, 4, 8]) for _ in range(draw.choice([1, 2, 3, 4]))]
    ranks = list(range(32)) if seed % 2 else [8 * host + place for place in range(8) for host in range(4)]
    groups = [tuple(ranks[sum(sizes[:s]) :][:size]) for s, size in enumerate(sizes)]
    layers = len(profile.graph.layers)
    cuts = sorted(draw.sample(range(1, layers), len(sizes) - 1))
    stage_of = tuple(sum(cut <= layer for cut in cuts) for layer in range(layers))
    shares = tuple(equal_shares(16, size) for size in sizes)
    schedule = draw.choice(["1f1b", "gpipe", "1f1b-so"])
    return problem, Candidate(stage_of, tuple(groups), shares, micro_batches(problem, 16), schedule)


@pytest.mark.parametrize("seed", range(24))
def test_a_symmetric_plan_takes_as_long_as_if_all_its_ranks_were_simulated(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, candidate = _drawn(seed)
    found = Evaluator(problem, CostModel(problem.profile)).evaluate(candidate)
    decision = decision_of(problem, candidate)
    seen = forecast(Pricing.of(problem.profile), decision, 0.08)
    monkeypatch.setattr("planner.costs.pricing.symmetry_of", lambda costs: None)
    whole = Evaluator(problem, CostModel(problem.profile)).evaluate(candidate)
    assert found.step_s == pytest.approx(whole.step_s, rel=1e-9)
    assert found.memories == whole.memories
    known = forecast(Pricing.of(problem.profile), decision, 0.08)
    assert seen.memories == known.memories
    assert [(span.rank, span.action) for span in seen.timeline.spans] == [
        (span.rank, span.action) for span in known.timeline.spans
    ]
    ends = [span.stop_s for span in known.timeline.spans]
    assert [span.stop_s for span in seen.timeline.spans] == pytest.approx(ends, rel=1e-9)


def _of(groups: Sequence[tuple[int, ...]], *samples: tuple[int, ...]) -> Symmetry | None:
    return slices(scale_profile(4, 32).cluster, groups, [[own] for own in samples])


def test_slices_are_as_many_as_hosts_and_samples_allow() -> None:
    """Hosts are 0-7, 8-15, ...; four replicas of two stages, on hosts of their own; one of them is enough."""
    whole = _of([(0, 1, 2, 3), (8, 9, 10, 11)], (4, 4, 4, 4), (4, 4, 4, 4))
    assert whole is not None
    assert (whole.kept, whole.copies) == ({0, 8}, 4)
    pairs = _of([(0, 1, 2, 3), (8, 9, 10, 11)], (5, 3, 5, 3), (4, 4, 4, 4))
    assert pairs is not None
    assert (pairs.kept, pairs.copies) == ({0, 1, 8, 9}, 2)
    apart = _of([(0, 8), (16, 24)], (4, 4), (4, 4))
    assert apart is not None
    assert (apart.kept, apart.copies) == ({0, 16}, 1)
    assert _of([(0, 1, 2, 8), (16, 17, 18, 24)], (4, 4, 4, 4), (4, 4, 4, 4)) is None  # three here, one there
    assert _of([(0, 1), (8, 16)], (4, 4), (4, 4)) is None  # a host of both slices, and one of each alone
