"""Plans for many layers on many devices: in time, in memory, near the bound, and never worse with more devices.

    python -m benchmarks.scale [--quick] [--json] [--only TEXT ...]

Networks of 50, 200 and 1,000 layers with skips, as uneven as networks are and all as much work, on hosts of eight
devices of 16 GiB (100 GB/s inside, 12 GB/s between hosts), all of one kind, or half of them of 0.55 of its speed; a
global batch of 1,024 samples.  And ResNet-50 (images of 224 x 224, 64 samples) on hosts of eight A100 as tables know
them, samples alone, and with every layer's own layout.  Each case is a process of its own, whose largest memory is
told; cases run one after another.  Seconds are those of the clock, as a time limit is: run it on a quiet machine.

The gap is step / bound - 1; where groups of devices are searched in coarse steps, with the bound that leaves none out
(``Search.bounds_s``).  *Worse with more devices* is by how much a step is longer than the best on fewer devices, at the
same limit.  ``--only`` keeps the cases whose names hold one of the texts.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context

from benchmarks.chains import chain_profile
from benchmarks.report import Row, at_most, run
from planner.ir.cluster import ACROSS_HOSTS, WITHIN_HOST, Cluster, DeviceSpec, Link
from planner.ir.problem import SAMPLE_DIMS, SPATIAL_DIMS, Problem
from planner.ir.profile import ModelSource, Optimizer, Profile
from planner.solvers import solver

LAYERS = (50, 200, 1000)
DEVICES = (8, 16, 64, 256, 1024)
LIMITS_S = (1.0, 5.0, 20.0, 60.0)
QUICK_LAYERS = (50,)
QUICK_DEVICES = (16, 64)
QUICK_LIMITS_S = (5.0,)
RESNET_DEVICES = (8, 16, 64)
RESNET_SAMPLES = 64
RESNET_LIMIT_S = 60.0
GLOBAL_BATCH = 1024
A_HOST = 8
SLOW = 0.55
GIB = 2**30
MEMORY_LIMIT_BYTES = 2 * GIB
OVERTIME = 1.1
GAPS = {8: 0.0, 16: 5.0, 64: 15.0, 256: 30.0, 1024: 30.0}
"""Percent, by number of devices."""

LAYOUTS_GAP = 10.0
BY_HAND_S = 0.4770
BY_HAND_LIMIT_S = 5.0
"""50 layers on 64 devices of one kind: four stages balanced by forward times, 16 replicas each, micro-batches of 16,
1f1b-so: what a person writes down."""


@dataclass(frozen=True, slots=True)
class Case:
    """A network on devices, planned within ``limit_s``; ``layers`` 0: ResNet-50.

    Attributes:
        kinds: 1 or 2 of the synthetic networks' devices.
        allow: what may be cut.
    """

    layers: int
    devices: int
    kinds: int
    limit_s: float
    allow: tuple[str, ...] = (SAMPLE_DIMS,)

    @property
    def series(self) -> str:
        """The case but for its number of devices."""
        what = f"{self.layers} layers" if self.layers else "ResNet-50"
        kinds = ", two kinds" if self.kinds == 2 else ""
        layouts = ", layouts" if self.allow != (SAMPLE_DIMS,) else ""
        return f"{what}{kinds}{layouts}, {self.limit_s:g} s"

    def __str__(self) -> str:
        what, _, limit = self.series.rpartition(", ")
        return f"{what}, {self.devices} devices, {limit}"

    @property
    def most_gap(self) -> float:
        """The goal, percent."""
        return GAPS[self.devices] if self.allow == (SAMPLE_DIMS,) else LAYOUTS_GAP

    def problem(self) -> Problem:
        """What is planned."""
        profile = scale_profile(self.layers, self.devices, self.kinds) if self.layers else resnet(self.devices)
        batch = GLOBAL_BATCH if self.layers else RESNET_SAMPLES
        return Problem(profile, batch, time_limit_s=self.limit_s, allow=self.allow, confidence=0.0)


@dataclass(frozen=True, slots=True)
class Result:
    """How a case was planned."""

    case: Case
    step_s: float
    bound_s: float
    status: str
    seconds: float
    peak_bytes: int

    def rows(self) -> Iterator[Row]:
        """The figures of this case alone."""
        case = self.case
        yield Row(f"{case}: step", 1e3 * self.step_s, "ms")
        gap = 100 * (self.step_s / self.bound_s - 1) if self.bound_s > 0 else float("inf")
        yield at_most(f"{case}: gap", max(0.0, round(gap, 6)), f"% ({self.status})", case.most_gap)
        yield at_most(f"{case}: time", self.seconds, "s", OVERTIME * case.limit_s)
        yield at_most(f"{case}: memory of the process", self.peak_bytes / GIB, "GiB", MEMORY_LIMIT_BYTES / GIB)
        if (case.layers, case.devices, case.kinds, case.limit_s) == (50, 64, 1, BY_HAND_LIMIT_S):
            yield at_most(f"{case}: beside a plan by hand", self.step_s, "s", BY_HAND_S)


def scale_profile(layers: int, devices: int, kinds: int = 1, seed: int = 1) -> Profile:
    """A network of as much work, however many layers it has, on hosts of eight devices of one or two kinds."""
    draw = random.Random(seed)
    part = 50 / layers
    forward_s = [draw.uniform(2e-5, 2e-4) * draw.choice([1, 1, 1, 2]) * part for _ in range(layers)]
    profile = chain_profile(
        layers,
        2,
        forward_s=forward_s,
        parameter_bytes=[4 * int(draw.uniform(1e6, 1e7) * part) for _ in range(layers)],
        activation_bytes=[4 * int(draw.uniform(2e5, 1e6)) for _ in range(layers)],
        saved_bytes=[4 * int(draw.uniform(1e6, 8e6) * part) for _ in range(layers)],
        workspace_bytes=2**20,
        update_s=1e-4 * part,
        speeds=(1.0, SLOW),
        sizes=(1, 2, 4, 8, 16, 32),
        optimizer=Optimizer("SGD", {"lr": 0.01, "momentum": 0.9}, 1.0),
        skips=[(layer, layer + 3) for layer in range(2, layers - 4, 7)],
    )
    fast, slow = (device.kind for device in profile.cluster.devices)
    num_fast = devices if kinds == 1 else devices // 2
    specs = tuple(
        DeviceSpec(
            f"n{number // A_HOST}/gpu{number % A_HOST}",
            fast if number < num_fast else slow,
            f"n{number // A_HOST}",
            16 * GIB,
            core_share=0.0,
        )
        for number in range(devices)
    )
    links = {WITHIN_HOST: Link(1e-5, 100e9), ACROSS_HOSTS: Link(2e-5, 12e9)}
    used = dict(list(links.items())[: 1 if devices <= A_HOST else 2])
    of_kinds = {spec.kind for spec in specs}
    return replace(
        profile,
        cluster=Cluster(specs, used),
        measurements={kind: found for kind, found in profile.measurements.items() if kind in of_kinds},
        parameters={kind: found for kind, found in profile.parameters.items() if kind in of_kinds},
        action_overhead_s={kind: found for kind, found in profile.action_overhead_s.items() if kind in of_kinds},
    )


def resnet(devices: int) -> Profile:
    """ResNet-50 on A100s that are not here."""
    from planner.extras.kernels.clusters import cluster_of
    from profiler.extras.modelled.session import profile_on

    source = ModelSource("profiler.models.resnet:resnet50", {}, (RESNET_SAMPLES, 3, 224, 224))
    return profile_on(source, cluster_of("a100-dgx", devices), Optimizer("SGD", {"lr": 0.1, "momentum": 0.9}, 1.0))


def planned(case: Case) -> Result:
    """The case, planned in this process.

    Raises:
        HalopipeError: there is no plan.
    """
    problem = case.problem()
    start = time.monotonic()
    plan = solver("best-first")(problem, None)
    seconds = time.monotonic() - start
    search = plan.search
    is_coarse = any(each.what.startswith("groups of other sizes") for each in search.rejected)
    of_every_group = [bound_s for what, bound_s in search.bounds_s.items() if what.startswith("every group")]
    bound_s = min([search.bound_s, *of_every_group]) if is_coarse else search.bound_s
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Result(case, plan.prediction.step_s, bound_s, search.status, seconds, peak_bytes)


def worse(results: Sequence[Result]) -> Iterator[Row]:
    """By how much more devices are worse, by series."""
    by_series: dict[str, list[Result]] = {}
    for result in results:
        by_series.setdefault(result.case.series, []).append(result)
    for series, found in by_series.items():
        found.sort(key=lambda result: result.case.devices)
        least_s = float("inf")
        most = 0.0
        for result in found:
            most = max(most, 100 * (result.step_s / least_s - 1))
            least_s = min(least_s, result.step_s)
        if len(found) > 1:
            yield at_most(f"{series}: worse with more devices, by", round(most, 6), "%", 0.0)


def cases(quick: bool) -> Iterator[Case]:
    """Short limits first, few devices first."""
    layers, devices, limits = (QUICK_LAYERS, QUICK_DEVICES, QUICK_LIMITS_S) if quick else (LAYERS, DEVICES, LIMITS_S)
    for limit_s in limits:
        for number in layers:
            for kinds in (1, 2):
                yield from (Case(number, count, kinds, limit_s) for count in devices)
    if not quick:
        for allow in ((SAMPLE_DIMS,), (SAMPLE_DIMS, SPATIAL_DIMS)):
            yield from (Case(0, count, 1, RESNET_LIMIT_S, allow) for count in RESNET_DEVICES)


def measure(quick: bool, only: Sequence[str] = ()) -> list[Row]:
    """All cases, each in a process of its own."""
    results: list[Result] = []
    for case in cases(quick):
        if only and not any(text in str(case) for text in only):
            continue
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            results.append(pool.submit(planned, case).result())
        sys.stderr.write(f"{case}: {1e3 * results[-1].step_s:.4g} ms, {results[-1].seconds:.1f} s\n")
    return [*(row for result in results for row in result.rows()), *worse(results)]


main = partial(
    run,
    "Plans for many layers on many devices, and what they take",
    measure,
    own={"--only": {"nargs": "+", "default": [], "help": "cases of these names"}},
)

if __name__ == "__main__":
    raise SystemExit(main())
