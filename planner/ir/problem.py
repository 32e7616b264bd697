"""What a solver is asked: a profile and the constraints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from planner.ir.cluster import DeviceSpec
from planner.ir.profile import Profile

THROUGHPUT, MEMORY, LATENCY = OBJECTIVES = ("throughput", "memory", "latency")
"""Shortest training step, or of schedules of forward passes alone the most samples a second of a stream without an end;
least memory on the fullest rank; shortest forward pass (inference) of one batch."""

SAMPLE_DIMS = "sample"
SPATIAL_DIMS = "spatial"
CHANNEL_DIMS = "channel"
TIME_DIMS = "time"
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
"""What people ask for who name none.  The model's own optimum, whatever is uncertain, is a confidence of 0: what a plan
file says that names none, and so the default of :class:`Request`."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for, as the plan remembers it; see :class:`Problem` for the fields."""

    objective: str = THROUGHPUT
    schedules: tuple[str, ...] = ()
    micro_batch_sizes: tuple[int, ...] = ()
    max_stages: int = 0
    num_ranks: int = 0
    memory_margin: float = 0.08
    memory_bytes: int = 0
    gap: float = 0.0
    allow: tuple[str, ...] = (SAMPLE_DIMS,)
    recompute: str = NEVER
    shard: str = field(default=NEVER, metadata={"added": "0.1"})
    halo_depth: int = field(default=0, metadata={"added": "0.1"})
    fix: tuple[Rule, ...] = ()
    forbid: tuple[Rule, ...] = ()
    confidence: float = field(default=0.0, metadata={"added": "0.1"})
    speeds: Mapping[str, float] = field(default_factory=dict, metadata={"added": "0.1"})
    rate_per_s: float = field(default=0.0, metadata={"added": "0.1"})
    token_slices: tuple[int, ...] = field(default=(), metadata={"added": "0.1"})
    zero: int = field(default=1, metadata={"added": "0.1"})
    batch_statistics: str = field(default=MICRO, metadata={"added": "0.1"})
    chunks: str = field(default=NEVER, metadata={"added": "0.1"})

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
        objective: one of ``OBJECTIVES``.
        schedules: names of the schedules that may be used; empty: those that are searched by default.
        micro_batch_sizes: samples a micro-batch that may be used; empty: every divisor-like size the profile covers.
        max_stages: most stages; 0: no limit.
        num_ranks: devices that may be used, the first ones by rank; 0: all.
        memory_margin: share of a device's memory that stays free.
        memory_bytes: most that a plan may use on any device; 0: what the device has.
        gap: stop once the plan is proved to be within this fraction of the best.
        allow: families of dims that layers may be cut along.
        recompute: one of ``RECOMPUTE``.
        shard: one of ``SHARD``; solvers get ``never`` or ``always`` (``planner.solvers.solver`` settles ``auto``).
        halo_depth: most rows of space by which a rank may work beyond its part (``Placement.margin``).
        fix, forbid: side constraints.
        confidence: from 0 to below 1: a plan is taken rather than one on fewer ranks only where it is the faster with
            this probability (``planner.costs.ties``); 0: the plan that the model says is the fastest.
        speeds: how the profile differs from what was measured (``Profile.standing``): devices that are gone, or at
            another speed.
        rate_per_s: samples a second that a stream of forward passes must sustain; 0: any.
        token_slices: tokens of each slice that sequences are to be cut into; empty: where time may be cut, what is
            fastest.
        zero: what ranks of a stage divide if ``shard`` has them divide anything: 1 the optimiser's state, 2 gradients
            too, 3 parameters too (``Stage.zero``).
        batch_statistics: one of ``STATISTICS``; ``whole``: where a layer depends on its batch, the whole batch is the
            only micro-batch.
        chunks: where no schedule is named, whether some with several stages a position (``schedules.chunked_names``)
            are looked at besides, for a part of the time: ``never`` or ``auto``.
    """

    profile: Profile
    global_batch: int
    time_limit_s: float = field(default=60.0, kw_only=True)

    @classmethod
    def of(cls, profile: Profile, global_batch: int, request: Request) -> Problem:
        """The problem that ``request`` poses."""
        return cls(profile, global_batch, **{one.name: getattr(request, one.name) for one in fields(Request)})

    @property
    def request(self) -> Request:
        """The problem without its profile."""
        return Request(**{one.name: getattr(self, one.name) for one in fields(Request)})

    def shards(self, num_ranks: int) -> bool:
        """Whether a stage on so many ranks divides its optimiser's state among them."""
        return self.shard == ALWAYS and num_ranks > 1

    def zero_over(self, num_ranks: int) -> int:
        """What a stage on so many ranks divides among them (``Stage.level``)."""
        return self.zero if self.shards(num_ranks) else 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that may be used."""
        count = len(self.profile.cluster.devices)
        return tuple(range(min(self.num_ranks, count) if self.num_ranks else count))

    def memory_limit_bytes(self, rank: int) -> int:
        """What a plan may use of the main memory of ``rank``."""
        return memory_limit_bytes(self.profile.cluster.devices[rank], self.memory_margin, self.memory_bytes)

    def room_bytes(self, rank: int) -> int:
        """The same, with the memories beside the main one of the device: no plan may hold more there."""
        return self.memory_limit_bytes(rank) + sum(self.profile.cluster.devices[rank].memories[1:])
