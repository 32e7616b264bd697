"""What a solver is asked: a profile and the constraints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from planner.ir.cluster import Cluster, DeviceSpec
from planner.ir.graph import Graph
from planner.ir.options import NAMES, SIZE, SUM, option
from planner.ir.profile import Profile

THROUGHPUT, MEMORY, LATENCY = OBJECTIVES = ("throughput", "memory", "latency")
"""Shortest training step, or of schedules of forward passes alone the most samples a second of a stream without an end;
least memory on the fullest rank; shortest forward pass (inference) of one batch."""

SAMPLE_DIMS, SPATIAL_DIMS, CHANNEL_DIMS, TIME_DIMS = DIM_FAMILIES = ("sample", "spatial", "channel", "time")
"""Families of dims that may be cut: samples; height, width and depth; channels and filters; tokens, in their order.

Layers are cut along the first three, over ranks; along time sequences are, into slices that follow one another."""

NEVER = "never"
AUTO = "auto"
ALWAYS = "always"
SELECTIVE = "selective"
RECOMPUTE = (NEVER, AUTO, SELECTIVE, ALWAYS)
"""Whether a stage drops its activations after the forward and computes them again before the backward."""

CHUNKS = (NEVER, AUTO)
"""Whether several stages a position are looked at besides, where no schedule is named."""

DEFAULT_CONFIDENCE = 0.8
"""What is asked for where nobody says anything.  The optimum of the model, whatever is uncertain, is a confidence of 0.

A plan file that names none was made for 0: files leave that out, as those did that were written before plans tied."""

MICRO, WHOLE = STATISTICS = ("micro", "whole")
"""What layers that depend on their batch, such as batch norm, see of it: a micro-batch, or the whole."""

SHARD = (NEVER, AUTO, ALWAYS)
"""Whether the ranks of a stage divide the optimiser's state among them (``Stage.sharded``); auto: where it must be."""

MOST_BATCH = 2**24
"""Samples of a step; micro-batches are counted one by one."""

ZERO = (1, 2, 3)
"""What they divide then: the optimiser's state, gradients too, parameters too (``Stage.zero``)."""

DIVIDED = ("nothing", "the optimiser's state", "the optimiser's state and gradients", "all that is kept of parameters")
"""The same in words, by ``Stage.level``."""


def memory_limit_bytes(device: DeviceSpec, memory_margin: float, memory_bytes: int = 0) -> int:
    """What a plan may use of a device's main memory.

    Args:
        memory_margin: share of it that stays free.
        memory_bytes: a lower limit; 0: none.
    """
    usable = int(device.memory_bytes * (1 - memory_margin))
    return min(usable, memory_bytes) if memory_bytes else usable


@dataclass(frozen=True, slots=True)
class Rule:
    """A side constraint: what layers of a matching name must be (``Problem.fix``) or must not (``Problem.forbid``).

    Attributes:
        pattern: of layer names, as in a shell (``enc.*``).
        what: ``stage``, ``device``, ``kind``, ``replicas``, ``sample``, ``spatial``, ``channel`` or ``recompute``.
        value: as text: a number of ranks or of a stage, a device's name, ``yes``.
    """

    pattern: str
    what: str
    value: str


SPACE = "What plans may use"
SEARCH = "Search"
"""Headings in the help, below the common options, which have none."""

