"""Our plans beside those of published planners, all under one simulator; and how long planning takes.

    python -m benchmarks.planner [--quick] [--json] [--only TEXT ...] [--sizes 32,64,128] [--time-limit 20]

Every planner gets the same problem: profile, cluster, 16 GiB a device, a global batch of 1,024 samples in micro-batches
of 64 (the full run: 32, 64 or 128; a baseline keeps the best of them under the simulator, whether or not its paper has
a choice).  Beyond that each decides what its paper lets it, schedule included; the step is the simulator's for all.
What works for or against a peer:

* PipeDream's and SparsePipe's plans are made for a pipeline without flushes; here a step ends with one, for everybody.
* Reductions do not overlap the backward pass, for anybody; data parallelism would gain most from it.
* No planner may recompute.  GPipe's own remedy for its memory is that, so its even split often does not fit.
* Where a peer knows one kind of device or one rate of links alone, it plans for the slowest, and is simulated as it is.

A baseline that finds no plan is counted as that, and not as beaten.  Seconds are CPU time of this process, for the
search itself; cases run one after another.  The gap is step / bound - 1; 0 is a proof.  ``--only`` keeps the cases
and large instances whose names hold one of the texts.

Profiles are PipeDream's (their mini-batch taken as 128 samples; costs in proportion to samples).  Devices hold 16 GiB.
A flat cluster has links of one rate.  Links between hosts have that rate, those inside a faster one (``WITHIN``).
Types of device are as fast as the profile says, three quarters and half as fast.  Large networks are synthetic.
"""

from __future__ import annotations

import functools
import math
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import planner
from benchmarks.report import Row, at_most, run
from planner.extras.baselines.common import as_profile as clusters
from planner.extras.baselines.common.as_profile import as_profile
from planner.extras.baselines.pipedream import format as pipedream
from planner.extras.baselines.pipedream.format import LayerGraph, LayerNode
from planner.ir.cluster import Cluster
from planner.ir.errors import HalopipeError
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.solvers import baselines

OURS = "best-first"
TIME_LIMIT_S = 20.0
SIZES = (32, 64, 128)
QUICK_SIZES = (64,)
QUICK = frozenset({"VGG-16, 4, 1.25 GB/s", "ResNet-50, 4, 10 GB/s", "GNMT, 2 fast + 2 half, 1.25 GB/s"})
QUICK_TIME_LIMIT_S = 15.0
PROVED = 1e-9
FEW_DEVICES = 8
MANY_DEVICES = 16
MEMORY_LIMIT_BYTES = 4e9

FILES = Path(__file__).parents[1] / "tests" / "data" / "profiles" / "pipedream"
NETWORKS = {"VGG-16": "vgg16", "ResNet-50": "resnet50", "GNMT": "gnmt"}
SAMPLES = 128
GLOBAL_BATCH = 1024
SPEEDS = {"fast": 1.0, "middle": 0.75, "half": 0.5}
WITHIN = {1.25e9: 1e10, 1e10: 3e10}
"""Bytes a second inside a host, by bytes a second between hosts."""

FLAT = (4, 8, 16)
HOSTS = ((2, 4), (2, 8), (4, 4))
MIXED: tuple[Mapping[str, int], ...] = (
    {"fast": 2, "half": 2},
    {"fast": 4, "half": 4},
    {"fast": 3, "middle": 3, "half": 2},
    {"fast": 8, "half": 8},
)


@dataclass(frozen=True, slots=True)
class Case:
    """A problem with its name; planning it should take at most ``limit_s`` CPU seconds (0: no such goal)."""

    name: str
    num_devices: int
    problem: Problem
    limit_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """A case, planned by everybody.

    Attributes:
        step_s: by baseline; those that found no plan are absent.
        cpu_s: by planner, ours included.
    """

    case: Case
    plan: Plan
    step_s: Mapping[str, float] = field(default_factory=dict)
    cpu_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def proved(self) -> bool:
        """Whether no plan of the space is better."""
        return self.plan.search.gap <= PROVED

    def ratios(self) -> dict[str, float]:
        """How many times as long each baseline's step is."""
        return {name: step_s / self.plan.prediction.step_s for name, step_s in self.step_s.items()}

    def rows(self) -> Iterator[Row]:
        """The figures of this case."""
        name = self.case.name
        search = self.plan.search
        yield Row(f"{name}: step", 1e3 * self.plan.prediction.step_s, "ms")
        yield Row(f"{name}: bound", 1e3 * search.bound_s, "ms")
        yield gap_row(self.case, self.plan, self.case.num_devices <= FEW_DEVICES)
        yield Row(f"{name}: CPU", self.cpu_s[OURS], "s")
        ratios = self.ratios()
        for baseline in self.cpu_s:
            if baseline in ratios:
                yield at_least(f"{name}: {baseline} / ours", ratios[baseline], "ratio", 1.0)
            elif baseline != OURS:
                yield Row(f"{name}: {baseline}, plans found", 0, "")


