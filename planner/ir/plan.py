"""The plan: what is decided, what it is predicted to cost, and how it was found."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from planner.ir.cluster import DATASHEET, GLOO, IN_PROCESS, NCCL
from planner.ir.graph import SAMPLE
from planner.ir.layout import Layout
from planner.ir.problem import Request
from planner.ir.profile import Correction, ModelSource, Optimizer, Profile
from planner.ir.schedule import FORWARD_PASS, Action


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What the plan was made for; a run refuses another model.

    Attributes:
        request: what was asked for.
        corrections: of the profile's costs, as they counted when the plan was made.
        profile_path: where the profile was, from the plan's folder; empty: ``profile.json`` there.
    """

    model: ModelSource
    optimizer: Optimizer
    model_fingerprint: str
    profile_fingerprint: str
    cluster_fingerprint: str
    request: Request = field(default_factory=Request)
    corrections: tuple[Correction, ...] = field(default=(), metadata={"added": "0.1"})
    profile_path: str = field(default="", metadata={"added": "0.1"})

    def as_seen(self, profile: Profile) -> Profile:
        """``profile`` as the plan was priced on it: the devices that there were, under the corrections that counted."""
        return profile.standing(self.request.speeds).corrected_by(self.corrections)


@dataclass(frozen=True, slots=True)
class Block:
    """Layers of a forward plan that each rank runs through without an exchange between them, tile by tile.

    What the block hands on is divided over the ranks as its layers' cuts say, and over the tiles of a rank.  What is
    inside follows from the access relations: a tile computes what its part of the ends reads, its overlap with other
    tiles and ranks included, from what was fetched before the block.

    Attributes:
        layers: by name, one after another in the stage's order.
        tiles: into how many tiles a rank cuts its part along a dim of space; dims left out are not cut.
    """

    layers: tuple[str, ...]
    tiles: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_tiles(self) -> int:
        """Of each rank."""
        return prod(self.tiles.values())


@dataclass(frozen=True, slots=True)
class Stage:
    """A group of ranks that runs some layers, and the devices they are meant for.

    Attributes:
        recompute: whether activations are dropped after the forward and computed again before the backward.
        sharded: whether the ranks divide the optimiser's state among them, each updating its part of the parameters
            (ZeRO, Rajbhandari et al. 2020).
        zero: what they divide if ``sharded``: 1 the optimiser's state, 2 gradients too, 3 parameters too.
        blocks: of a forward plan, layers that are run without exchanges between them, and in tiles; in order.
        recomputed: spans of layers whose activations alone are dropped after the forward; each span is computed again
            when the backward comes to it (selective recomputation, Korthikanti et al. 2022, section 5).  No layer
            outside a span lies between two of its own.  Empty with ``recompute``, which is about all layers at once.
    """

    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    recompute: bool = False
    sharded: bool = field(default=False, metadata={"added": "0.1"})
    blocks: tuple[Block, ...] = field(default=(), metadata={"added": "0.1"})
    zero: int = field(default=1, metadata={"added": "0.1"})
    recomputed: tuple[tuple[str, ...], ...] = field(default=(), metadata={"added": "0.1"})

    @property
    def level(self) -> int:
        """ZeRO's level, 0 to 3; 0: nothing is divided."""
        return self.zero if self.sharded else 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a layer runs, and how its tensors are divided over the ranks of its stage.

    Attributes:
        cuts: cut points by dim, for a full micro-batch; empty on a stage of one rank.
        ways: ranks that share the input channels of a contraction: each reads ``1 / ways`` of them, makes partial sums
            of its group's filters and keeps the sum of its own (x-, y- and w-stationary convolutions; Dryden et al.
            2019).  1: each rank reads all input channels of its filters.
        margin: rows by which each rank works beyond its part along the cut dims of space, so that the next layers need
            no halo; what overlaps is computed by both.
    """

    stage: int
    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ways: int = field(default=1, metadata={"added": "0.1"})
    margin: int = field(default=0, metadata={"added": "0.1"})

    @property
    def layout(self) -> Layout:
        """The cut points as a layout."""
        return Layout(self.cuts)


class AxisPart(NamedTuple):
    """What goes through a stage at once where micro-batches are cut along an axis with an order, such as time.

    Its places ``start`` to ``stop`` (tokens), of ``samples`` samples; parts go through a stage one after another.
    """

    samples: int
    start: int
    stop: int


Size = int | AxisPart
"""What decides about the cost of a pass: the samples of a micro-batch, or which part of how many."""


BatchSizes = tuple[int, ...]
"""Samples of each micro-batch of a step; the last one may be smaller."""


def samples_in(size: Size) -> int:
    """Samples of a micro-batch, or of those that a part is of."""
    return size.samples if isinstance(size, AxisPart) else size


def sizes_of(micro_batches: BatchSizes, axis_parts: tuple[int, ...]) -> tuple[Size, ...]:
    """What the program's micro-batches are: those of a plan, or one after another all parts of each."""
    if not axis_parts:
        return micro_batches
    parts = tuple(pairwise(accumulate(axis_parts, initial=0)))
    return tuple(AxisPart(samples, start, stop) for samples in micro_batches for start, stop in parts)