_ADDED: Mapping[str, Any] = {"added": "0.1"}
_MADE_FOR_0 = {**_ADDED, "absent": 0.0, "json_schema_extra": {"default": 0.0}}
"""Of what is in files: added in that release; what a file means that has it not, and how its JSON Schema says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for, as the plan remembers it: each field with its help, limits and default.

    The command line and the calls of ``hp`` have their options from here (:mod:`halopipe.planning.options`).

    Attributes:
        objective: one of ``OBJECTIVES``; of forward passes alone, throughput is that of a stream.
        schedules: names of the schedules that may be used; empty: those that are searched by default.
        micro_batch_sizes: empty: every divisor-like size the profile covers.
        memory_margin: share of a device's memory that stays free.
        memory_bytes: most that a plan may use on any device; 0: what the device has, less the margin.
        allow: families of dims that layers may be cut along; along ``time`` sequences are cut into token slices that
            follow one another.
        recompute: one of ``RECOMPUTE``; ``selective``: attention's cores alone, on all stages.
        shard: one of ``SHARD``; ``auto``: if nothing else fits; solvers get ``never`` or ``always``
            (``planner.solvers.solver`` settles ``auto``).
        halo_depth: most rows of space by which a rank may work beyond its part, so that the next layers need no halo
            (``Placement.margin``).
        fix, forbid: side constraints (:mod:`planner.ir.constraints`).
        confidence: from 0 to below 1: a plan is taken rather than one on fewer ranks only where it is the faster with
            this probability; of plans on as many ranks the fastest at the mean is (``planner.costs.ties``); 0: the
            plan that the model says is the fastest of all.
        speeds: how the profile differs from what was measured (``Profile.standing``): devices that are gone, or at
            another speed.
        token_slices: of which length each is; empty: where time may be cut, what is fastest.
        zero: what ranks of a stage divide if ``shard`` has them divide anything (``Stage.zero``).
        batch_statistics: one of ``STATISTICS``; ``whole``: where a layer depends on its batch, the whole batch is the
            only micro-batch.
        chunks: where no schedule is named, whether some with several stages a position (``schedules.chunked_names``)
            are looked at besides, for a part of the time: ``never`` or ``auto``.
    """

    objective: str = option(
        THROUGHPUT,
        "throughput (the step; a stream's rate with --schedule forward), memory or latency.",
        "NAME",
        offers=OBJECTIVES,
    )
    schedules: tuple[str, ...] = option(
        (),
        "Schedule that may be used, such as 1f1b, gpipe or zb-h1; repeatable. If not given: all that can run.",
        "NAME",
        SPACE,
        flag="--schedule",
        offers="planner.schedules:names",
    )
    micro_batch_sizes: tuple[int, ...] = option(
        (), "Samples of a micro-batch that may be used; repeatable.", panel=SPACE, least=1
    )
    max_stages: int = option(0, "Most stages; 0: no limit.", panel=SPACE, least=0)
    num_ranks: int = option(0, "Devices that may be used; 0: all.", panel=SPACE, flag="--ranks", least=0)
    memory_margin: float = 0.08
    memory_bytes: int = option(0, "Most memory a device may use, such as 2GiB or 512MB.", "SIZE", kind=SIZE)
    gap: float = option(
        0.0, "Stop once the plan is proved to be this close to the best (0.01 = 1 %).", panel=SEARCH, least=0.0
    )
    allow: tuple[str, ...] = option(
        (SAMPLE_DIMS,),
        "Dims that may be cut: layers along sample, spatial, channel; sequences along time. If not given: samples, and "
        "space where the network has it.",
        "DIM,...",
        SPACE,
        kind=NAMES,
        offers=DIM_FAMILIES,
    )
    recompute: str = option(
        NEVER,
        "Compute activations again for the backward: never, auto, selective (attention alone), always.",
        "WHEN",
        SPACE,
        offers=RECOMPUTE,
    )
    shard: str = option(
        NEVER,
        "Divide a stage's optimiser state over its ranks: never, auto, always.",
        "WHEN",
        SPACE,
        offers=SHARD,
        in_files=_ADDED,
    )
    halo_depth: int = option(
        0, "Most rows that may be computed twice to save halos; 0: none.", "ROWS", SPACE, least=0, in_files=_ADDED
    )
    fix: tuple[Rule, ...] = option((), "Side constraint, such as 'enc.*=spatial:2'; repeatable.", "RULE", SPACE)
    forbid: tuple[Rule, ...] = option(
        (), "Side constraint that must not hold, such as 'fc=device:n0/*'; repeatable.", "RULE", SPACE
    )
    confidence: float = option(
        DEFAULT_CONFIDENCE,
        "Use more devices only where that is faster with this probability; 0: take the fastest plan at the mean.",
        panel=SEARCH,
        least=0.0,
        most=0.999,
        in_files=_MADE_FOR_0,
    )
    speeds: Mapping[str, float] = field(default_factory=dict, metadata=_ADDED)
    rate_per_s: float = option(
        0.0,
        "Forward plans: the rate that a stream must sustain, at the least latency; 0: any.",
        "SAMPLES/S",
        flag="--rate",
        least=0.0,
        in_files=_ADDED,
    )
    token_slices: tuple[int, ...] = option(
        (),
        "Cut sequences into slices of so many tokens, such as 256+192+64; --allow time searches for them.",
        "TOKENS+...",
        SPACE,
        kind=SUM,
        in_files=_ADDED,
    )
    zero: int = option(
        1,
        "What --shard divides: 1 the optimiser's state, 2 gradients too, 3 parameters too.",
        panel=SPACE,
        least=1,
        in_files=_ADDED,
    )
    batch_statistics: str = option(
        MICRO,
        "What batch norm sees: micro (each micro-batch), or whole (the batch is then one micro-batch).",
        "OF",
        SPACE,
        offers=STATISTICS,
        in_files=_ADDED,
    )
    chunks: str = field(default=NEVER, metadata=_ADDED)

    def opens_chunks(self, global_batch: int) -> bool:
        """Whether several stages a position are looked at besides (``chunks``); with one sample none gains."""
        is_step = self.objective == THROUGHPUT and not self.rate_per_s and TIME_DIMS not in self.allow
        has_pipelines = global_batch > 1 and self.max_stages != 1
        return self.chunks == AUTO and not self.schedules and is_step and has_pipelines


