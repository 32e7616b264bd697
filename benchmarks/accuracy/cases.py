"""What is run to see how true predictions are: networks, clusters, and plans on them.

A *setting* is a network on a cluster: hosts that are network namespaces with rate-limited links, a virtual device on
each.  Every setting has several plans, so that their order can be judged as well as their seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

import planner
from benchmarks.strong_scaling.layouts import Ways
from planner.costs.candidate import Candidate
from planner.costs.cost_model import CostModel
from planner.costs.predict import Forecast, forecast
from planner.costs.pricing import Pricing
from planner.ir.plan import Decision, Plan, Search
from planner.ir.problem import DEFAULT_CONFIDENCE, SAMPLE_DIMS, SPATIAL_DIMS, Problem
from planner.ir.profile import ModelSource
from planner.schedules import positions, traits
from planner.solvers.candidates.candidate import decision_of, group_shares, plan_of, split_batch
from planner.solvers.candidates.feasibility import cut_positions

CHOSEN = "chosen"
FASTEST = "fastest at the mean"
ONE = "one device"
DATA_PARALLEL = "data parallel"
"""Chosen: what ``halopipe plan`` takes; fastest at the mean: the same without regard to ties."""
MEMORY = "memory"
"""What joins the ranks of one host, in place of a link."""
SPACE = "space"
MIX = "mix of layouts"
HYBRID = "two stages of two"
CORE = "core"
STEADY = "steady"
TIMED = "timed"
HOST = "host"
"""Devices of :mod:`benchmarks.devices.virtual_device`: a core, held back; one that keeps to the speed that it had
alone; one that computes nothing, each action of which lasts as predicted; or two whole cores of this host, as
``halopipe run`` uses them."""


@dataclass(frozen=True, slots=True)
class Network:
    """A network and the sizes it is measured at.

    Attributes:
        samples: of the global batch.
        sizes: numbers of samples to profile; empty: what the profiler chooses.
        allow: families of dims that its plans may cut along; with space, parts of layers are profiled too.
    """

    source: ModelSource
    samples: int
    sizes: tuple[int, ...]
    allow: tuple[str, ...] = (SAMPLE_DIMS,)


@dataclass(frozen=True, slots=True)
class Setting:
    """A network on a cluster.

    Attributes:
        rate: of each host's link, by name (:data:`benchmarks.devices.testbed.RATES`); of one host ``MEMORY``.
        factors: seconds of each device for one of a core's.  Of steady devices at least as many as there are ranks: all
            of them compute on two cores, and what moves messages needs its time too.
        plans: names of its plans: one of the constants above, or ``SCHEDULE`` or ``SCHEDULE/SIZE`` for a pipeline over
            all devices with the work in proportion to their speeds, in micro-batches of that many samples.
        hosts: of each device; empty: one each.
        device: what they are; ``CORE`` where one of them is a whole core.
    """

    name: str
    network: str
    rate: str
    factors: tuple[float, ...]
    plans: tuple[str, ...]
    hosts: tuple[int, ...] = ()
    device: str = STEADY

    @property
    def host_of(self) -> tuple[int, ...]:
        """The host of each rank."""
        return self.hosts or tuple(range(len(self.factors)))


def _model(name: str, shape: tuple[int, ...], **arguments: int) -> ModelSource:
    return ModelSource(f"profiler.models.{name}", {key: str(value) for key, value in arguments.items()}, shape)


_SPACE = (SAMPLE_DIMS, SPATIAL_DIMS)

NETWORKS: Mapping[str, Network] = {
    "ResNet-50": Network(_model("resnet:resnet50", (8, 3, 96, 96), num_classes=100), 8, (1, 2, 4, 8)),
    "VGG-16": Network(_model("vgg:vgg16", (8, 3, 64, 64), width=32, hidden=512, num_classes=100), 8, (1, 2, 4, 8)),
    "GNMT": Network(_model("gnmt:gnmt", (16, 16), vocabulary=2000, width=256), 16, (1, 2, 4, 8, 16)),
    "3-D U-Net": Network(_model("unet3d:unet3d", (4, 1, 32, 32, 32), width=8), 4, (1, 2, 4), _SPACE),
    "GPT": Network(
        _model("gpt:gpt", (16, 64), vocabulary=1000, width=256, layers=8, heads=4, context=64), 16, (1, 2, 4, 8, 16)
    ),
    "sparse VGG": Network(_model("sparse_vgg:sparse_vgg16", (8, 1500, 1), width=16, hidden=128), 8, (1, 2, 4, 8)),
}

SETTINGS: tuple[Setting, ...] = (
    Setting(
        "A", "ResNet-50", "1gbit", (1.0, 1.0), (CHOSEN, FASTEST, ONE, DATA_PARALLEL, "1f1b/2", "gpipe/1"), device=CORE
    ),
    Setting(
        "B",
        "ResNet-50",
        "4gbit",
        (4.0, 6.0, 8.0, 16.0),
        (CHOSEN, FASTEST, ONE, DATA_PARALLEL, "1f1b-so/1", "zb-h1/1", HYBRID),
    ),
    Setting("C", "VGG-16", "1gbit", (2.0, 4.0), (CHOSEN, FASTEST, ONE, DATA_PARALLEL, "gpipe/2", "1f1b-2bp/2")),
    Setting(
        "D", "GNMT", "200mbit", (2.0, 2.0), (CHOSEN, FASTEST, ONE, DATA_PARALLEL, "1f1b/4", "interleaved/4", "zb-v/4")
    ),
    Setting(
        "E", "GNMT", "1gbit", (4.0, 4.0, 8.0, 8.0), (CHOSEN, FASTEST, ONE, "1f1b/2", "1f1b-windowed/2", "gpipe-2bp/2")
    ),
    Setting("F", "3-D U-Net", "4gbit", (2.0, 2.0), (CHOSEN, FASTEST, ONE, SPACE, MIX, DATA_PARALLEL, "1f1b/1")),
    Setting("G", "3-D U-Net", "1gbit", (4.0, 4.0, 4.0, 4.0), (CHOSEN, FASTEST, ONE, SPACE, DATA_PARALLEL, "gpipe/1")),
    Setting("H", "GPT", "200mbit", (2.0, 8.0), (CHOSEN, FASTEST, ONE, "1f1b/4", "zb-h1/4", DATA_PARALLEL)),
    Setting(
        "I",
        "GPT",
        "1gbit",
        (4.0, 4.0, 4.0, 4.0),
        (CHOSEN, FASTEST, ONE, "1f1b/2", "1f1b-2bp-fill/2", "naive/4", HYBRID),
    ),
    Setting(
        "J",
        "GPT",
        "4gbit",
        (4.0, 4.0, 6.0, 6.0),
        (CHOSEN, FASTEST, ONE, HYBRID, DATA_PARALLEL, "greedy/2"),
        (0, 0, 1, 1),
    ),
    Setting("K", "sparse VGG", "1gbit", (2.0, 4.0), (CHOSEN, FASTEST, ONE, DATA_PARALLEL, "1f1b/2")),
    Setting(
        "M",
        "GPT",
        "1gbit",
        (4.0,) * 8,
        ("1f1b/1", "1f1b-so/1", "gpipe/1", "interleaved/2"),
        (0, 0, 1, 1, 2, 2, 3, 3),
        device=TIMED,
    ),
    Setting(
        "L",
        "VGG-16",
        "4gbit",
        (4.0, 4.0, 4.0, 4.0),
        (CHOSEN, FASTEST, ONE, DATA_PARALLEL, "1f1b/1", "zb-h2/1", "1f1b-sno/1"),
    ),
)

QUICK: tuple[str, ...] = ("H",)


def _own(name: str) -> Network:
    return Network(ModelSource(f"benchmarks.accuracy.networks:{name}"), 16, ())


NEW_NETWORKS: Mapping[str, Network] = {
    "BERT": _own("bert"),
    "GPT-2": _own("gpt2"),
    "ViT": _own("vit"),
    "RegNetX": _own("regnet"),
    "SE-ResNet": _own("se_resnet"),
    "2-D U-Net": _own("unet"),
    "sparse ResNet": Network(_model("sparse_resnet:sparse_resnet", (8, 1500, 4)), 8, ()),
    "MinkUNet": Network(ModelSource("profiler.models.minkunet:minkunet", {"width": "0.5"}, (8, 1000, 4)), 8, ()),
}

NEW: tuple[Setting, ...] = tuple(
    Setting(f"N{number}", name, MEMORY, (1.0, 1.0), (CHOSEN, FASTEST, ONE, DATA_PARALLEL, "1f1b/2"), (0, 0), HOST)
    for number, name in enumerate(NEW_NETWORKS, 1)
)
"""On two whole cores of this host, through shared memory; on networks that the model was never held against."""

QUICK_NEW: tuple[str, ...] = ("N5",)


def network_of(setting: Setting) -> Network:
    """What is trained in it."""
    return {**NETWORKS, **NEW_NETWORKS}[setting.network]


def named(names: Collection[str], settings: Sequence[Setting] = SETTINGS) -> Iterator[Setting]:
    """Those settings; all if none is named.

    Raises:
        ValueError: there is no such setting.
    """
    if unknown := sorted(set(names) - {setting.name for setting in settings}):
        raise ValueError(f"no setting {', '.join(unknown)}; known: {', '.join(one.name for one in settings)}")
    yield from (setting for setting in settings if not names or setting.name in names)


_SEARCH_S = 20.0


@dataclass(frozen=True, slots=True)
class Case:
    """A plan with its name and what the simulator says of it."""

    name: str
    plan: Plan
    forecast: Forecast

    @property
    def decision(self) -> Decision:
        """What is run."""
        return self.plan.decision


def case(problem: Problem, name: str, *, pads: bool = True) -> Case:
    """The plan ``name`` of a setting whose cluster and network are those of ``problem``.

    Args:
        pads: whether every process has a row, also those that have nothing to do.
    """
    return case_of(problem, name, _decision(problem, name), pads=pads)


def case_of(problem: Problem, name: str, decision: Decision, *, pads: bool = True) -> Case:
    """A decision as the plan ``name``; ``pads`` as of :func:`case`."""
    idle = len(problem.profile.cluster.devices) - decision.num_ranks if pads else 0
    ahead = decision.prepares_next_step and not pads  # a virtual device has no thread beside its rank's own
    decision = replace(decision, program=decision.program + ((),) * idle, prepares_next_step=ahead)
    found = forecast(Pricing.of(problem.profile), decision, problem.memory_margin)
    search = Search("as the setting says", "benchmark", "heuristic", 0.0, 0.0, 1, 1)
    return Case(name, plan_of(problem, decision, found.prediction, search), found)


def _decision(problem: Problem, name: str) -> Decision:
    if name in (CHOSEN, FASTEST):
        asked = replace(problem, time_limit_s=_SEARCH_S, confidence=DEFAULT_CONFIDENCE if name == CHOSEN else 0.0)
        return planner.plan(asked, "best-first").decision
    if name in (ONE, DATA_PARALLEL):
        by = {ONE: "one-device", DATA_PARALLEL: "data-parallel"}[name]
        return planner.plan(replace(problem, allow=("sample",)), by).decision
    if name in (SPACE, MIX):
        ways = Ways(problem.profile, problem.global_batch, len(problem.ranks), problem.allow)
        return (ways.best_uniform(("depth", "height", "width")) if name == SPACE else ways.mix()).decision
    if name == HYBRID:
        ranks = problem.ranks
        return decision_of(problem, pipeline(problem, "1f1b", 0, (ranks[:2], ranks[2:])))
    schedule, _, size = name.partition("/")
    return decision_of(problem, pipeline(problem, schedule, int(size or 0)))


def pipeline(problem: Problem, schedule: str, size: int, groups: Sequence[tuple[int, ...]] = ()) -> Candidate:
    """Stages one after another over all devices, each with work in proportion to its devices' speeds.

    Args:
        size: samples of a micro-batch; 0: a quarter of the batch.
        groups: ranks of each position; one each if not given.
    """
    cost_model = CostModel(problem.profile)
    groups = tuple(groups) or tuple((rank,) for rank in problem.ranks)
    wanted = traits(schedule).stages_per_position
    chosen = positions(schedule, len(groups), 1 if wanted == 1 else 2)
    size = size or problem.global_batch // 4
    step_s = [cost_model.tables.at(cost_model.kind(rank), size) for rank in problem.ranks]
    work = np.asarray(step_s[0].forward_s) + np.asarray(step_s[0].backward_s)
    speeds = [work[-1] / float(table.forward_s[-1] + table.backward_s[-1]) for table in step_s]
    share = [sum(speeds[rank] for rank in groups[position]) for position in chosen]
    ends = np.cumsum(share) / sum(share) * work[-1]
    bounds = _bounds(work.tolist(), ends.tolist(), cut_positions(problem.profile.graph))
    ranks = tuple(groups[position] for position in chosen)
    shares = tuple(group_shares(problem, cost_model, group, size) for group in ranks)
    return Candidate.chain(bounds, ranks, shares, split_batch(problem.global_batch, size), schedule)


def _bounds(work: Sequence[float], ends: Sequence[float], allowed: Sequence[int]) -> tuple[int, ...]:
    """Positions where a graph may be cut, nearest to where the running sum of work reaches each end."""
    sums = [work[position] for position in allowed]
    found = [0]
    for number, end in enumerate(ends[:-1]):
        above = bisect_left(sums, end)
        near = min((above - 1, above), key=lambda k: abs(sums[max(0, min(k, len(sums) - 1))] - end))
        left = len(ends) - 1 - number
        place = min(max(near, allowed.index(found[-1]) + 1), len(allowed) - 1 - left)
        found.append(allowed[place])
    return (*found, allowed[-1])