@dataclass(frozen=True, slots=True)
class Decision:
    """Everything that drives a run; may be edited by hand.

    Attributes:
        schedule: name of the schedule that ordered the program.
        micro_batches: samples of each micro-batch, in order; their sum is the global batch.
        stages: in topological order.
        layers: by name, in the graph's order.
        program: actions by rank, as text; of token slices what they number are the slices of all micro-batches.
        token_slices: tokens of each slice that every micro-batch's sequences are cut into (TeraPipe, Li et al. 2021);
            empty: they are not.
        prepares_next_step: whether a thread of each rank prepares the next step's inputs (``PREP``) during this one; a
            step's own are there when it begins.  Of sampled graphs it does so under every plan.
    """

    schedule: str
    micro_batches: tuple[int, ...]
    stages: tuple[Stage, ...]
    layers: Mapping[str, Placement]
    program: tuple[tuple[str, ...], ...]
    token_slices: tuple[int, ...] = field(default=(), metadata={"added": "0.1"})
    prepares_next_step: bool = field(default=False, metadata={"added": "0.1"})

    @property
    def num_parts(self) -> int:
        """Parts of each micro-batch along an axis with an order; 1 where it is whole."""
        return max(1, len(self.token_slices))

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Of each of the program's micro-batches."""
        return sizes_of(self.micro_batches, self.token_slices)

    @property
    def num_ranks(self) -> int:
        """Number of ranks the program is written for."""
        return len(self.program)

    @property
    def used_ranks(self) -> tuple[int, ...]:
        """Those of them that have a stage."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.ranks}))

    @property
    def global_batch(self) -> int:
        """Samples a step."""
        return sum(self.micro_batches)

    @property
    def trains(self) -> bool:
        """Whether the program is more than forward passes."""
        return any(action.op not in FORWARD_PASS for row in self.rows() for action in row)

    def layers_of(self, stage: int) -> tuple[str, ...]:
        """Names of the layers of ``stage``, in order."""
        return tuple(name for name, placement in self.layers.items() if placement.stage == stage)

    def layout_of(self, stage: int) -> Layout:
        """The layout of the first layer of ``stage``: of all of them, where they are cut along samples alone."""
        return next((p.layout for p in self.layers.values() if p.stage == stage), Layout())

    def shape_text(self) -> str:
        """What it is called: ``data parallel on 2 devices``, ``a pipeline of 2 stages on 4 devices``."""
        devices = len(self.used_ranks)
        if devices == 1:
            return "one device"
        dims = sorted({dim for placement in self.layers.values() for dim in placement.cuts})
        cut = f"layers cut along {' and '.join(dims)}" if set(dims) - {SAMPLE} else "data parallel"
        if len(self.stages) == 1:
            return f"{cut} on {devices} devices"
        is_divided = any(len(stage.ranks) > 1 for stage in self.stages)
        return f"a pipeline of {len(self.stages)} stages{f', {cut},' if is_divided else ''} on {devices} devices"

    def device_of(self, rank: int) -> str:
        """Name of the device that is meant for ``rank``."""
        for stage in self.stages:
            if rank in stage.ranks and len(stage.devices) == len(stage.ranks):
                return stage.devices[stage.ranks.index(rank)]
        return "no device"

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """The program as actions.

        Raises:
            ValueError: an entry is not an action.
        """
        return tuple(tuple(Action.parse(text) for text in row) for row in self.program)


@dataclass(frozen=True, slots=True)
class RankPrediction:
    """What one rank is predicted to do in a step; the four times add up to it (``planner.costs.simulator.breakdown``).

    Attributes:
        compute_s: inside forward, backward and update.
        communication_s: for messages, reductions, exchanges inside passes, as far as it is not hidden behind compute.
        idle_s: after its last action.
        bubble_s: waiting for what other ranks have not computed yet, with something left to do; of older plan files it
            is in ``idle_s``.
        peak_bytes: in the device's memory, what is on chip apart.
        kind: of the device that it is planned for, in the words of the profile; of older plan files empty.
        on_chip_bytes: of parameters, gradients and optimiser state in a device's on-chip memory, which has
            ``on_chip_limit_bytes``; 0 where they do not fit, or there is none.
    """

    rank: int
    compute_s: float
    communication_s: float
    idle_s: float
    peak_bytes: int
    memory_limit_bytes: int
    bubble_s: float = field(default=0.0, metadata={"added": "0.1"})
    kind: str = field(default="", metadata={"added": "0.1"})
    on_chip_bytes: int = field(default=0, metadata={"added": "0.1"})
    on_chip_limit_bytes: int = field(default=0, metadata={"added": "0.1"})


@dataclass(frozen=True, slots=True)
class Prediction:
    """A cache of what the simulator says of the decision.

    Attributes:
        bubble_fraction: of the time of the ranks that are used, what is bubble or idle.
        p10_s, p90_s: one step in ten is shorter than the first, one longer than the second, as far as the profile says
            how costs vary (``planner.costs.uncertainty``); 0 if not known.
        transport: that the links between its ranks were measured with; empty if the profile does not say.
        sustained_per_s: samples a second of an endless stream of batches, of forward passes alone; a step is the
            latency of one of them then.  0 for programs that train.
        sustained_p10_per_s, sustained_p90_per_s: one stream in ten is slower than the first, one faster than the last.
    """

    step_s: float
    samples_per_s: float
    bubble_fraction: float
    ranks: tuple[RankPrediction, ...]
    evidence: str
    p10_s: float = field(default=0.0, metadata={"added": "0.1"})
    p90_s: float = field(default=0.0, metadata={"added": "0.1"})
    transport: str = field(default="", metadata={"added": "0.1"})
    sustained_per_s: float = field(default=0.0, metadata={"added": "0.1"})
    sustained_p10_per_s: float = field(default=0.0, metadata={"added": "0.1"})
    sustained_p90_per_s: float = field(default=0.0, metadata={"added": "0.1"})

    @property
    def peak_bytes(self) -> int:
        """What the fullest rank holds."""
        return max((rank.peak_bytes for rank in self.ranks), default=0)

    def other_transport(self, used: str) -> str:
        """The transport that the links were measured with, if a run over ``used`` says nothing of them; else empty.

        Links of which nothing is said were measured over gloo, or over NCCL between GPUs, or not at all.
        """
        if not used or used == IN_PROCESS:
            return ""
        before = "" if used == NCCL or self.evidence == DATASHEET else GLOO
        measured_over = self.transport or before
        return measured_over if measured_over != used else ""

    def other_devices(self, used: Sequence[str]) -> tuple[str, str]:
        """(planned, used) of the first rank that ran on another kind of device than the step is predicted for.

        Two empty words if none did, or if it is not known of one of the two.
        """
        pairs = zip((rank.kind for rank in self.ranks), used, strict=False)
        return next(((planned, ran) for planned, ran in pairs if planned and ran and planned != ran), ("", ""))

    def is_of(self, transport: str, kinds: Sequence[str]) -> bool:
        """Whether a run over ``transport`` on these kinds of device, by rank, tells how good the prediction is."""
        return not self.other_transport(transport) and not any(self.other_devices(kinds))


@dataclass(frozen=True, slots=True)
class Rejected:
    """Something the search looked at and did not take, or did not look at."""

    what: str
    why: str


UNCUT = "no cut between "
"""Begins what is said of layers that are kept in one stage: ``no cut between a and b``."""

SEVERAL_STAGES = "several stages a device"
"""Said where there was no time for all pipelines of several stages a position, and they were asked for
(``Problem.chunks``)."""

ANY_SETS_LAID_OUT = "stages of any set of layers that are cut along more than samples"
"""Said where stages over samples may be of any set of layers, and these are of stretches of the network's own order."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A plan that is faster at the mean, and was not taken: it is not surely faster, and uses or exchanges more.

    Attributes:
        over: that plan, in words.
        step_s: of it: what the search proved or bounded.
        given_up: the step of the plan that was taken over ``step_s``, less 1.
        confidence: with what probability it is the faster of the two; less than was asked for (``Request.confidence``).
        num_ranks: that it uses: more than the plan that was taken, or as many, where that one exchanges less and is
            hardly slower; 0: not known.
    """

    over: str
    step_s: float
    given_up: float
    confidence: float
    num_ranks: int = field(default=0, metadata={"added": "0.1"})


STATUSES = ("proven", "within gap", "searched", "time limit", "stopped", "heuristic")
PROVEN, WITHIN_GAP, SEARCHED, TIME_LIMIT, STOPPED, HEURISTIC = STATUSES
_AT_THE_BOUND = 2.5e-9


def status_of(ended: str, step_s: float, bound_s: float, gap: float = 0.0) -> str:
    """The status of a plan of ``step_s`` whose search ended with a bound.

    ``proven`` is such a status, not a file: the bound is the step, but for rounding.  A proof that can be checked by
    others is :mod:`planner.proof`'s.

    Args:
        ended: what ended the search: ``time limit``, ``stopped``, or another status: nothing was left to look at.
        gap: how far from the best the plan may be.
    """
    if ended == STOPPED:
        return STOPPED
    if bound_s >= step_s * (1 - _AT_THE_BOUND):
        return PROVEN
    if step_s <= bound_s * (1 + gap) * (1 + _AT_THE_BOUND):
        return WITHIN_GAP
    return TIME_LIMIT if ended == TIME_LIMIT else SEARCHED


@dataclass(frozen=True, slots=True)
class Search:
    """How the decision was found and how far from the best it can be.

    Attributes:
        status: ``proven``; ``within gap``: no further from the best than was asked for; ``searched``: everything in the
            space was looked at, and the bound lies below the plan by more; ``time limit``, ``stopped``: some of it was
            not; ``heuristic``.
        bound_s: no plan of the searched space is faster than this in the simulator; 0 if nothing is known.
        bounds_s: the bounds it is the largest of, by name.
        gap: step_s / bound_s - 1; of the plan that is fastest at the mean, where a simpler one was taken (``tie``).
        num_simulated, num_candidates: plans simulated, and partial plans looked at.
        binding: what limits the step, in words.
        tie: the plan that is faster at the mean, where a simpler one was taken.
    """

    method: str
    solver: str
    status: str
    bound_s: float
    gap: float
    num_simulated: int
    num_candidates: int
    bounds_s: Mapping[str, float] = field(default_factory=dict)
    binding: tuple[str, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    tie: Tie | None = field(default=None, metadata={"added": "0.1"})

    def optimum_s(self, step_s: float) -> float:
        """The step of the plan that bound, gap and status are about, where ``step_s`` is that of the plan taken."""
        return self.tie.step_s if self.tie is not None else step_s


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another plan, in brief, and why it was not chosen."""

    name: str
    step_s: float | None
    peak_bytes: int | None
    why_not: str


