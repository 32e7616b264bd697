"""Predicted beside counted memory, plan by plan, and what happens under a hard limit.

Every network is watched once, layer by layer, as the profiler does it; plans of many schedules are predicted from that,
then run as ``halopipe run`` does it: by workers of the launcher that load, capture and train what a user's would
(:mod:`benchmarks.devices.metered`), and whose every allocation is counted (:mod:`cuda_ops.memory`).  Each rank takes
its steps under a limit of what was predicted for it and 1 % more: nobody may run out.  The most in any step is compared
with the prediction; of a plan that ran out, in a job without limits.  Then the ranks go on with a tenth less than
predicted, and the fullest one should run out.  Nothing is timed: figures do not depend on the machine's load.

Messages go over gloo, as between hosts, where buffers and frames count; some plans run through shared memory as well,
which is what ranks of one host use unless they are told otherwise.

Beside the plans of the accuracy benchmark there are those that only memory tells apart: optimisers that are divided,
stages that recompute, stages of several ranks beside stages of one, layers cut over space or channels in a pipeline,
tensor and sequence parallelism, token slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from benchmarks.accuracy.cases import DATA_PARALLEL, MIX, NETWORKS, ONE, SPACE, Case, Network, case, case_of, pipeline
from benchmarks.devices.metered import steps_within
from benchmarks.report import Row, at_least, at_most, run
from halopipe.extras.transformers.ways import plan_by
from halopipe.run_spec.options import GLOO, SHARED
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.ir.cluster import SHARED_MEMORY, WITHIN_HOST, Cluster, DeviceSpec, Link
from planner.ir.graph import Graph
from planner.ir.plan import Decision
from planner.ir.problem import CHANNEL_DIMS, SPATIAL_DIMS, Problem
from planner.ir.profile import Measurement, Optimizer, ParameterCost, Profile, Provenance, SiteHalo
from planner.solvers.candidates.candidate import decision_of, with_options
from planner.solvers.candidates.evaluate import Evaluator
from profiler import load_model
from profiler.capture.graph import capture
from profiler.measure.memory import footprints
from profiler.measure.preparing import site_halos
from profiler.source.model import LoadedModel, example_of, fed_example

GOAL_PERCENT = 3.0
UNDER_PERCENT = 1.0
ROOM = 1.01
"""The limit over the prediction under which nobody may run out."""
OVER = 1.1
"""The prediction over the limit under which somebody should."""

_STEPS = 2
"""Counted: the first makes the optimiser's state, the second has it throughout."""

DIVIDED = "the optimiser divided"
RECOMPUTED = "1f1b/4, recomputed"
TO_ONE = "1f1b/4, two ranks then one"
TO_TWO = "zb-h1/4, one rank then two"
BY_TWO = "1f1b/4, two by two, the optimiser divided"
HEIGHTS = "gpipe/4 over height"
SPLIT_HEIGHTS = "zb-h1/2 over height, two by two"
CHANNELS = "gpipe/4 over channels"
TENSOR = "tensor=2,micro_batch=4"
SEQUENCE = "tensor=2,sequence_parallel=1,micro_batch=4"
STAGES = "tensor=2,pipeline=2,sequence_parallel=1,micro_batch=4"
SLICES = "gpipe/8 in slices of 32 tokens"

PLANS: Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]] = {
    "ResNet-50": (
        (2, (ONE, DATA_PARALLEL, "1f1b/2", "gpipe/2", "zb-h1/2", HEIGHTS, CHANNELS)),
        (3, ("1f1b/2", "gpipe/1", "1f1b-so/1")),
    ),
    "GPT": (
        (
            2,
            (
                *(ONE, DATA_PARALLEL, "1f1b/4", "gpipe/4", "zb-h1/4", "1f1b-2bp/4", "interleaved/4", "zb-v/4"),
                *(DIVIDED, RECOMPUTED, TENSOR, SEQUENCE, SLICES),
            ),
        ),
        (3, ("1f1b/2", "gpipe/4", "zb-h2/4", "1f1b-windowed/2", TO_ONE, TO_TWO)),
        (4, ("1f1b-2bp-fill/2", BY_TWO, STAGES)),
    ),
    "3-D U-Net": (
        (2, (ONE, DATA_PARALLEL, SPACE, MIX, "1f1b/1", "gpipe/2", "zb-h1/1")),
        (3, ("1f1b/1",)),
        (4, (SPACE, SPLIT_HEIGHTS)),
    ),
    "GNMT": (
        (2, (ONE, DATA_PARALLEL, "1f1b/4", "gpipe/4", "zb-h1/4", "naive/4", "1f1b-sno/4", "pipedream/4")),
        (3, ("1f1b/2", "gpipe/4")),
    ),
    "VGG-16": ((2, (ONE, DATA_PARALLEL, "1f1b/2", "gpipe/2", "1f1b-2bp/2")),),
    "sparse VGG": ((2, (ONE, DATA_PARALLEL, "1f1b/2", "gpipe/2", "zb-h1/2", DIVIDED)), (3, (TO_ONE, TO_TWO))),
}
"""By network: numbers of ranks, and plans on them: of :mod:`benchmarks.accuracy.cases`, and of ``BY_HAND``."""

