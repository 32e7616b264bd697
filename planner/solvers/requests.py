"""What no request may ask for: numbers that nothing can mean, and things that rule one another out.

Each is a row of a table: whether it applies, what is wrong, why, and what to ask for instead.  Extras add rows of what
they rule out (``"refusals"``).  What depends on which schedules a problem leaves is in
:mod:`planner.solvers.candidates.feasibility`, on how a plan divides its layers in :mod:`planner.layers.stage_rules`,
and what no proof covers in :mod:`planner.proof.scope`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from planner.ir.errors import UsageError
from planner.ir.extras import extras
from planner.ir.planner_extra import PlannerExtra
from planner.ir.problem import MEMORY, MOST_BATCH, NEVER, SELECTIVE, SPATIAL_DIMS, THROUGHPUT, ZERO, Problem
from planner.layers.recomputed import attention_cores
from planner.layers.stage_rules import why_gradients_stay_whole
from planner.schedules import traits

Refusal = tuple[object, UsageError]
"""Whether it applies, and what is then said."""


def require_none(refusals: Iterable[Refusal]) -> None:
    """Raises the first that applies."""
    for applies, error in refusals:
        if applies:
            raise error


def of_search(problem: Problem, solver: str) -> tuple[Refusal, ...]:
    """Of what a search may take and is to find."""
    gap = problem.gap
    limit_s = problem.time_limit_s
    rate = problem.rate_per_s
    counts = {
        "stages": problem.max_stages,
        "devices": problem.num_ranks,
        "bytes of memory": problem.memory_bytes,
        "rows of halo": problem.halo_depth,
    }
    return (
        (
            not (math.isfinite(gap) and 0 <= gap < 1),
            UsageError(
                f"a gap of {gap:g}",
                ["a gap is a fraction of the step: 0 or more, below 1"],
                ["2 percent is --gap 0.02"],
            ),
        ),
        (
            not 0 <= problem.confidence < 1,
            UsageError(
                f"a confidence of {problem.confidence:g}",
                ["it is a probability: 0 or more, below 1; 0 stands for the plan that is fastest at the mean"],
                ["--confidence 0.8"],
            ),
        ),
        (
            math.isnan(limit_s) or limit_s < 0,
            UsageError(f"a time limit of {limit_s:g} s", remedies=["give a number of seconds, 0 or more"]),
        ),
        (
            not (math.isfinite(rate) and rate >= 0),
            UsageError(f"a rate of {rate:g} samples/s", ["0 stands for any"], ["--rate 100"]),
        ),
        (
            rate and problem.objective == MEMORY,
            UsageError("a rate goes with latency or throughput", ["asked for: memory"], ["--objective latency"]),
        ),
        *(
            (count < 0, UsageError(f"{count} {what}", ["0 stands for no limit"], ["give 0 or more"]))
            for what, count in counts.items()
        ),
        (
            rate and solver != "best-first",
            UsageError(f"{solver} knows no rate of a stream", [f"--rate {rate:g}"], ["use --solver best-first"]),
        ),
        (
            solver == "span-ilp" and problem.objective != THROUGHPUT,
            UsageError(
                f"span-ilp cannot minimise {problem.objective}",
                ["it knows the step alone"],
                ["use --solver best-first"],
            ),
        ),
    )


def of_numbers(problem: Problem) -> tuple[Refusal, ...]:
    """Of a batch, and of what it and the state of a stage are divided into."""
    batch = problem.global_batch
    zero = problem.zero
    too_large = next((size for size in problem.micro_batch_sizes if size > batch), 0)
    return (
        (
            not 1 <= batch <= MOST_BATCH,
            UsageError(f"--global-batch is {batch}", [f"a step has 1 to {MOST_BATCH} samples"], ["--global-batch 32"]),
        ),
        (
            zero not in ZERO or (zero > 1 and problem.shard == NEVER),
            UsageError(
                f"--zero is {zero}, --shard {problem.shard}",
                [
                    "what ranks divide: 1 the optimiser's state, 2 gradients too, 3 parameters too",
                    "--shard never: nothing",
                ],
                [f"--shard {way} --zero {zero if zero in ZERO else 2}" for way in ("always", "auto")],
            ),
        ),
        (
            too_large,
            UsageError(
                f"micro-batch {too_large} is larger than the global batch {batch}",
                remedies=[
                    f"--micro-batch {batch}",
                    *([f"--global-batch {too_large}"] if too_large <= MOST_BATCH else []),
                ],
            ),
        ),
    )


def of_pairs(problem: Problem) -> tuple[Refusal, ...]:
    """Of one thing that is asked for beside another, or that the network rules out."""
    graph = problem.graph
    selective = problem.recompute == SELECTIVE
    is_stream = problem.rate_per_s and problem.objective == THROUGHPUT
    kept_whole = why_gradients_stay_whole(graph) if problem.zero > 1 else ""
    return (
        *(row for extra in extras(PlannerExtra) for row in extra.refusals(problem)),
        (
            problem.halo_depth and SPATIAL_DIMS not in problem.allow,
            UsageError(
                "--halo-depth is of no use without --allow sample,spatial",
                remedies=["add --allow sample,spatial", "leave out --halo-depth"],
            ),
        ),
        (
            is_stream and any(traits(name).trains for name in problem.schedules),
            UsageError(
                "a rate is that of a stream of forward passes, and a schedule that trains may be used",
                [f"--schedule {', '.join(problem.schedules)}"],
                ["--schedule forward", "leave --schedule out"],
            ),
        ),
        (
            kept_whole,
            UsageError(
                f"--zero {problem.zero} divides gradients, which this network keeps whole", [kept_whole], ["--zero 1"]
            ),
        ),
        (
            selective and not attention_cores(graph),
            UsageError(
                "--recompute selective: no attention is found in this network",
                [f"none of {len(graph.layers)} layers is one, or a softmax between two products of activations"],
                ["--recompute auto", "--recompute always"],
            ),
        ),
    )
