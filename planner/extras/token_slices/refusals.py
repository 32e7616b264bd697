"""What token slices cannot be combined with: in a request, in a plan, in a candidate of a search."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.extras.token_slices.axes import require_one_rank, require_sliceable
from planner.ir.errors import UnsupportedModelError, UsageError
from planner.ir.graph import Graph
from planner.ir.plan import Decision
from planner.ir.problem import SELECTIVE, THROUGHPUT, TIME_DIMS, Problem

if TYPE_CHECKING:  # a rank asks for the faults of a plan, and loads no solver
    from planner.costs.candidate import Candidate
    from planner.solvers.candidates.constraints import Constraints
    from planner.solvers.requests import Refusal


def of_request(problem: Problem) -> tuple[Refusal, ...]:
    """Rows of :mod:`planner.solvers.requests`."""
    slices = problem.token_slices
    return (
        (
            any(length < 1 for length in slices),
            UsageError(f"--token-slices {'+'.join(map(str, slices))}", ["a slice has tokens: 1 or more"]),
        ),
        (
            slices and problem.objective != THROUGHPUT,
            UsageError(f"--token-slices with --objective {problem.objective}", ["slices are for training steps"]),
        ),
        (
            problem.recompute == SELECTIVE and TIME_DIMS in problem.allow,
            UsageError(
                "--recompute selective beside token slices",
                ["what later slices read of attention has to stay"],
                ["--recompute always", "leave out --allow time and --token-slices"],
            ),
        ),
    )


def faults(decision: Decision, graph: Graph | None = None) -> Iterator[str]:
    """Of a plan: ranks of its stages, spans of layers that are computed again, layers and sequences of the graph."""
    if not decision.token_slices:
        return
    for number, stage in enumerate(decision.stages):
        if stage.recomputed:
            what = f"{len(stage.recomputed)} spans and token slices; it can have one of the two"
            yield f"decision.stages[{number}].recomputed: stage {number} has {what}"
    try:
        require_one_rank(decision.token_slices, [stage.ranks for stage in decision.stages])
        if graph is not None:
            require_sliceable(graph, decision.token_slices)
    except UnsupportedModelError as error:
        yield f"decision.token_slices: {'; '.join((error.title, *error.details))}"


def unmet(constraints: Constraints, candidate: Candidate) -> str:
    """Of a candidate: a parameter that layers in several stages share."""
    if candidate.axis_parts:
        for name, layers in constraints.tied.items():
            stages = sorted({candidate.stage_of[layer] for layer in layers})
            if len(stages) > 1:
                text = f"stages {', '.join(map(str, stages))} share {name}, and sequences are cut into token slices"
                return f"{text}: what a second copy takes then is not known"
    return ""