IN_SHARED_MEMORY: Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]] = {
    "ResNet-50": ((2, ("1f1b/2", DATA_PARALLEL)),),
    "GPT": ((2, ("gpipe/4", "zb-h1/4")),),
    "3-D U-Net": ((2, ("1f1b/1", SPACE)),),
    "sparse VGG": ((2, ("1f1b/2",)), (3, (TO_ONE,))),
}
"""Those that run through shared memory as well."""

QUICK: Mapping[str, tuple[tuple[int, tuple[str, ...]], ...]] = {"GPT": ((2, ("1f1b/4", "gpipe/4")),)}


def _staged(schedule: str, *groups: tuple[int, ...], divided: bool = False) -> Callable[[Problem], Decision]:
    """Stages of these ranks, in micro-batches of 4 samples."""

    def made(problem: Problem) -> Decision:
        found = decision_of(problem, pipeline(problem, schedule, 4, groups))
        return replace(found, stages=tuple(replace(stage, sharded=divided) for stage in found.stages))

    return made


def _cut(schedule: str, size: int, dims: tuple[str, ...], *groups: tuple[int, ...]) -> Callable[[Problem], Decision]:
    """Stages whose ranks share every layer along one of ``dims``, or compute it alike where it has none of them."""

    def made(problem: Problem) -> Decision:
        evaluator = Evaluator(problem, CostModel(problem.profile))
        candidate = pipeline(problem, schedule, size, groups)
        for stage, group in enumerate(groups):
            prices = evaluator.layouts.prices(group, size)
            options = {}
            for layer in (k for k, of_layer in enumerate(candidate.stage_of) if of_layer == stage):
                able = [each for each in prices.options(layer) if {dim for dim, _ in each.grid} & {*dims}]
                options[layer] = (able or [each for each in prices.options(layer) if "replica" in str(each)])[0]
            candidate = with_options(evaluator.layouts, candidate, options)
        return decision_of(problem, candidate)

    return made


def _by(change: Callable[[Candidate], Candidate], schedule: str, size: int) -> Callable[[Problem], Decision]:
    return lambda problem: decision_of(problem, change(pipeline(problem, schedule, size)))


def _way(text: str) -> Callable[[Problem], Decision]:
    return lambda problem: plan_by(problem.profile, text, problem.global_batch).decision


BY_HAND: Mapping[str, Callable[[Problem], Decision]] = {
    DIVIDED: _staged("1f1b", (0, 1), divided=True),
    RECOMPUTED: _by(lambda one: replace(one, recompute=(True,) * one.num_stages), "1f1b", 4),
    TO_ONE: _staged("1f1b", (0, 1), (2,)),
    TO_TWO: _staged("zb-h1", (0,), (1, 2)),
    BY_TWO: _staged("1f1b", (0, 1), (2, 3), divided=True),
    HEIGHTS: _cut("gpipe", 4, ("height",), (0, 1)),
    SPLIT_HEIGHTS: _cut("zb-h1", 2, ("height",), (0, 1), (2, 3)),
    CHANNELS: _cut("gpipe", 4, ("channel", "feature"), (0, 1)),
    **{text: _way(text) for text in (TENSOR, SEQUENCE, STAGES)},
    SLICES: _by(lambda one: replace(one, axis_parts=(32, 32)), "gpipe", 8),
}
"""Plans that no solver is asked for."""


@dataclass(frozen=True, slots=True)
class Found:
    """A plan's ranks.

    Attributes:
        predicted, counted: bytes, by rank that does anything.
        fits: whether it ran under its own prediction and a little more.
        runs_out: whether it ran out with a tenth less.
    """

    predicted: tuple[int, ...]
    counted: tuple[int, ...]
    fits: bool
    runs_out: bool

    @property
    def errors(self) -> tuple[float, ...]:
        """Per cent, by rank; below zero where too little was predicted."""
        return tuple(100 * (said / seen - 1) for said, seen in zip(self.predicted, self.counted, strict=True))


def measure(quick: bool) -> list[Row]:
    """All networks; ``--quick`` takes one."""
    torch.set_num_threads(1)  # as ranks do: what an operator needs besides depends on it
    found: dict[tuple[str, str], Found] = {}
    for name, sets in (QUICK if quick else PLANS).items():
        network = NETWORKS[name]
        shared = () if quick else IN_SHARED_MEMORY.get(name, ())
        profile = profile_of(network)
        found |= {(name, label): one for label, one in plans_of(network, profile, sets)}
        found |= {(name, label): one for label, one in plans_of(network, profile, shared, SHARED)}
    return rows_of(found)