@dataclass(frozen=True, slots=True)
class Problem(Request):
    """Find the best plan for a request on a profile's machines; by default the one with the shortest step.

    Attributes:
        global_batch: samples a step.
        time_limit_s: stop searching after this long and return the best so far.
    """

    profile: Profile
    global_batch: int
    _: KW_ONLY
    time_limit_s: float = option(60.0, "Seconds to search at most.", flag="--time-limit", least=0.0)

    @classmethod
    def of(cls, profile: Profile, global_batch: int, request: Request) -> Problem:
        """The problem that ``request`` poses."""
        return cls(profile, global_batch, **{one.name: getattr(request, one.name) for one in fields(Request)})

    @property
    def request(self) -> Request:
        """The problem without its profile."""
        return Request(**{one.name: getattr(self, one.name) for one in fields(Request)})

    @property
    def graph(self) -> Graph:
        """The profile's."""
        return self.profile.graph

    @property
    def cluster(self) -> Cluster:
        """The profile's."""
        return self.profile.cluster

    def shards(self, num_ranks: int) -> bool:
        """Whether a stage on ``num_ranks`` ranks divides its optimiser's state among them."""
        return self.shard == ALWAYS and num_ranks > 1

    def zero_over(self, num_ranks: int) -> int:
        """What a stage on ``num_ranks`` ranks divides among them (``Stage.level``)."""
        return self.zero if self.shards(num_ranks) else 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that may be used."""
        count = len(self.cluster.devices)
        return tuple(range(min(self.num_ranks, count) if self.num_ranks else count))

    def memory_limit_bytes(self, rank: int) -> int:
        """What a plan may use of the main memory of ``rank``."""
        return memory_limit_bytes(self.cluster.devices[rank], self.memory_margin, self.memory_bytes)

    def room_bytes(self, rank: int) -> int:
        """The same, with the memories beside the main one of the device: no plan may hold more there."""
        return self.memory_limit_bytes(rank) + sum(self.cluster.devices[rank].memories[1:])