@dataclass(frozen=True, slots=True)
class RankMeasured:
    """Where the step of one rank went, mean over steps; the four parts add up to it, as of a :class:`RankPrediction`.

    Attributes:
        compute_s: inside forward, backward, update, and what is prepared of a micro-batch; exchanges inside them too,
            which a run does not tell from the computing around them.
        communication_s: all other; sending, waiting for a message after its sender began to send it, or for a sum that
            all ranks have come to.
    """

    rank: int
    compute_s: float
    communication_s: float
    bubble_s: float
    idle_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run of the plan measured (``run --update``).

    Attributes:
        step_s: median over ``num_steps`` steps after warm-up; ``spread`` is the interquartile range over the median.
        stage_forward_s, stage_backward_s: median per micro-batch, by stage.
        error: measured / predicted - 1; None where the run was over another transport, or on another kind of device,
            than the prediction is of.
        stage_update_s, stage_reduction_s: median, by stage: the update; the sum of gradients from when its last rank is
            there.
        transport: that the ranks exchanged by; empty of one rank.
        kinds: of the devices that they ran on, by rank, in the words of the plan where it means them.
    """

    step_s: float
    spread: float
    num_steps: int
    stage_forward_s: tuple[float, ...]
    stage_backward_s: tuple[float, ...]
    peak_bytes: tuple[int, ...]
    error: float | None
    stage_update_s: tuple[float, ...] = field(default=(), metadata={"added": "0.1"})
    stage_reduction_s: tuple[float, ...] = field(default=(), metadata={"added": "0.1"})
    ranks: tuple[RankMeasured, ...] = field(default=(), metadata={"added": "0.1"})
    transport: str = field(default="", metadata={"added": "0.1"})
    kinds: tuple[str, ...] = field(default=(), metadata={"added": "0.1"})

    @classmethod
    def of_steps(
        cls, seconds: Sequence[float], prediction: Prediction, transport: str, kinds: tuple[str, ...]
    ) -> Measured:
        """What is measured of steps of these seconds, beside ``prediction``; of stages and ranks nothing is known."""
        step_s = statistics.median(seconds)
        quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [step_s] * 3
        spread = (quartiles[2] - quartiles[0]) / step_s if step_s else 0.0
        error = None
        if prediction.is_of(transport, kinds):
            error = step_s / prediction.step_s - 1 if prediction.step_s else 0.0
        return cls(step_s, spread, len(seconds), (), (), (), error, transport=transport, kinds=kinds)


def timed_steps(seconds: Sequence[float], warmup: int, begins: Sequence[int] = ()) -> tuple[float, ...]:
    """The steps after the warm-up, which alone are measured; all where there are no others.

    Args:
        warmup: steps of each attempt that warm up.
        begins: the places in ``seconds`` at which later attempts begin.
    """
    warm = {begin + step for begin in (0, *begins) for step in range(warmup)}
    return tuple(each for step, each in enumerate(seconds) if step not in warm) or tuple(seconds)


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The file between ``plan`` and ``run``."""

    inputs: PlanInputs
    decision: Decision
    prediction: Prediction
    search: Search
    alternatives: tuple[Alternative, ...] = ()
    measured: Measured | None = None

    def __repr__(self) -> str:
        """What is decided and predicted, in a line; ``hp.explain`` says more."""
        count = len(self.decision.micro_batches)
        largest = max(self.decision.micro_batches)
        gap = f", gap {self.search.gap:.1%}" if self.search.bound_s > 0 else ""
        return (
            f"Plan({self.inputs.model.factory}: {self.decision.shape_text()}, {self.decision.schedule}, "
            f"{count} micro-batch{'es' if count > 1 else ''} of {largest}, "
            f"{self.prediction.step_s * 1e3:.3g} ms a step, {self.search.status}{gap})"
        )
