"""How a rank comes by its batches: it reads the data itself, or rank 0 reads and sends everyone its part.

Rank 0 sends the shapes of a batch to every rank, and rows of inputs to those whose stages read them.  How ranks share
a Dataset is told in :mod:`halopipe.data.shared_source`.

Whether the ranks read the same data: they compare digests of what each of them read of a batch.

A rank notes 32 bits for each tensor of a batch (zlib's CRC, some GB/s), or of each sample where ranks share a Dataset.
What was noted is exchanged before each of the first steps, then at growing intervals, and before a checkpoint is
written; every batch since the last exchange is compared, so that none is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from halopipe.data.rank_slices import Need, needs, whole_needs
from halopipe.data.sources import Data, Position, bound, digest, read, tensors_of
from planner.ir.errors import DifferentDataError, TransportError
from planner.ir.graph import TensorSpec
from runtime.pipeline.microbatches import Batch, InputShapes
from runtime.pipeline.routing import dtype_of
from runtime.rank import RankContext
from runtime.transport import MessageKey, Transport

FIRST = 8
"""Batches that are compared before they are used."""
_MOST = 64
"""Batches between two exchanges, at the most."""

COMPARING = "comparing batches with the others"

UNREAD = -1
ENDED = -2
"""In place of a digest: not read by this rank; there was no batch."""

_REMEDIES = (
    "--data-from first: one rank reads for all",
    "draw from torch, numpy or random themselves, which are seeded; seed other generators with the factory's argument",
    "no DistributedSampler, nor any other choice by rank: batches are global, halopipe shares them out",
    "--data-from share, for a map-style Dataset whose samples follow from their numbers",
)

_SCRIPT_REMEDIES = (
    "give every rank the same global batch: seed the data in the same way on all of them",
    "no DistributedSampler, nor any other choice by rank: batches are global, halopipe shares them out",
    "read on rank 0 and broadcast",
)


@dataclass(slots=True)
class Agreement:
    """Compares what the ranks of a job read, batch after batch; all of them call the same.

    Attributes:
        names: of the tensors of a batch.
        step: of the first batch, as errors name it.
        slots: of a batch whose digests are compared by themselves: 1, or its samples.
        always: each batch is compared before it is used, not only the first ones.
        is_script: the batches are given by a script, not read from ``--data``.
        noted: batches so far.
    """

    transport: Transport
    names: tuple[str, ...]
    step: int = 0
    slots: int = 1
    always: bool = False
    is_script: bool = False
    noted: int = 0
    _waiting: list[tuple[str, Tensor]] = field(default_factory=list)

    def note(self, tensors: Sequence[Sequence[Tensor]] | None, where: str = "") -> None:
        """A batch that this rank read whole: of each name its tensors, one a micro-batch; None: the data ended.

        Raises:
            DifferentDataError: ranks have read other ones.
        """
        if self.transport.world_size == 1 or (tensors is None and not (self.always or self._is_due)):
            return  # where the data ended between two exchanges, that is this rank's own error
        row = [ENDED] * len(self.names) if tensors is None else [_joined(each) for each in tensors]
        self.note_slots({0: row}, where)

    def note_slots(self, digests: Mapping[int, Sequence[int]], where: str = "") -> None:
        """The same of a batch of which this rank read some samples."""
        if self.transport.world_size == 1:
            return
        table = torch.full((self.slots, len(self.names)), UNREAD, dtype=torch.int64)
        for slot, row in digests.items():
            table[slot] = torch.tensor(row, dtype=torch.int64)
        self._waiting.append((f"step {self.step + self.noted}{where}", table))
        is_due = self.always or self._is_due
        self.noted = self.noted + 1
        if is_due:
            self.confirm()

    @property
    def _is_due(self) -> bool:
        number = self.noted + 1
        return number <= FIRST or number % _MOST == 0 or (number < _MOST and not number & (number - 1))

    def confirm(self) -> None:
        """Compares what was not yet compared.

        Raises:
            DifferentDataError: ranks have read other ones.
        """
        if not self._waiting:
            return
        labels, tables = zip(*self._waiting, strict=True)
        self._waiting = []
        mine = torch.stack(tables).flatten()
        size = self.transport.world_size
        everybody = torch.zeros(size, mine.numel(), dtype=torch.int64)
        everybody[self.transport.rank] = mine
        flat = everybody.flatten()
        self.transport.all_gather(flat, [mine.numel()] * size, tuple(range(size)))
        digests = flat.view(size, len(labels), self.slots, len(self.names))
        read = digests != UNREAD
        highest = digests.masked_fill(~read, ENDED - 1).amax(0)
        lowest = digests.masked_fill(~read, 2**40).amin(0)
        differs = (highest != lowest) & read.any(0)
        if differs.any():
            batch, slot, _ = differs.nonzero()[0].tolist()
            raise self._error(labels[batch], slot, digests[:, batch, slot], differs[batch, slot].tolist())

    def _error(self, where: str, slot: int, digests: Tensor, differs: list[bool]) -> DifferentDataError:
        sample = f", sample {slot} of the batch" if self.slots > 1 else ""
        wrong = [name for name, is_wrong in zip(self.names, differs, strict=True) if is_wrong]
        details = [
            f"{where}{sample}, {name}: {_digests_text(digests[:, place].tolist())}"
            for place, (name, is_wrong) in enumerate(zip(self.names, differs, strict=True))
            if is_wrong
        ]
        title = f"ranks read different data at {where.split(' (')[0]}: {', '.join(wrong)}"
        return DifferentDataError(title, details, _SCRIPT_REMEDIES if self.is_script else _REMEDIES)


def _joined(tensors: Sequence[Tensor]) -> int:
    """One digest of a tensor, or of those of several micro-batches."""
    digests = [digest(tensor) for tensor in tensors]
    return digests[0] if len(digests) == 1 else digest(torch.tensor(digests))


def _digests_text(digests: Sequence[int]) -> str:
    """``ranks 0, 2 read 5f3a12bc, rank 1 read 99ab0c1d``."""
    ranks: dict[int, list[int]] = {}
    for rank, value in enumerate(digests):
        if value != UNREAD:
            ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))} "
        + ("had no batch any more" if value == ENDED else f"read {value:08x}")
        for value, who in ranks.items()
    )


_HEADER, _PARTS = MESSAGE_KINDS = "H", "D"
"""Kinds of messages; between hosts, wherever stages compute."""

_PLACE = 4
"""Numbers of a header before those of the micro-batches: whether there is a batch, and the position after it."""


class BatchSource(Protocol):
    """Batches of one rank, in order.

    Attributes:
        position: after the last batch taken.
        agreement: that the ranks read the same; None where one reads for all.
    """

    position: Position
    agreement: Agreement | None

    def take(self) -> Batch | None:
        """The next batch, on all ranks the same; None where the data has ended."""
        ...


def needs_of(context: RankContext, rows: tuple[int, ...], rank: int | None = None) -> tuple[Need, ...]:
    """What a rank, by default this one, reads of micro-batches of ``rows``."""
    if context.preparation is not None:
        return whole_needs(context.inputs.specs, rows)
    own = context.rank if rank is None else rank
    watched = context.watched, context.judged_inputs
    return needs(context.decision, context.graph, own, rows, context.counted, watched)


def agreement_of(context: RankContext, step: int, **options: Any) -> Agreement:
    """Whether all ranks are fed the same, from ``step`` on."""
    return Agreement(context.transport, tuple(context.inputs.specs), step, **options)


class OwnSource:
    """This rank reads all of the data.

    Args:
        epochs: to read; 0: as many as there are.
        agreement: with the others that read it; None: there are none.
    """

    def __init__(
        self,
        context: RankContext,
        data: Data,
        start: Position,
        epochs: int = 0,
        agreement: Agreement | None = None,
    ) -> None:
        self._context = context
        self._items = read(data, start, epochs)
        self.position = start
        self.agreement = agreement

    def take(self) -> Batch | None:
        upcoming = next(self._items, None)
        if upcoming is None:
            if self.agreement is not None:
                self.agreement.note(None)
            return None
        epoch, item = upcoming
        context = self._context
        is_prepared = context.preparation is not None
        batch = bound(item, context.inputs, context.decision.micro_batches, is_prepared=is_prepared)
        self.position = self.position.after(epoch, sum(batch.rows))
        if self.agreement is not None:
            self.agreement.note(tensors_of(item), f" (batch {self.position.batches - 1} of epoch {epoch})")
        return batch


class SentSource:
    """Rank 0 reads and sends; the others receive.

    Args:
        own: what rank 0 reads; None on the others.
    """

    def __init__(self, context: RankContext, own: OwnSource | None, start: Position) -> None:
        self._context = context
        self._own = own
        self.position = start
        self.agreement: Agreement | None = None

    def take(self) -> Batch | None:
        turn = next(self._context.turns)
        if self._own is None:
            return self._receive(turn)
        batch = self._own.take()
        self.position = self._own.position
        header = self._header(batch)
        for rank in self._context.ranks[1:]:
            self._context.transport.send(_key(turn, _HEADER), rank, (header,))
            if batch is not None:
                self._send(turn, rank, batch)
        return batch

    def _send(self, turn: int, rank: int, batch: Batch) -> None:
        wanted = [need for need in needs_of(self._context, batch.rows, rank) if need.count]
        parts = [
            batch.part(need.name, need.microbatch, need.start, need.count)
            .to(dtype_of(self._specs[need.name]))
            .contiguous()
            for need in wanted
        ]
        if parts:
            self._context.transport.send(_key(turn, _PARTS), rank, parts)

    def _header(self, batch: Batch | None) -> Tensor:
        header = torch.zeros(self._header_size(), dtype=torch.int64)
        if batch is not None:
            numbers = [1, self.position.epoch, self.position.batches, self.position.samples]
            for m, rows in enumerate(batch.rows):
                shapes = batch.shapes(m) if rows else {n: (0,) * len(s.shape) for n, s in self._specs.items()}
                numbers += [rows, *(extent for name in self._specs for extent in shapes[name])]
            header.copy_(torch.tensor(numbers))
        return header

    def _receive(self, turn: int) -> Batch | None:
        context = self._context
        transport = self._context.transport
        size = self._header_size()
        transport.post_receive(_key(turn, _HEADER), 0, [((size,), torch.int64)])
        (header,) = transport.receive(_key(turn, _HEADER), 0)
        there, *place = header[:_PLACE].tolist()
        if not there:
            return None
        self.position = Position(*place)
        rows, shapes = self._shapes(header[_PLACE:].tolist())
        wanted = [need for need in needs_of(context, rows) if need.count]
        parts: tuple[Tensor, ...] = ()
        if wanted:
            specs = [
                (
                    context.inputs.shape(need.name, shapes[need.microbatch][need.name], need.count),
                    dtype_of(self._specs[need.name]),
                )
                for need in wanted
            ]
            transport.post_receive(_key(turn, _PARTS), 0, specs)
            parts = transport.receive(_key(turn, _PARTS), 0)
        return PartialBatch(context, rows, shapes, dict(zip(wanted, parts, strict=True)))

    def _shapes(self, numbers: list[int]) -> tuple[tuple[int, ...], list[InputShapes]]:
        rows: list[int] = []
        shapes: list[InputShapes] = []
        left = iter(numbers)
        for _ in self._context.decision.micro_batches:
            rows.append(next(left))
            shapes.append({name: tuple(next(left) for _ in spec.shape) for name, spec in self._specs.items()})
        return tuple(rows), shapes

    def _header_size(self) -> int:
        each = 1 + sum(len(spec.shape) for spec in self._specs.values())
        return _PLACE + each * len(self._context.decision.micro_batches)

    @property
    def _specs(self) -> Mapping[str, TensorSpec]:
        return self._context.inputs.specs


class PartialBatch:
    """The rows and inputs that this rank reads, and no others.

    Args:
        shapes: by micro-batch, of all inputs.
        parts: what was read.
    """

    def __init__(
        self, context: RankContext, rows: tuple[int, ...], shapes: list[InputShapes], parts: Mapping[Need, Tensor]
    ) -> None:
        self.rows = rows
        self._context = context
        self._shapes = shapes
        self._parts = parts

    def shapes(self, microbatch: int) -> InputShapes:
        return self._shapes[microbatch]

    def part(self, name: str, microbatch: int, start: int, count: int) -> Tensor:
        if not count:
            inputs = self._context.inputs
            shape = inputs.shape(name, self._shapes[microbatch][name], 0)
            return torch.empty(shape, dtype=dtype_of(inputs.specs[name]))
        samples = self._parts.get(Need(name, microbatch, start, count))
        if samples is None:
            rank = self._context.transport.rank
            raise TransportError(
                f"rank {rank} has no samples {start} to {start + count} of {name}, micro-batch {microbatch}",
                ["its stages should not read them"],
            )
        return samples


def _key(turn: int, kind: str) -> MessageKey:
    return MessageKey(turn, kind, 0, 0, 0)
