"""Pipeline schedules as data: what each rank does, in order, and the one rule of what must precede what.

The vocabulary is that of ``torch.distributed.pipelining``: ``F`` forward, ``I`` backward for the input, ``W`` backward
for the weights, ``B`` both.  An action is written ``2F0``: stage 2, forward, micro-batch 0; a message names the other
stage as well: ``1SEND_F3>2`` (stage 1 sends the activation of micro-batch 3 to stage 2), ``1RECV_B3<2``.

    rank 0: 0F0 0SEND_F0>1 0F1 0SEND_F1>1 0RECV_B0<1 0B0 0RECV_B1<1 0B1 0UPDATE
    rank 1: 1RECV_F0<0 1F0 1B0 1SEND_B0>0 1RECV_F1<0 1F1 1B1 1SEND_B1>0 1UPDATE

A stage that reads what its host prepares of a micro-batch's coordinates (the kernel maps of sparse networks) has an
action for that, ``1PREP3``, one micro-batch ahead of its forward.  On a device with a host beside it the two overlap.

    0PREP0 0PREP1 0F0 0SEND_F0>1 0PREP2 0F1 0SEND_F1>1 0F2 0SEND_F2>1 ...

Where a plan cuts sequences into token slices (TeraPipe), what is numbered are the slices: of K slices each, those of
micro-batch m are m K to m K + K - 1.  Forwards follow one another, as a slice reads what those before it made;
backwards come from the last slice to the first, which gets the gradients of all that read it (two slices of two):

    0F0 0F1 0F2 0F3 0B1 0B0 0B3 0B2
    1F0 1F1 1F2 1F3 1B1 1B0 1B3 1B2

Three things are written only where a schedule needs them.  ``1SEND_F3>2!`` holds its rank while the message travels
(no overlap with compute).  ``1SEND_F3>2~`` streams between devices that can do that (FPGAs): the message leaves while
stage 1 still computes it, and stage 2 computes as it comes, so that both last at least as long as it; ``~~`` where a
forward and a backward run at once, each on its part of the device, and the message has the time of both.
``0UPDATE3`` is an update in the middle of a step, with the gradients of all micro-batches up to 3 that no update before
it has used; it makes the next version of the stage's weights, and ``0F5@2`` runs on version 2 (version 0, those the
step began with, is not written).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class Op(StrEnum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    UPDATE = "UPDATE"
    PREPARE = "PREP"


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
SEND = frozenset({Op.SEND_FORWARD, Op.SEND_BACKWARD})
RECEIVE = frozenset({Op.RECV_FORWARD, Op.RECV_BACKWARD})
MESSAGE = SEND | RECEIVE
FORWARD_PASS = frozenset({Op.FORWARD, Op.SEND_FORWARD, Op.RECV_FORWARD, Op.PREPARE})
PER_STEP = frozenset({Op.REDUCE_GRAD, Op.UPDATE})
ADDS_GRADIENTS = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})
"""The end of a micro-batch on a stage: its activations may go, and the gradients of parameters have been added to."""

Windows = tuple[int, ...]
"""By stage, the most forwards before the first backward; empty: the schedule's own."""

_OPS = "|".join(sorted((op.value for op in Op), key=len, reverse=True))
_ACTION = re.compile(rf"(\d+)({_OPS})(\d*)(?:[<>](\d+)(!|~~?)?)?(?:@(\d+))?")

ALONE = "~"
IN_PAIRS = "~~"
"""How a message streams: while the one action that makes or reads it runs, or while a forward and a backward do."""


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one stage.

    What an action is, and hence what it is equal to, are its first four fields; the others say how it is done.

    Attributes:
        microbatch: None for ``REDUCE_GRAD`` and ``UPDATE`` of a whole step; the last micro-batch they count otherwise.
        peer: the other stage of a send or receive.
        version: of the stage's weights that a forward or backward uses: how many updates in this step made them.
        blocking: whether a send or receive holds its rank while the message travels.
        streams: :data:`ALONE` or :data:`IN_PAIRS`; empty: the message leaves when it is complete.
    """

    stage: int
    op: Op
    microbatch: int | None = None
    peer: int | None = None
    version: int = field(default=0, compare=False)
    blocking: bool = field(default=False, compare=False)
    streams: str = field(default="", compare=False)

    def __str__(self) -> str:
        text = f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"
        if self.version:
            return f"{text}@{self.version}"
        if self.peer is None:
            return text
        return f"{text}{'>' if self.op in SEND else '<'}{self.peer}{'!' if self.blocking else self.streams}"

    @property
    def is_at_source(self) -> bool:
        """Of a send or receive, whether it happens at the source of its edge."""
        return self.op in (Op.SEND_FORWARD, Op.RECV_BACKWARD)

    @property
    def edge(self) -> tuple[int, int] | None:
        """Source and destination of the edge that a send or receive is of; None: it is neither."""
        if self.peer is None:
            return None
        return (self.stage, self.peer) if self.is_at_source else (self.peer, self.stage)

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that ``text`` spells.

        Raises:
            ValueError: it spells none, or not in the one canonical way.
        """
        match = _ACTION.fullmatch(text)
        if match is not None:
            stage, op, microbatch, peer, mark, version = match.groups()
            action = cls(
                int(stage),
                Op(op),
                int(microbatch) if microbatch else None,
                int(peer) if peer is not None else None,
                int(version or 0),
                mark == "!",
                mark if mark and mark != "!" else "",
            )
            if (
                (action.microbatch is not None or action.op in PER_STEP)
                and (action.peer is not None) == (action.op in MESSAGE)
                and (not action.version or action.op in COMPUTE)
                and str(action) == text
            ):
                return action
        raise ValueError(f"{text!r} is not an action; write 2F0, 1SEND_F3>2, 2RECV_F3<1, 0REDUCE_GRAD or 0UPDATE")


