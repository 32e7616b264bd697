"""The plans that are compared: ours, SparsePipe's, and two for orientation.

Batches of clouds of varied sizes, the same whoever asks for them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import planner
from cuda_ops.sparse.preparation import padded
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.predict import Forecast, forecast
from planner.costs.pricing import Pricing
from planner.extras.baselines import sparsepipe
from planner.extras.baselines.common.answer import Trial, bandwidth_bytes_per_s, candidates, names_in, stages_in
from planner.extras.baselines.common.problem import block_ends, blocks_at, network
from planner.ir.plan import Decision
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from planner.solvers.candidates.candidate import decision_of
from planner.solvers.candidates.choose import best_of
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import micro_batch_sizes
from profiler.models.sparse_blocks import shapes

Batch = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""(coordinates, features, counts), (targets): samples first, padded to the largest cloud of all batches."""

_NEAR = 0.01


def sizes(samples: int, least: int, most: int, mean: int, seed: int) -> list[int]:
    """Voxels of each sample of a batch: uniform from ``least`` to ``most``, drawn again until their mean is ``mean``.

    (Within a hundredth: what is predicted is a step on clouds of ``mean`` voxels.)
    """
    draw = random.Random(seed)
    while True:
        found = [draw.randint(least, most) for _ in range(samples)]
        if abs(sum(found) / samples / mean - 1) <= _NEAR:
            return found


def batch(counts: list[int], num_classes: int, points: int, seed: int) -> Batch:
    """Shapes of such sizes, with one feature a voxel and a class each."""
    clouds = [shapes("clouds", (1, count, 1), seed + 101 * number) for number, count in enumerate(counts)]
    raw = padded([cloud.coords[:, 1:] for cloud in clouds], [cloud.feats for cloud in clouds], points)
    generator = torch.Generator().manual_seed(seed)
    return raw, (torch.randint(num_classes, (len(counts),), generator=generator),)


def batches(number: int, samples: int, num_classes: int, least: int, most: int, mean: int) -> list[Batch]:
    """``number`` batches of ``samples`` samples."""
    return [batch(sizes(samples, least, most, mean, seed), num_classes, most, seed) for seed in range(number)]


OURS, SPARSEPIPE, UNRESTRICTED = "ours", "SparsePipe", "SparsePipe, devices in any order"
ONE, SHARED = "one device", "one stage, sites shared by work"


@dataclass(frozen=True, slots=True)
class Case:
    """A plan with its name.

    Attributes:
        forecast: what the simulator says of it.
        counts_samples: a stage's ranks take equal numbers of whole samples, whatever their sizes.
    """

    name: str
    decision: Decision
    forecast: Forecast
    counts_samples: bool = False

    @property
    def predicted_s(self) -> float:
        """Of a step."""
        return self.forecast.prediction.step_s


def cases(problem: Problem) -> list[Case]:
    """All plans of the problem."""
    found = [
        _case(problem, name, planner.plan(problem, by).decision, by == "sparsepipe")
        for name, by in (
            (OURS, "best-first"),
            (SPARSEPIPE, "sparsepipe"),
            (ONE, "one-device"),
            (SHARED, "data-parallel"),
        )
    ]
    evaluator = Evaluator(problem, CostModel(problem.profile))
    best = best_of(evaluator, unrestricted(problem, evaluator.cost_model))
    found.insert(2, _case(problem, UNRESTRICTED, decision_of(problem, best.candidate), True))
    return found


def unrestricted(problem: Problem, cost_model: CostModel) -> Iterator[Candidate]:
    """The best plans by SparsePipe's formula where devices stand in any order and stages have any number of them.

    (Published, a later stage has fewer devices than stand before it: with two devices that leaves one stage.)
    """
    ranks = {cost_model.kind(rank): rank for rank in problem.ranks}
    bandwidth, trial = bandwidth_bytes_per_s(problem, problem.ranks), Trial(problem.time_limit_s)
    for size in micro_batch_sizes(problem, cost_model):
        networks = {kind: network(problem, cost_model, kind, size, prepares=True) for kind in ranks}
        first = next(iter(networks.values()))
        ends = block_ends(first, len(ranks))
        if ends is not None:
            networks = {kind: blocks_at(fine, ends) for kind, fine in networks.items()}
            first = next(iter(networks.values()))
        types = [sparsepipe.DeviceType(kind, found.graph, 1) for kind, found in networks.items()]
        stages = []
        for stage in stages_in(sparsepipe.best_pipeline(types, bandwidth)):
            counts = stage["devices"]
            taken = [ranks[kind] for kind, count in counts.items() if count] if isinstance(counts, dict) else []
            stages.append((first.layers(names_in(stage)), tuple(sorted(taken))))
        yield from (
            replace(each, prepares_ahead=False) for each in candidates(problem, cost_model, stages, size, trial)
        )


def _case(problem: Problem, name: str, decision: Decision, counts_samples: bool) -> Case:
    idle = len(problem.profile.cluster.devices) - decision.num_ranks
    # Every process has a row.  A virtual device is the rank's own thread: nobody prepares the next step beside it.
    decision = replace(decision, program=decision.program + ((),) * idle, prepares_next_step=False)
    profile = problem.profile
    if counts_samples and len(decision.stages) == 1:
        profile = counted_out(profile, len(decision.stages[0].ranks))
    seen = forecast(Pricing.of(profile), decision, problem.memory_margin, problem.memory_bytes)
    return Case(name, decision, seen, counts_samples)


def counted_out(profile: Profile, num_ranks: int) -> Profile:
    """As ``profile`` for ranks of a stage that prepare as many samples each, and those alone."""
    made = {
        kind: tuple(replace(cost, seconds=cost.seconds / num_ranks, shared_s=0.0) for cost in costs)
        for kind, costs in profile.preparations.items()
    }
    return replace(profile, preparations=made)