def at_least(name: str, value: float, unit: str, limit: float) -> Row:
    """A row that should not fall below ``limit``, rounding apart."""
    return Row(name, value, unit, f">= {limit:g}", value >= limit * (1 - PROVED))


def gap_row(case: Case, plan: Plan, wanted: bool = True) -> Row:
    """The gap with the search's status; ``wanted``: it should be 0."""
    search = plan.search
    name = f"{case.name}: gap"
    return Row(
        name, 100 * search.gap, f"% ({search.status})", "= 0" if wanted else "", search.gap <= PROVED or not wanted
    )


def timed(name: str, case: Case) -> tuple[Plan | None, float]:
    """What planner ``name`` finds, None if nothing, and its CPU seconds."""
    start = time.process_time()
    try:
        found: Plan | None = planner.plan(case.problem, name)
    except HalopipeError:
        found = None
    return found, time.process_time() - start


def compare(case: Case) -> Result:
    """Everybody's plan of ``case``.

    Raises:
        RuntimeError: ours found none.
    """
    plan, seconds = timed(OURS, case)
    if plan is None:
        raise RuntimeError(f"{case.name}: no plan")
    cpu_s = {OURS: seconds}
    step_s = {}
    for name in baselines():
        found, cpu_s[name] = timed(name, case)
        if found is not None:
            step_s[name] = found.prediction.step_s
    return Result(case, plan, step_s, cpu_s)


def summary(results: Sequence[Result]) -> Iterator[Row]:
    """Over all cases."""
    worse = sum(min(result.ratios().values(), default=1.0) < 1 - PROVED for result in results)
    yield at_most("cases where a baseline is faster than ours", worse, f"of {len(results)}", 0)
    for title, chosen, goal in (
        (f"up to {FEW_DEVICES} devices", [r for r in results if r.case.num_devices <= FEW_DEVICES], 100.0),
        (f"{MANY_DEVICES} devices", [r for r in results if r.case.num_devices >= MANY_DEVICES], 90.0),
    ):
        if chosen:
            share = 100 * sum(result.proved for result in chosen) / len(chosen)
            yield at_least(f"cases of {title} with gap 0", share, f"% of {len(chosen)}", goal)
            yield Row(f"cases of {title}: largest gap", 100 * max(r.plan.search.gap for r in chosen), "%")
    for name in (OURS, *baselines()):
        seconds = [result.cpu_s[name] for result in results]
        yield Row(f"{name}: CPU, median", statistics.median(seconds), "s")
        yield Row(f"{name}: CPU, longest", max(seconds), "s")
    for name in baselines():
        ratios = [result.ratios()[name] for result in results if name in result.step_s]
        yield Row(f"{name}: plans found", len(ratios), f"of {len(results)}")
        if ratios:
            yield Row(f"{name} / ours, median", statistics.median(ratios), "ratio")
            yield Row(f"{name} / ours, largest", max(ratios), "ratio")