@dataclass(frozen=True, slots=True)
class Edge:
    """Values that stage ``src`` hands to stage ``dst`` for each micro-batch.

    Attributes:
        gradient: whether any of them is differentiable, so that a gradient comes back.
    """

    src: int
    dst: int
    values: tuple[str, ...]
    gradient: bool = True


@dataclass(frozen=True, slots=True)
class StageGraph:
    """The stages of a pipeline as a DAG, and how many micro-batches pass through it.

    Attributes:
        num_microbatches: where they are cut, all parts of all micro-batches.
        prepares: the stages whose hosts prepare inputs of each micro-batch.
        parts: into how many parts every micro-batch is cut along an axis with an order.
    """

    num_stages: int
    num_microbatches: int
    edges: tuple[Edge, ...]
    prepares: tuple[int, ...] = ()
    parts: int = 1

    @classmethod
    def chain(cls, num_stages: int, num_microbatches: int) -> StageGraph:
        """Stages in a row."""
        return cls(num_stages, num_microbatches, tuple(Edge(s, s + 1, ()) for s in range(num_stages - 1)))

    def into(self, stage: int) -> tuple[Edge, ...]:
        """Edges that end at ``stage``."""
        return tuple(edge for edge in self.edges if edge.dst == stage)

    def out_of(self, stage: int) -> tuple[Edge, ...]:
        """Edges that start at ``stage``."""
        return tuple(edge for edge in self.edges if edge.src == stage)

    def edge(self, src: int, dst: int) -> Edge | None:
        """The edge between two stages, if there is one."""
        return next((edge for edge in self.edges if (edge.src, edge.dst) == (src, dst)), None)


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What the actions of a stage last, in any unit: F, I, W; a whole backward lasts I + W."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Pipeline:
    """What a schedule orders: the stages, where they run, and what a schedule may want to know of their costs.

    Attributes:
        positions: by stage, the position that runs it; empty: stage ``s`` runs at position ``s``.
        windows: by stage, the most forwards before the first backward (W_s); empty: the schedule's own choice.
        times: by stage; empty: all alike.
        transfer: what a message between two positions lasts, in the unit of ``times``.
    """

    stages: StageGraph
    positions: tuple[int, ...] = ()
    windows: Windows = ()
    times: tuple[StageTimes, ...] = ()
    transfer: float = 0.0

    @property
    def num_positions(self) -> int:
        """Number of positions."""
        return 1 + max(self.positions) if self.positions else self.stages.num_stages

    def position(self, stage: int) -> int:
        """The position that runs ``stage``."""
        return self.positions[stage] if self.positions else stage


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of compute actions of every pipeline position; position ``i`` runs the stages that name it.

    A position is one rank, or the group of ranks that share its stages.  A row may also say when its stages are
    updated; where it does not, each is at the end of the step.

    Attributes:
        blocking: whether messages hold their ranks while they travel, both ends of each.
        streams: how messages stream, where devices can; empty: they do not.
    """

    rows: tuple[tuple[Action, ...], ...]
    blocking: bool = False
    streams: str = ""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a planner has to know of a schedule; a module may state it as ``TRAITS``.

    Attributes:
        synchronous: all micro-batches of a step see the same weights; else the schedule changes the optimisation.
        trains: False for forward passes alone.
        splits_backward: has I and W in place of B.
        stages_per_position: how many stages a position runs: 1, a fixed number (ZB-V: 2), or 0 for any.
        bidirectional: a position is two ranks, which run its second stage in the other order: what the first of them
            has of a micro-batch on one of its two stages, the second has on the other.
        windowed: heeds ``Pipeline.windows``.
        timed: heeds ``Pipeline.times`` and ``Pipeline.transfer``.
        blocking: messages are not overlapped with compute.
        streams: how messages stream between devices that can (:data:`ALONE`, :data:`IN_PAIRS`); empty: they do not.
        by_default: searched where the user names no schedule: synchronous, and executed exactly as it is priced.
    """

    synchronous: bool = True
    trains: bool = True
    splits_backward: bool = False
    stages_per_position: int = 1
    bidirectional: bool = False
    windowed: bool = False
    timed: bool = False
    blocking: bool = False
    streams: str = ""
    by_default: bool = False

    @property
    def whole_backwards(self) -> bool:
        """Whether backwards are whole, and of the weights that the step began with."""
        return self.synchronous and not self.splits_backward


