"""DAPPLE's own instances and plans: its planner found again, and ours beside its plans.

    python -m benchmarks.planner --data FOLDER

FOLDER holds profiles of AlibabaPAI/DAPPLE's ``profiling_results`` (they state no licence, so they are not here) as
``NAME-pbs-SAMPLES*.txt``, and ``plans.csv``: what its released planner answers for them, columns as in
``tests/data/reference/planner.csv``.  Of a row are read: the instance; the cluster (``2 servers of 8``, or
``16 single-GPU servers``); ``GBS=`` and the speed-up over one GPU that it estimates; of the provenance ``rp`` and
``STAGES``: (first state, state behind the last, ., GPUs) of each stage.

Links are those of its source: 25 GB/s inside a server, between servers 1 GB/s for messages and 3 GB/s for sums.  Its
plans are simulated with the micro-batches that it counts on, under the best of the schedules that ours may have.
Memory counts for neither.
"""

from __future__ import annotations

import ast
import csv
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path

from benchmarks.report import Row, at_least, at_most
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.extras.baselines.common.as_profile import as_profile, hosts
from planner.extras.baselines.hpgo import HpgoMachines, HpgoPipeline, search
from planner.extras.baselines.pipedream.format import LayerGraph, read, states_of
from planner.ir.cluster import ACROSS_HOSTS, ALL_REDUCE, Cluster, Collective
from planner.ir.errors import HalopipeError
from planner.ir.layout import equal_shares
from planner.ir.problem import Problem
from planner.solvers import solver
from planner.solvers.candidates.candidate import micro_batches
from planner.solvers.candidates.evaluate import Evaluator
from planner.solvers.candidates.feasibility import schedule_names

SOLVER = "DAPPLE planner"
WITHIN, MESSAGES, SUMS = 25e9, 1e9, 3e9
"""Bytes a second."""

MEMORY_BYTES = 2**44
TIME_LIMIT_S = 8.0
AS_GOOD = 0.975
"""Of a published speed-up."""


@dataclass(frozen=True)
class Case:
    """A row of ``plans.csv``.

    Attributes:
        samples: a micro-batch of one pipeline, what the profile is of.
        copies: pipelines side by side.
        stages: (first state, GPUs) of each.
    """

    name: str
    graph: LayerGraph
    servers: int
    gpus: int
    global_batch: int
    samples: int
    speed_up: float
    copies: int
    stages: tuple[tuple[int, tuple[int, ...]], ...]

    @cached_property
    def problem(self) -> Problem:
        """Ours."""
        profile = as_profile(self.graph, self._cluster(), self.samples)
        return Problem(profile, self.global_batch, memory_margin=0.0, time_limit_s=TIME_LIMIT_S)

    def _cluster(self) -> Cluster:
        plain = hosts(self.servers, self.gpus // self.servers, WITHIN, MESSAGES, MEMORY_BYTES)
        sizes = (2**10, 2**36)
        tables = tuple(
            Collective(
                ALL_REDUCE,
                count,
                ACROSS_HOSTS,
                tuple((size, 2 * (count - 1) / count * size / SUMS) for size in sizes),
                min(count, self.servers),
            )
            for count in range(2, self.gpus + 1)
        )
        return replace(plain, collectives=tables)

    def found_again(self) -> tuple[float, HpgoPipeline]:
        """The speed-up that our search for DAPPLE's plan estimates, and the plan."""
        machines = HpgoMachines(self.servers, self.gpus // self.servers, WITHIN, MESSAGES, SUMS)
        return search(self.graph, machines, self.global_batch, self.samples)

    def step_s(self) -> float:
        """The published plan under our simulator; infinite if some GPU would have no sample."""
        size = self.copies * self.samples
        problem = replace(self.problem, micro_batch_sizes=(size,))
        evaluator = Evaluator(problem, CostModel(problem.profile))
        number = {layer.name: index for index, layer in enumerate(problem.profile.graph.layers)}
        states = states_of(self.graph)
        stage_of = [len(self.stages) - 1] * len(number)
        starts = [first for first, _ in self.stages]
        for stage, (first, behind) in enumerate(zip(starts, (*starts[1:], states.num_states), strict=True)):
            for layer in states.layers(first - 1 if first else None, behind - 1):
                stage_of[number[layer]] = stage
        groups = tuple(ranks for _, ranks in self.stages)
        if size < max(map(len, groups)):
            return inf
        shares = tuple(equal_shares(size, len(ranks)) for ranks in groups)
        batches = micro_batches(problem, size)
        plans = (Candidate(tuple(stage_of), groups, shares, batches, name) for name in schedule_names(problem))
        return min(evaluator.evaluate(plan).step_s for plan in plans)


def cases(folder: Path) -> Iterator[Case]:
    """The rows of ``plans.csv`` that are DAPPLE's planner's."""
    with (folder / "plans.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["solver"].startswith(SOLVER):
                yield _case(folder, row)


def _case(folder: Path, row: dict[str, str]) -> Case:
    name, provenance = row["instance"].rpartition("/")[2], row["provenance"]
    servers, gpus = _servers(row["devices"])
    stages = ast.literal_eval(_found(r"STAGES (\[.*\])", provenance))
    return Case(
        f"DAPPLE's {name}, {servers} x {gpus // servers}",
        read(folder / f"{name}.txt"),
        servers,
        gpus,
        int(_found(r"GBS=(\d+)", row["objective"])),
        int(_found(r"-pbs-(\d+)", name)),
        float(row["value"]),
        int(_found(r"rp (\d+)", provenance)),
        tuple((first, tuple(ranks)) for first, _, _, ranks in stages),
    )


def _servers(text: str) -> tuple[int, int]:
    several = re.search(r"(\d+) servers of (\d+)", text)
    if several:
        return int(several[1]), int(several[1]) * int(several[2])
    alone = int(_found(r"(\d+) single-GPU servers", text))
    return alone, alone


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern!r} in {text!r}")
    return match[1]


def rows(case: Case) -> Iterator[Row]:
    """The figures of a case."""
    start_s = time.process_time()
    speed_up, _ = case.found_again()
    seconds, wanted = time.process_time() - start_s, AS_GOOD * case.speed_up
    published = f"(published: {case.speed_up:.4f})"
    yield at_least(f"{case.name}: speed-up by DAPPLE's own estimate {published}", speed_up, "x", wanted)
    yield Row(f"{case.name}: its search, CPU", seconds, "s")
    step_s, dapple_s, ours_s = case.step_s(), _step_s("dapple", case.problem), _step_s("best-first", case.problem)
    if step_s == inf:
        yield Row(f"{case.name}: its plan gives some GPU no sample, plans run", 0, "")
        yield at_most(f"{case.name}: ours / dapple", ours_s / dapple_s, "ratio", 1.0)
        return
    yield Row(f"{case.name}: its plan", 1e3 * step_s, "ms")
    yield at_most(f"{case.name}: dapple / its plan", dapple_s / step_s, "ratio", 1.0)
    yield at_most(f"{case.name}: ours / its plan", ours_s / step_s, "ratio", 1.0)


def _step_s(name: str, problem: Problem) -> float:
    try:
        return solver(name)(problem, None).prediction.step_s
    except HalopipeError:
        return inf
