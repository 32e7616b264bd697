"""What published planners choose, for a search of ours to start from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from planner.extras.baselines import bapipe, dapple, sparsepipe
from planner.extras.baselines.common.answer import Trial
from planner.extras.baselines.pipedream import solver as pipedream
from planner.extras.baselines.piper import solver as piper
from planner.extras.baselines.tarnawski import solver as tarnawski
from planner.ir.errors import HalopipeError
from planner.solvers.budget import Budget
from planner.solvers.candidates.choose import choose
from planner.solvers.candidates.evaluate import Evaluation, Evaluator
from planner.solvers.candidates.feasibility import mixing_layers

_PUBLISHED = (
    dapple.pipelines,
    pipedream.pipelines,
    pipedream.hierarchical_pipelines,
    piper.pipelines,
    tarnawski.pipelines,
    sparsepipe.pipelines,
    bapipe.pipelines,
)
_REPLICATING = (dapple.pipelines, sparsepipe.pipelines)
"""Of these, those that know nothing of layers that mix samples."""

_SHARE_OF_TIME = 0.15  # of what is left, for DAPPLE's best

PROVED_DEVICES = 8
"""Up to so many devices the search proves its plan before it would ask other planners."""


def promising(evaluator: Evaluator) -> Iterator[Evaluation]:
    """The few plans of DAPPLE's released planner that it thinks most of, on devices that are too many for a proof."""
    problem = evaluator.problem
    if len(problem.ranks) > PROVED_DEVICES and not mixing_layers(problem.profile.graph):
        within = evaluator.budget.part(_SHARE_OF_TIME * evaluator.budget.left_s)
        offered = dapple.promising(problem, evaluator.cost_model, Trial.as_hint(problem))
        with suppress(HalopipeError):  # a profile that it cannot read
            yield from filter(None, [choose(evaluator, offered, within=within).best])


def published(evaluator: Evaluator, within: Budget) -> Iterator[Evaluation]:
    """What published planners choose, each with an equal part of the budget that is left."""
    mixes, waiting = bool(mixing_layers(evaluator.problem.profile.graph)), list(_PUBLISHED)
    while waiting and len(evaluator.problem.ranks) > 1:
        pipelines = waiting.pop(0)
        if mixes and pipelines in _REPLICATING:
            continue
        own = within.part(within.left_s / (len(waiting) + 1))
        problem = replace(evaluator.problem, time_limit_s=own.limit_s)
        with suppress(HalopipeError):  # its own restrictions rule the problem out
            offered = pipelines(problem, evaluator.cost_model, Trial.as_hint(problem))
            yield from filter(None, [choose(evaluator, offered, within=own).best])