def rows_of(found: Mapping[tuple[str, str], Found]) -> list[Row]:
    """Of the plans, by network and name."""
    rows = []
    for (name, label), one in found.items():
        worst = max(one.errors, key=abs)
        rows.append(Row(f"{name}, {label}: predicted / counted - 1, furthest rank", worst, "%"))
    errors = [error for one in found.values() for error in one.errors]
    rows.append(Row("plans", len(found), ""))
    rows.append(at_most("mean absolute error of a rank", fmean(map(abs, errors)), "%", GOAL_PERCENT))
    rows.append(at_most("worst under-prediction of a rank", max(0.0, -min(errors)), "%", UNDER_PERCENT))
    rows.append(Row("worst over-prediction of a rank", max(0.0, *errors), "%"))
    near = 100 * fmean(abs(error) <= GOAL_PERCENT for error in errors)
    rows.append(at_least(f"ranks within {GOAL_PERCENT:g} %", near, "%", 95.0))
    out = sum(not one.fits for one in found.values())
    rows.append(at_most("accepted plans that run out under a limit of their prediction + 1 %", out, "", 0))
    over = 100 * fmean(one.runs_out for one in found.values())
    rows.append(at_least("plans predicted 10 % over the limit that do run out", over, "%", 95.0))
    return rows


def profile_of(network: Network) -> Profile:
    """The network, watched in this process: its bytes are counted.

    Its seconds are the bytes that layers make, which need no quiet machine.
    """
    model = load_model(network.source)
    captured = capture(model)
    graph = captured.graph
    found = list[Measurement]()
    for samples in network.sizes:
        bytes_of = footprints(captured, example_of(graph.inputs, model, samples), samples)
        for layer in graph.layers:
            seconds = 1e-12 * samples * max(1, sum(spec.num_bytes for spec in layer.outputs))
            one = bytes_of[layer.name]
            halves = seconds if one.levels is not None and one.levels.left else 0.0
            times = (seconds, 2 * seconds, 2 * seconds - halves, halves)
            found.append(
                Measurement(layer.name, samples, *times, one.saved_bytes, one.workspace_bytes, 1, levels=one.levels)
            )
    return Profile(
        network.source,
        Optimizer("SGD", {"lr": 1e-3, "momentum": 0.9}, 1.0),
        graph,
        cluster_of(1),
        {"cpu": tuple(found)},
        {"cpu": {layer.name: ParameterCost(1e-6, 1e-6) for layer in graph.layers}},
        Provenance({}),
        site_halos=_halos(graph, model, max(network.sizes)),
    )


def _halos(graph: Graph, model: LoadedModel, samples: int) -> tuple[SiteHalo, ...]:
    """Of a sparse network: whether ranks that share out sites borrow some."""
    return () if model.clouds is None else site_halos(graph, model.clouds, fed_example(model, samples), samples)


def plans_of(
    network: Network, profile: Profile, sets: Sequence[tuple[int, tuple[str, ...]]], transport: str = GLOO
) -> Iterator[tuple[str, Found]]:
    """Of each plan, by its name with the number of ranks, what was predicted and counted.

    Args:
        sets: numbers of ranks, and plans on them.
        transport: what ranks exchange by.
    """
    through = " through shared memory" if transport == SHARED else ""
    for num_ranks, names in sets:
        cluster = cluster_of(num_ranks, SHARED_MEMORY if transport == SHARED else "")
        problem = Problem(replace(profile, cluster=cluster), network.samples, allow=network.allow)
        for name in names:
            yield f"{name} on {num_ranks}{through}", held(_case(problem, name), transport)


def _case(problem: Problem, name: str) -> Case:
    if name not in BY_HAND:
        return case(problem, name, pads=False)
    allow = (
        (*problem.allow, CHANNEL_DIMS, SPATIAL_DIMS) if name in (HEIGHTS, SPLIT_HEIGHTS, CHANNELS) else problem.allow
    )
    asked = replace(problem, allow=tuple(dict.fromkeys(allow)))
    return case_of(asked, name, BY_HAND[name](asked), pads=False)


def held(one: Case, transport: str = GLOO) -> Found:
    """What the ranks of a plan hold, under limits of what was predicted.

    Args:
        transport: what ranks exchange by.
    """
    said = [memory.peak_bytes for memory in one.forecast.memories]
    within, below = ([round(by * size) or None for size in said] for by in (ROOM, 1 / OVER))
    limited = steps_within(one.plan, transport, [*[within] * _STEPS, below])
    fits = limited.num_steps >= _STEPS
    counted = (limited if fits else steps_within(one.plan, transport, [[None] * len(said)] * _STEPS)).peak_bytes(_STEPS)
    used = [rank for rank, row in enumerate(one.decision.program) if row]
    mine = tuple(said[rank] for rank in used), tuple(counted[rank] for rank in used)
    return Found(*mine, fits, limited.ran_out)


def cluster_of(num_ranks: int, transport: str = "") -> Cluster:
    """So many alike cores of one host, and what joins them (:attr:`planner.ir.cluster.Link.transport`)."""
    devices = tuple(DeviceSpec(f"n0/cpu{rank}", "cpu", "n0", 1 << 40) for rank in range(num_ranks))
    return Cluster(devices, {WITHIN_HOST: Link(1e-5, 1e10, transport=transport)})


if __name__ == "__main__":
    raise SystemExit(run("Predicted beside counted memory of plans, and runs under a hard limit", measure))
