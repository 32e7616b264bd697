"""When every action ran: predicted by the simulator or measured by the runtime, in one type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from planner.ir.plan import Measured, Prediction, timed_steps


@dataclass(frozen=True, slots=True)
class Span:
    """``action`` (as text, such as ``2F0``) on ``rank`` from ``start_s`` to ``stop_s`` after the step's start."""

    rank: int
    action: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes in use on ``rank`` from ``at_s`` on."""

    rank: int
    at_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class Timeline:
    """One step.

    Attributes:
        source: ``predicted`` or ``measured``.
        step_s: from the common start to the end of the last rank.
        spans: by rank and start.
        memory: by rank and time; may be empty.
    """

    source: str
    step_s: float
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...] = ()

    def __repr__(self) -> str:
        """How long, and of how much, in a line."""
        return f"Timeline({self.source}: {self.step_s * 1e3:.3g} ms, {len(self.spans)} spans)"

    def peak_bytes(self, rank: int) -> int:
        """The most memory ``rank`` had in use (0 if not known)."""
        return max((sample.num_bytes for sample in self.memory if sample.rank == rank), default=0)

    def busy_s(self, rank: int) -> float:
        """Time that ``rank`` spent inside actions other than waiting for messages; what overlaps counts once."""
        busy = sorted(
            (span.start_s, span.stop_s)
            for span in self.spans
            if span.rank == rank and "RECV" not in span.action and "SEND" not in span.action
        )
        total_s = 0.0
        until_s = 0.0
        for start_s, stop_s in busy:
            total_s += max(0.0, stop_s - max(start_s, until_s))
            until_s = max(until_s, stop_s)
        return total_s


@dataclass(frozen=True, slots=True)
class LonePasses:
    """A stage on one rank, run without its peers (``runtime.stage.alone``).

    Attributes:
        samples: that it was run on.
        before_s, after_s: seconds of each pass, forward and, of plans that train, backward: before the first timed step
            and after the last.
    """

    rank: int
    stage: int
    samples: int
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Drift:
    """Why a measured step differs from the predicted one: the machine, or the model of it.

    measured / predicted = (1 + machine) * (1 + model)

    Attributes:
        alone_s, priced_s: of the stages of all ranks together, each alone: now, and by the profile.
        speeds: by kind of device, seconds alone now over those of the profile.
        noise: by which ``speeds`` differ by chance.
        during: by how much passes after the last step took longer than before the first.
        machine: by how much the step grows with that; where the plan counted with a machine as it was at an earlier
            run, beyond that.
        model: what is left.
    """

    alone_s: float
    priced_s: float
    speeds: Mapping[str, float]
    noise: float
    during: float
    machine: float
    model: float


@dataclass(frozen=True, slots=True)
class Restart:
    """A job that lost ranks and was started again.

    Attributes:
        step: steps that were complete when it lost them.
        ranks: whose failure it was; empty where nobody knows.
        error: what ended it, its first line, with its ``code`` (``H501``).
        resumed_step: steps that were kept: it went on after them.
        repeated_steps: those that were done again.
        recovery_s: from the end of the ranks to the start of the first step of their successors.
    """

    step: int
    ranks: tuple[int, ...]
    error: str
    code: str
    resumed_step: int
    repeated_steps: int
    recovery_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An update that was not made, as a loss or gradient was NaN or infinite (``--on-nan skip``).

    Attributes:
        step: counted from 1.
        why: where that appeared.
    """

    step: int
    why: str


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank, or the link to it, that is slower than expected while a job runs (``runtime.monitor.slow``).

    Attributes:
        factor: of a rank, seconds of its own actions over those that the plan predicts, less what all ranks have in
            common; of a link, seconds of messages over those of its first steps.  1.0: it has recovered.
        step: at which that was seen, counted from 1.
        why: in words, with what it does.
        peer: the rank at the other end of the link, which sends; None: it is the rank itself.
    """

    rank: int
    factor: float
    step: int
    why: str
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class TimelineFile:
    """What a run writes: the plan's predicted step beside the measured ones.

    Attributes:
        transport: that the ranks exchanged by; empty of one rank.
        drift: None where no stage was run alone, or the profile was not there.
        restarts: of the job, in their order.
        kinds: of the devices that the ranks ran on, as of :class:`planner.ir.plan.Measured`.
        plan: that was run, its :func:`planner.ir.codec.plan_fingerprint`; of older files empty.
        warmup: how many of the first steps, of each attempt, no median counts; of older files 0.
        first_step: steps done before the first of ``step_seconds``; of older files 0.
    """

    predicted: Timeline
    measured: Timeline
    step_seconds: tuple[float, ...]
    losses: tuple[float, ...]
    transport: str = field(default="", metadata={"added": "0.1"})
    drift: Drift | None = field(default=None, metadata={"added": "0.1"})
    restarts: tuple[Restart, ...] = field(default=(), metadata={"added": "0.1"})
    kinds: tuple[str, ...] = field(default=(), metadata={"added": "0.1"})
    plan: str = field(default="", metadata={"added": "0.1"})
    warmup: int = field(default=0, metadata={"added": "0.1"})
    first_step: int = field(default=0, metadata={"added": "0.1"})

    @property
    def timed_seconds(self) -> tuple[float, ...]:
        """The steps that are measured."""
        begins = [each.resumed_step - self.first_step for each in self.restarts]
        return timed_steps(self.step_seconds or (self.measured.step_s,), self.warmup, begins)

    @property
    def step_s(self) -> float:
        """The measured step."""
        return median(self.timed_seconds)

    def measured_beside(self, prediction: Prediction) -> Measured:
        """What the run measured of a step, beside what was predicted of its plan."""
        return Measured.of_steps(self.timed_seconds, prediction, self.transport, self.kinds)
