"""A program as integers: what the simulator runs.

Made once for a program, or for all programs of the same shape: prices come in afterwards, by slot.  A slot stands for
all actions (or messages) of a program that must cost the same: of one rank, stage, direction and micro-batch size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from planner.ir.errors import IllegalProgramError
from planner.ir.program import Message, Program, Route
from planner.ir.schedule import COMPUTE, RECEIVE, SEND, Action, Op, format_grid

COMPUTE_STEP, SEND_STEP, RECEIVE_STEP, REDUCE_STEP = range(4)
Step = tuple[int, int, tuple[int, ...]]
"""(what it is, price slot, messages sent or awaited, or the reduction's number)."""
Hold = tuple[int, int, int]
"""(position in the row, activation slot, +1 where its memory is taken, -1 where it is given back, else 0)."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ActionSlot:
    """One of the actions that share a price; ``accumulates``: an earlier backward of the stage left gradients."""

    rank: int
    action: Action
    accumulates: bool


@dataclass(frozen=True, slots=True)
class TransferSlot:
    """One of the messages that share a price; ranks are those it moves between, a gradient's from the edge's end."""

    route: Route
    forward: bool
    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class ActivationSlot:
    """What a stage keeps on a rank for micro-batches of one size."""

    rank: int
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """The rows as steps, and what the numbers in them mean.

    Attributes:
        rows: steps by rank.
        actions, transfers, activations: what each slot stands for.
        messages: (transfer slot, channel) of each message.
        channels: (src, dst) of each channel; messages of a channel travel one after another.
        reductions: number of ranks of each reduction.
        holds: by rank, where memory is taken and given back.
        grid: the program's rows, for error texts.
    """

    rows: tuple[tuple[Step, ...], ...]
    actions: tuple[ActionSlot, ...]
    transfers: tuple[TransferSlot, ...]
    activations: tuple[ActivationSlot, ...]
    messages: tuple[tuple[int, int], ...]
    channels: tuple[tuple[int, int], ...]
    reductions: tuple[int, ...]
    holds: tuple[tuple[Hold, ...], ...]
    grid: tuple[tuple[Action, ...], ...] = field(repr=False)


def compile_program(program: Program, micro_batches: Sequence[int]) -> CompiledProgram:
    """``program`` as integers.

    Raises:
        IllegalProgramError: an action requires one that is missing, or that comes later on its own rank.
    """
    position = {(rank, action): index for rank, row in enumerate(program.rows) for index, action in enumerate(row)}
    for rank, action in position:
        _require(program, position, rank, action)
    numbers = _Numbers(program, tuple(micro_batches))
    rows = tuple(tuple(numbers.step(rank, action) for action in row) for rank, row in enumerate(program.rows))
    holds = tuple(
        tuple(numbers.hold(rank, index, action) for index, action in enumerate(row) if action.op in COMPUTE)
        for rank, row in enumerate(program.rows)
    )
    return CompiledProgram(
        rows,
        tuple(numbers.actions.values),
        tuple(numbers.transfers.values),
        tuple(numbers.activations.values),
        tuple(numbers.messages.values),
        tuple(numbers.channels.values),
        tuple(numbers.reductions.values),
        holds,
        program.rows,
    )


def _require(program: Program, position: Mapping[tuple[int, Action], int], rank: int, action: Action) -> None:
    """Raises unless what ``action`` requires is there, and not later on its own rank."""
    for alternatives in program.requirements(rank, action):
        found = [(other, needed) for other, needed in alternatives if (other, needed) in position]
        late = [needed for other, needed in found if other == rank and position[rank, needed] > position[rank, action]]
        if late or not found:
            needs = late[0] if late else " or ".join(str(needed) for _, needed in alternatives)
            title = f"{action} on rank {rank} needs {needs}, which {'comes later' if late else 'is missing'}"
            raise IllegalProgramError(title, [format_grid(program.rows, (rank, action), width=4)])


class _Numbered(Generic[T]):
    """Values in the order in which their keys were met; the first value of a key stays."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._index: dict[tuple[object, ...], int] = {}

    def number(self, key: tuple[object, ...], value: T) -> int:
        """The key's place, a new one at the end if it is new."""
        found = self._index.setdefault(key, len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found


class _Numbers:
    """Numbers for whatever the rows name, given out as they are met; lives while one program is compiled."""

    def __init__(self, program: Program, micro_batches: tuple[int, ...]) -> None:
        self.program = program
        self.micro_batches = micro_batches
        self.actions: _Numbered[ActionSlot] = _Numbered()
        self.transfers: _Numbered[TransferSlot] = _Numbered()
        self.activations: _Numbered[ActivationSlot] = _Numbered()
        self.messages: _Numbered[tuple[int, int]] = _Numbered()
        self.channels: _Numbered[tuple[int, int]] = _Numbered()
        self.reductions: _Numbered[int] = _Numbered()
        self._with_gradients: set[tuple[int, int]] = set()

    def step(self, rank: int, action: Action) -> Step:
        """The action as a step; to be called in the order of the row."""
        adds = action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)
        accumulates = adds and (rank, action.stage) in self._with_gradients
        if adds:
            self._with_gradients.add((rank, action.stage))
        if action.op in SEND | RECEIVE:
            slot = self.actions.number((rank,), ActionSlot(rank, action, False))
            numbers = tuple(self._message(action, message) for message in self.program.messages_of(rank, action))
            return (SEND_STEP if action.op in SEND else RECEIVE_STEP), slot, numbers
        slot = self.actions.number(
            (rank, action.stage, action.op, self._size(action.microbatch), accumulates),
            ActionSlot(rank, action, accumulates),
        )
        if action.op is Op.REDUCE_GRAD:
            return REDUCE_STEP, slot, (self.reductions.number((action.stage,), len(self.program.ranks[action.stage])),)
        return COMPUTE_STEP, slot, ()

    def hold(self, rank: int, index: int, action: Action) -> Hold:
        """What a compute action does to memory."""
        microbatch = action.microbatch or 0
        key = (rank, action.stage, self.micro_batches[microbatch])
        sign = {Op.FORWARD: 1, Op.BACKWARD_INPUT: 0}.get(action.op, -1)
        return index, self.activations.number(key, ActivationSlot(rank, action.stage, microbatch)), sign

    def _message(self, action: Action, message: Message) -> int:
        """The number of the message that ``action`` sends or receives."""
        forward = action.op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        src, dst = (message.src, message.dst) if forward else (message.dst, message.src)
        starts_at_stage = (action.op in SEND) == forward
        peer, microbatch = action.peer or 0, action.microbatch or 0
        first, last = (action.stage, peer) if starts_at_stage else (peer, action.stage)
        alike = (first, last, self._size(microbatch), forward, src, dst)
        slot = self.transfers.number(alike, TransferSlot((first, last, microbatch), forward, src, dst))
        channel = self.channels.number((src, dst), (src, dst))
        return self.messages.number((first, last, microbatch, forward, src, dst), (slot, channel))

    def _size(self, microbatch: int | None) -> int:
        return 0 if microbatch is None else self.micro_batches[microbatch]