def speed(name: str) -> list[Row]:
    """One of :func:`large`, in a process of its own, so that memory is that search's alone."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_speed, name).result()


def _speed(name: str) -> list[Row]:
    case = large()[name]
    plan, seconds = timed(OURS, case)
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if plan is None:
        return [Row(f"{name}: plans found", 0, "", ">= 1", False)]
    return [
        at_most(f"{name}: CPU", seconds, "s", case.limit_s),
        gap_row(case, plan, wanted=False),
        Row(f"{name}: step", 1e3 * plan.prediction.step_s, "ms"),
        at_most(f"{name}: memory of the process", peak_bytes / 1e9, "GB", MEMORY_LIMIT_BYTES / 1e9),
    ]


def measure(
    quick: bool, only: Sequence[str] = (), sizes: tuple[int, ...] = SIZES, time_limit: float = TIME_LIMIT_S
) -> list[Row]:
    """Large instances first (a process inherits its parent's peak of memory), then all cases."""

    def wants(name: str) -> bool:
        return not only or any(text in name for text in only)

    rows: list[Row] = []
    for name in () if quick else filter(wants, large()):
        _say(name)
        rows += speed(name)
    chosen = cases(QUICK_SIZES, QUICK_TIME_LIMIT_S, QUICK) if quick else cases(sizes, time_limit)
    results = []
    for case in chosen:
        if wants(case.name):
            results.append(compare(case))
            _say(f"{case.name}: gap {results[-1].plan.search.gap:.2%}, {results[-1].cpu_s[OURS]:.1f} s")
    rows += [row for result in results for row in result.rows()]
    return [*rows, *summary(results)] if results else rows


OWN: Mapping[str, Mapping[str, Any]] = {
    "--only": {"nargs": "+", "default": [], "help": "cases whose name holds one of these"},
    "--sizes": {"type": lambda text: tuple(map(int, text.split(","))), "default": SIZES, "help": "of micro-batches"},
    "--time-limit": {"type": float, "default": TIME_LIMIT_S, "metavar": "SECONDS", "help": "of each case's search"},
}


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def cases(sizes: tuple[int, ...], time_limit_s: float, names: frozenset[str] = frozenset()) -> Iterator[Case]:
    """Networks x clusters x rates; those of ``names`` alone if there are any."""
    for network, file in NETWORKS.items():
        for rate in WITHIN:
            for shape, cluster in _clusters(rate):
                name = f"{network}, {shape}, {rate / 1e9:g} GB/s"
                if not names or name in names:
                    profile = as_profile(_graph(file), cluster, SAMPLES, SPEEDS)
                    problem = Problem(
                        profile, GLOBAL_BATCH, micro_batch_sizes=sizes, time_limit_s=time_limit_s, confidence=0.0
                    )
                    yield Case(name, len(cluster.devices), problem)


def large() -> Mapping[str, Case]:
    """Large synthetic problems; the time limits leave room to prove, for 1,024 devices to stop within the goal."""
    types = clusters.mixed({"fast": 8, "middle": 8, "half": 8}, 1e10)
    many = clusters.hosts(64, 16, 1e11, 1.25e10)
    found = (
        _synthetic("chain of 1500 layers, 16 devices", 1500, clusters.flat(16, 1e10), 64, 2.0, 30.0),
        _synthetic("chain of 300 layers, 3 types x 8 devices", 300, types, 64, 5.0, 30.0),
        _synthetic("1000 layers, 64 hosts x 16 devices", 1000, many, 1024, 60.0, 50.0),
    )
    return {case.name: case for case in found}


def _clusters(rate: float) -> Iterator[tuple[str, Cluster]]:
    for machines in FLAT:
        yield f"{machines}", clusters.flat(machines, rate)
    for hosts, each in HOSTS:
        yield f"{hosts}x{each}", clusters.hosts(hosts, each, WITHIN[rate], rate)
    for counts in MIXED:
        yield " + ".join(f"{count} {kind}" for kind, count in counts.items()), clusters.mixed(counts, rate)


@functools.cache
def _graph(file: str) -> LayerGraph:
    return pipedream.read(FILES / f"{file}.graph.txt")


def _synthetic(name: str, layers: int, cluster: Cluster, size: int, limit_s: float, time_limit_s: float) -> Case:
    """16 micro-batches of ``size`` samples."""
    profile = as_profile(network(layers), cluster, SAMPLES, SPEEDS)
    problem = Problem(profile, 16 * size, micro_batch_sizes=(size,), time_limit_s=time_limit_s, confidence=0.0)
    return Case(name, len(cluster.devices), problem, limit_s)


def network(layers: int, seed: int = 0) -> LayerGraph:
    """A chain with the trend of a CNN: activations shrink and parameters grow with depth; no two layers are alike.

    About half of the layers are cheap and without parameters (normalisation, pointwise).  A mini-batch takes 2 s
    forward and backward, saves 20 GB, and there are 2 GB of parameters, whatever the number of layers.
    """
    draw = random.Random(seed)
    heavy = [draw.random() < 0.5 for _ in range(layers)]
    work = [draw.lognormvariate(0.0, 0.5) * (1.0 if h else 0.1) for h in heavy]
    weights = [draw.lognormvariate(0.0, 0.5) * math.exp(3.0 * k / layers) if h else 0.0 for k, h in enumerate(heavy)]
    saved = [draw.lognormvariate(0.0, 0.3) * math.exp(-3.0 * k / layers) for k in range(layers)]
    nodes = tuple(
        LayerNode(
            name=f"node{k + 1}",
            description="Conv2d" if heavy[k] else "ReLU",
            forward_s=2.0 / 3.0 * work[k] / sum(work),
            backward_s=4.0 / 3.0 * work[k] / sum(work),
            activation_bytes=2e10 * saved[k] / sum(saved),
            parameter_bytes=2e9 * weights[k] / sum(weights),
        )
        for k in range(layers)
    )
    return LayerGraph(f"chain of {layers}", nodes, tuple((k, k + 1) for k in range(layers - 1)))


main = partial(run, "Planners beside one another under one simulator, and how long planning takes", measure, own=OWN)

if __name__ == "__main__":
    raise SystemExit(main())
