"""A program as integers: what the simulator runs.

Made once for a program, or for all programs of the same shape: prices come in afterwards, by slot.  A slot stands for
all actions (or messages) of a program that must cost the same: of one rank, stage, direction and micro-batch size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from planner.ir.cluster import RankIds
from planner.ir.errors import IllegalProgramError
from planner.ir.plan import Size
from planner.ir.program import Program, Route, num_joined, sent_by
from planner.ir.schedule import ADDS_GRADIENTS, COMPUTE, MESSAGE, SEND, Action, Op, format_grid
from planner.passes.numbering import Numbering
from planner.passes.versions import versions_kept

COMPUTE_STEP, SEND_STEP, RECEIVE_STEP, REDUCE_STEP, PREPARE_STEP, PREPARED_STEP, TIED_STEP = range(7)
Step = tuple[int, int, tuple[int, ...]]
"""(what it is, price slot, messages sent or awaited, or the reduction's number, or that of what is prepared); a
``PREPARED_STEP`` is compute that waits for what was prepared, a ``TIED_STEP`` compute that waits until all ranks of the
ties of these numbers have come to theirs."""
Hold = tuple[int, int, int]
"""(position in the row, activation slot, +1 where its memory is taken, -1 where it is given back, else 0); a forward
that nothing follows takes it and gives it back."""

_BACKWARD = (Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ActionSlot:
    """One of the actions that share a price; ``accumulates``: an earlier backward of the stage left gradients."""

    rank: int
    action: Action
    accumulates: bool


@dataclass(frozen=True, slots=True)
class TransferSlot:
    """One of the messages that share a price; ranks are those it moves between, a gradient's from the edge's end.

    ``before``: the slots of what is sent just before to the same rank, with which it may travel
    (:meth:`planner.ir.program.Program.sent_before`).
    """

    route: Route
    forward: bool
    src: int
    dst: int
    before: tuple[int, ...] = ()

    def bytes_ahead(self, num_bytes: int, transfer_bytes: Sequence[int]) -> int | None:
        """Bytes of the message that a transfer of ``num_bytes`` joins; None: it begins one.

        Args:
            transfer_bytes: by transfer slot.
        """
        if not self.before:
            return None
        before = [transfer_bytes[each] for each in self.before]
        count = num_joined([*before, num_bytes])
        return sum(before[-count:]) if count else None


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
        reduced_stages: the stage of each reduction.
        num_prepared: how many inputs of micro-batches are prepared, each on one rank.
        holds: by rank, where memory is taken and given back.
        grid: the program's rows, for error texts.
        blocking: whether messages hold their ranks while they travel: the sender first, then the receiver.
        streams: how they stream between devices that can; empty: they do not.
        trains: by rank, whether it has backwards.
        versions: by stage, how many versions of its weights are in use at once.
        sent_before: by message, those that are sent just before it to the same rank; only of messages that have some.
        ties: groups of ranks that sum gradients of parameters which several stages use, before their first update.
        copies: of each message, itself included, on the same network cards (:mod:`planner.costs.simulator.symmetry`).
        memo: what was worked out from the order of the rows, by whom and of what.
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
    blocking: bool = False
    trains: tuple[bool, ...] = ()
    versions: tuple[int, ...] = ()
    num_prepared: int = 0
    reduced_stages: tuple[int, ...] = ()
    streams: str = ""
    sent_before: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    ties: tuple[RankIds, ...] = ()
    copies: int = 1
    memo: dict[Hashable, object] = field(init=False, default_factory=dict, compare=False, repr=False)


def compile_program(
    program: Program, micro_batches: Sequence[Size], ties: tuple[RankIds, ...] = (), copies: int = 1
) -> CompiledProgram:
    """``program`` as integers.

    Args:
        micro_batches: samples of each, or which part of how many: actions of equal ones cost the same.
        ties: ranks that sum gradients together before their first update (``StageCosts.tied_ranks``).
        copies: as of the result.

    Raises:
        IllegalProgramError: an action requires one that is missing, or that comes later on its own rank.  (That all
            messages block or none is not looked at: if any does, all are taken to.)
    """
    numbering = Numbering(program)
    _require(program, numbering)
    numbers = _Numbers(numbering, tuple(micro_batches), ties)
    rows = tuple(
        tuple(numbers.step(rank, action, number) for action, number in zip(row, numbering.rows[rank], strict=True))
        for rank, row in enumerate(program.rows)
    )
    holds = tuple(tuple(numbers.holds(rank, row)) for rank, row in enumerate(program.rows))
    return CompiledProgram(
        rows,
        tuple(numbers.actions.values),
        tuple(numbers.transfers.values),
        tuple(numbers.activations.values),
        tuple(numbers.messages.values),
        tuple(numbers.channels.values),
        tuple(members for members, _ in numbers.reductions.values),
        holds,
        program.rows,
        program.blocking,
        tuple(any(action.op in _BACKWARD for action in row) for row in program.rows),
        versions_kept(program.rows, program.stages.num_stages),
        len(numbers.prepared.values),
        tuple(stage for _, stage in numbers.reductions.values),
        program.streams,
        numbers.sent_before,
        ties,
        copies,
    )


def _require(program: Program, numbering: Numbering) -> None:
    """Raises unless what every action requires is there, and not later on its own rank."""
    unmet = numbering.unmet(missing=True)
    if unmet is None:
        return
    action = program.rows[unmet.rank][unmet.index]
    needs = " or ".join(sorted(map(str, unmet.needed))) or f"micro-batch {action.microbatch}"
    title = f"{action} on rank {unmet.rank} needs {needs}, which {'comes later' if unmet.late else 'is missing'}"
    raise IllegalProgramError(title, [format_grid(program.rows, (unmet.rank, action), width=4)])


class _Numbered(Generic[T]):
    """Values in the order in which their keys were met; the first value of a key stays."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._index: dict[tuple[object, ...], int] = {}

    def number(self, key: tuple[object, ...], value: T) -> int:
        """The key's place, a new one at the end if it is new."""
        place = self._index.setdefault(key, len(self.values))
        if place == len(self.values):
            self.values.append(value)
        return place


class _Numbers:
    """Numbers for whatever the rows name, given out as they are met; lives while one program is compiled."""

    def __init__(self, numbering: Numbering, micro_batches: tuple[Size, ...], ties: tuple[RankIds, ...]) -> None:
        self.numbering = numbering
        self.micro_batches = micro_batches
        self._ties_left = {rank: tuple(n for n, own in enumerate(ties) if rank in own) for own in ties for rank in own}
        self.actions: _Numbered[ActionSlot] = _Numbered()
        self.transfers: _Numbered[TransferSlot] = _Numbered()
        self.activations: _Numbered[ActivationSlot] = _Numbered()
        self.messages: _Numbered[tuple[int, int]] = _Numbered()
        self.channels: _Numbered[tuple[int, int]] = _Numbered()
        self.reductions: _Numbered[tuple[int, int]] = _Numbered()
        self.prepared: _Numbered[None] = _Numbered()
        self._with_gradients: set[tuple[int, int]] = set()
        self._transfer_of: dict[tuple[object, ...], tuple[int, int]] = {}
        self.sent_before: dict[int, tuple[int, ...]] = {}
        self._legs_before = numbering.program.sent_before()

    def step(self, rank: int, action: Action, number: int) -> Step:
        """The action as a step; to be called in the order of the row.  ``number`` is its own in the numbering."""
        stage = action.stage
        op = action.op
        microbatch = action.microbatch
        if op in MESSAGE:
            slot = self.actions.number((rank, op in SEND), ActionSlot(rank, action, False))
            others = self.numbering.peers(rank, number)
            messages = tuple(self._message(rank, other, action) for other in others)
            return (SEND_STEP if op in SEND else RECEIVE_STEP), slot, messages
        adds = op in ADDS_GRADIENTS
        accumulates = adds and (rank, stage) in self._with_gradients
        if adds:
            self._with_gradients.add((rank, stage))
        elif op is Op.UPDATE:
            self._with_gradients.discard((rank, stage))
        begins = op is Op.PREPARE and microbatch == 0  # what is found before the program counts there
        key = (rank, stage, op, self._size(microbatch), accumulates, begins)
        slot = self.actions.number(key, ActionSlot(rank, action, accumulates))
        if op is Op.REDUCE_GRAD:
            members = sum(bool(self.numbering.rows[member]) for member in self.numbering.program.ranks[stage])
            return REDUCE_STEP, slot, (self.reductions.number((stage, microbatch), (members, stage)),)
        if op is Op.PREPARE:
            return PREPARE_STEP, slot, (self.prepared.number((rank, stage, microbatch), None),)
        if op is Op.FORWARD and stage in self.numbering.program.stages.prepares:
            return PREPARED_STEP, slot, (self.prepared.number((rank, stage, microbatch), None),)
        if op is Op.UPDATE and microbatch is None and rank in self._ties_left:
            return TIED_STEP, slot, self._ties_left.pop(rank)
        return COMPUTE_STEP, slot, ()

    def holds(self, rank: int, row: Sequence[Action]) -> Iterator[Hold]:
        """What the compute actions of a row do to memory."""
        signs = {Op.FORWARD: (1,), Op.BACKWARD_INPUT: (0,)}
        trained = {action.stage for action in row if action.op in ADDS_GRADIENTS}
        for index, action in enumerate(row):
            if action.op in COMPUTE:
                stage = action.stage
                microbatch = action.microbatch or 0
                key = (rank, stage, self.micro_batches[microbatch])
                slot = self.activations.number(key, ActivationSlot(rank, stage, microbatch))
                own_signs = signs.get(action.op, (-1,)) if stage in trained else (1, -1)
                yield from ((index, slot, sign) for sign in own_signs)

    def _message(self, rank: int, other: int, action: Action) -> int:
        """The number of the message that ``action`` sends to, or receives from, the rank ``other``."""
        op = action.op
        peer = action.peer or 0
        microbatch = action.microbatch or 0
        forward = op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        sends = op in SEND
        src, dst = (rank, other) if sends else (other, rank)
        first, last = (action.stage, peer) if sends == forward else (peer, action.stage)
        before: tuple[int, ...] = ()
        if self._legs_before:
            sent = self._legs_before.get((src, action if sends else sent_by(action), dst), ())
            before = tuple(self._message(src, dst, each) for each in sent)
        slots = tuple(self.messages.values[each][0] for each in before)
        alike = (first, last, self.micro_batches[microbatch], forward, src, dst, *slots)
        travels = self._transfer_of.get(alike)
        if travels is None:
            slot = self.transfers.number(alike, TransferSlot((first, last, microbatch), forward, src, dst, slots))
            travels = self._transfer_of[alike] = slot, self.channels.number((src, dst), (src, dst))
        number = self.messages.number((first, last, microbatch, forward, src, dst), travels)
        if before:
            self.sent_before[number] = before
        return number

    def _size(self, microbatch: int | None) -> Size:
        return 0 if microbatch is None else self.micro_batches[microbatch]