def dependencies(action: Action, stages: StageGraph) -> tuple[frozenset[Action], ...]:
    """What must end before ``action`` starts: the only statement of this rule.

    Each element is a set of alternatives.  At least one of them must be in the program, and every one that is must have
    ended.  (A backward may be whole, ``B``, or split, ``I`` then ``W``.  An activation arrives by ``RECV_F``, or is
    there because the producing stage ran on the same rank, or partly both.)

    Alternatives of the action's own stage, and compute of a stage on the same rank, are meant on the action's own rank;
    ``SEND`` alternatives of a receive are meant on every rank that sends a piece of it.

    The rule is the same for every micro-batch: those of micro-batch m are those of micro-batch 0 with m in its place,
    and a reduction or update asks the same of each micro-batch that it counts.  Where these are cut it is the same for
    part k of every micro-batch.
    """
    s = action.stage
    m = action.microbatch
    match action.op:
        case Op.FORWARD:
            prepared = [frozenset({Action(s, Op.PREPARE, m)})] if s in stages.prepares else []
            return (
                *prepared,
                *([frozenset({Action(s, Op.FORWARD, m - 1)})] if m is not None and m % stages.parts else []),
                *(
                    frozenset({Action(s, Op.RECV_FORWARD, m, edge.src), Action(edge.src, Op.FORWARD, m)})
                    for edge in stages.into(s)
                ),
            )
        case Op.PREPARE:
            return ()
        case Op.BACKWARD | Op.BACKWARD_INPUT:
            return (
                frozenset({Action(s, Op.FORWARD, m)}),
                *([_backward(s, m + 1)] if m is not None and (m + 1) % stages.parts else []),
                *(
                    frozenset({Action(s, Op.RECV_BACKWARD, m, edge.dst), *_backward(edge.dst, m)})
                    for edge in stages.out_of(s)
                    if edge.gradient
                ),
            )
        case Op.BACKWARD_WEIGHT:
            return (frozenset({Action(s, Op.BACKWARD_INPUT, m)}),)
        case Op.SEND_FORWARD:
            return (frozenset({Action(s, Op.FORWARD, m)}),)
        case Op.SEND_BACKWARD:
            return (_backward(s, m),)
        case Op.RECV_FORWARD:
            return (frozenset({Action(_peer(action), Op.SEND_FORWARD, m, s)}),)
        case Op.RECV_BACKWARD:
            return (frozenset({Action(_peer(action), Op.SEND_BACKWARD, m, s)}),)
        case Op.REDUCE_GRAD:
            return _gradients(s, stages.num_microbatches if m is None else m + 1)
        case Op.UPDATE:
            reduced = frozenset({Action(s, Op.REDUCE_GRAD, m)})
            counted = stages.num_microbatches if m is None else m + 1
            return tuple(reduced | gradient for gradient in _gradients(s, counted))


def _backward(stage: int, microbatch: int | None) -> frozenset[Action]:
    return frozenset({Action(stage, Op.BACKWARD, microbatch), Action(stage, Op.BACKWARD_INPUT, microbatch)})


def _gradients(stage: int, num_microbatches: int) -> tuple[frozenset[Action], ...]:
    return tuple(
        frozenset({Action(stage, Op.BACKWARD, m), Action(stage, Op.BACKWARD_WEIGHT, m)})
        for m in range(num_microbatches)
    )


def _peer(action: Action) -> int:
    if action.peer is None:
        raise ValueError(f"{action.op} needs the other stage")
    return action.peer


def format_grid(rows: Iterable[Iterable[Action]], mark: tuple[int, Action] | None = None, width: int = 0) -> str:
    """Rows as text, one line a rank; ``mark`` = (rank, action) is shown as ``>>2F0<<``.

    Args:
        width: if positive, only that many actions on each side of the mark (or from the start) are shown.
    """
    lines = []
    for rank, row in enumerate(rows):
        actions = list(row)
        centre = actions.index(mark[1]) if mark and mark[0] == rank and mark[1] in actions else 0
        first, last = (max(0, centre - width), centre + width + 1) if width else (0, len(actions))
        shown = [f">>{a}<<" if mark == (rank, a) else str(a) for a in actions[first:last]]
        lines.append(f"rank {rank}: {'... ' if first else ''}{' '.join(shown)}{' ...' if last < len(actions) else ''}")
    return "\n".join(lines)
