"""Plans of one device, and of two ranks on one card: the first step beside one device's, then step and memory.

Two ranks of a card share it: their step is not predicted, what each of them holds is.  Messages between them go by way
of the host, since NCCL refuses two ranks of one device.  Predictions are of the profiles' precisions; in float64 plans
run to be compared alone: for a few steps of a small batch, since a GPU's convolutions in float64 are slow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch

import planner
from benchmarks import runs
from benchmarks.first_gpu.frame import Bench, Parts
from benchmarks.first_gpu.networks import NETWORKS, load_profile
from benchmarks.report import Row, at_most, error_within
from halopipe.run_spec.options import RunOptions
from halopipe.run_spec.result import RunResult
from halopipe.training.optimizer_spec import make_optimizer_of
from planner.ir.plan import Plan
from planner.ir.problem import Problem
from planner.ir.profile import Profile
from profiler.capture.graph import placed
from profiler.links.processes import LinkCosts, measure_links
from profiler.source.source import load_model

ONE = "one device"
PIPELINE = "two stages"
REPLICAS = "two replicas"
SOLVERS: Mapping[str, str] = {ONE: "one-device", PIPELINE: "even-split", REPLICAS: "data-parallel"}
RUNS = (
    *((plan, dtype) for plan in (ONE, PIPELINE) for dtype in ("float64", "float32", "bfloat16")),
    (REPLICAS, "float64"),
)
EXACT = "float64"
GOAL_PERCENT = 5.0
GOAL_RATIO = 1.05
STEPS = 12
WARM_UP = 3
EXACT_STEPS = 3
EXACT_SHARE = 8
LEAST_BATCH = 2
"""Of a comparison in float64: steps, what its batch is a share of, and the least that two replicas can share."""


def plans(bench: Bench) -> Parts:
    """A part each run of each network, so that little is lost where one fails; a rehearsal has each run once."""
    links = _Links()
    parts = {}
    for number, name in enumerate(NETWORKS):
        for plan, dtype in RUNS[number :: len(NETWORKS)] if bench.rehearses else RUNS:
            parts[f"{name}, {plan}, {dtype}"] = partial(_run_beside, bench, name, plan, dtype, links)
    return parts


def _run_beside(bench: Bench, name: str, what: str, dtype: str, links: _Links) -> Iterator[Row]:
    """Its first step must be one device's; of one device, step and memory should be what was predicted."""
    is_exact = dtype == EXACT
    batch = NETWORKS[name].batch(bench)
    profile = load_profile(bench, name, "float32" if is_exact else dtype)
    plan = plan_of(bench, profile, max(LEAST_BATCH, batch // EXACT_SHARE) if is_exact else batch, what, links)
    result = ran(plan, check_numerics=True, is_exact=is_exact)
    title = f"{name}, {what}, {dtype}"
    numerics = result.numerics
    if numerics is None or numerics.skipped:
        raise RuntimeError(f"nothing was compared: {numerics}")
    worst = max((each.error for each in numerics.worst.values()), default=0.0)
    yield Row(f"{title}: first steps are one device's ({numerics.num_tensors} tensors)", 1.0, "equal", "equal")
    yield Row(f"{title}: largest relative difference", worst, "")
    yield Row(f"{title}: hidden by rounding", numerics.hidden, "tensors")
    yield Row(f"{title}: measured step", 1e3 * statistics.median(result.timed_seconds), "ms")
    if not is_exact:
        yield from _beside_prediction(title, plan, result)


def _beside_prediction(title: str, plan: Plan, result: RunResult) -> Iterator[Row]:
    """Step and memory; a step of ranks that share a card is predicted for ranks that do not."""
    prediction = plan.prediction
    yield Row(f"{title}: predicted step", 1e3 * prediction.step_s, "ms")
    if len(prediction.ranks) == 1:
        ratio = statistics.median(result.timed_seconds) / prediction.step_s
        yield error_within(f"{title}: step, measured / predicted - 1", ratio, GOAL_PERCENT)
    peak, wanted = max(zip(result.peak_bytes, (each.peak_bytes for each in prediction.ranks), strict=True))
    yield Row(f"{title}: memory of the fuller rank", peak / 2**20, "MiB")
    yield error_within(f"{title}: memory, measured / predicted - 1", peak / wanted, GOAL_PERCENT)


def executor(bench: Bench) -> Parts:
    """Each network (a rehearsal: one) under autocast, where a GPU leaves the host the least time."""
    names = list(NETWORKS)[:1] if bench.rehearses else NETWORKS
    return {name: partial(_beside_own_loop, bench, name) for name in names}


def _beside_own_loop(bench: Bench, name: str) -> Iterator[Row]:
    profile = load_profile(bench, name, "bfloat16")
    own_s, own_bytes = own_loop(bench, profile)
    plan = plan_of(bench, profile, NETWORKS[name].batch(bench), ONE, _Links())
    result = ran(plan, check_first_step=False)
    ours_s = statistics.median(result.timed_seconds)
    yield Row(f"{name}: the user's own loop", 1e3 * own_s, "ms")
    yield Row(f"{name}: as a run", 1e3 * ours_s, "ms")
    yield Row(f"{name}: added to a step", 1e6 * (ours_s - own_s), "us")
    yield at_most(f"{name}: run / own loop", ours_s / own_s, "ratio", GOAL_RATIO)
    if bench.device == "cuda":
        yield at_most(f"{name}: memory, run / own loop", max(result.peak_bytes) / own_bytes, "ratio", GOAL_RATIO)
    yield from _beside_prediction(name, plan, result)


def own_loop(bench: Bench, profile: Profile) -> tuple[float, int]:
    """Median seconds of a step of the module in a loop that waits for each, and on a GPU the most bytes in use."""
    device = torch.device(bench.device)
    loaded = load_model(profile.model)
    model = placed(loaded, device)
    optimizer = make_optimizer_of(profile.optimizer)(model.module.parameters())
    seconds = []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # of the networks before this one
    for _ in range(WARM_UP + STEPS):
        _wait(device)
        start_s = time.perf_counter()
        optimizer.zero_grad()
        model.loss(*loaded.fed).backward()  # a batch comes from the host, as in a run
        optimizer.step()
        _wait(device)
        seconds.append(time.perf_counter() - start_s)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return statistics.median(seconds[WARM_UP:]), peak


def plan_of(bench: Bench, profile: Profile, batch: int, what: str, links: _Links) -> Plan:
    """The plan; its ranks are on one card, whatever their number, or on cores of this host."""
    if what == ONE:
        return planner.plan(Problem(profile, batch, confidence=0.0), SOLVERS[ONE])
    (device,) = profile.cluster.devices
    half_bytes = device.memory_bytes // 2
    devices = tuple(replace(device, name=f"{device.name[:-1]}{rank}", memory_bytes=half_bytes) for rank in range(2))
    costs = links.measured()
    cluster = replace(profile.cluster, devices=devices, links=costs.links, collectives=costs.collectives)
    plan = planner.plan(Problem(replace(profile, cluster=cluster), batch, confidence=0.0), SOLVERS[what])
    if bench.device == "cpu":
        return plan
    stages = tuple(replace(each, devices=(device.name,) * len(each.ranks)) for each in plan.decision.stages)
    return replace(plan, decision=replace(plan.decision, stages=stages))


def ran(
    plan: Plan, *, check_numerics: bool = False, check_first_step: bool = True, is_exact: bool = False
) -> RunResult:
    """A run of this host.

    Args:
        is_exact: in float64, for few steps.

    Raises:
        NumericsError: it computes something else than one device.
    """
    options = RunOptions(
        steps=EXACT_STEPS if is_exact else WARM_UP + STEPS,
        warmup=1 if is_exact else WARM_UP,
        dtype=EXACT if is_exact else "",
        check_numerics=check_numerics,
        check_first_step=check_first_step,
    )
    return runs.ran(plan, options)


class _Links:
    """Of this host, measured once a process: copies from and to the card are not in them."""

    def __init__(self) -> None:
        self._costs: LinkCosts | None = None

    def measured(self) -> LinkCosts:
        """Seconds of messages and sums of two ranks."""
        self._costs = self._costs or measure_links(2, quick=True)
        return self._costs


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
