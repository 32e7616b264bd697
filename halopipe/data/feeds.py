"""How a rank comes by its batches: it reads the data itself, or rank 0 reads and sends everyone its part.

Rank 0 sends the shapes of a batch to every rank, and rows of inputs to those whose stages read them.  How ranks share
a Dataset is told in :mod:`halopipe.data.sharded_feed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor

from cuda_ops.sparse.preparation import Preparation
from halopipe.data.agreement import Agreement
from halopipe.data.batches import bound, read, tensors_of
from halopipe.data.rank_slices import Need, needs, whole_needs
from halopipe.data.sources import Data, Position
from planner.ir.errors import TransportError
from planner.ir.graph import Graph, TensorSpec
from planner.ir.plan import Decision
from runtime.pipeline.messages import dtype_of
from runtime.pipeline.microbatches import Batch, InputSpecs, Shapes
from runtime.pipeline.sample_weights import inputs_counted
from runtime.stage.captured import CapturedModel
from runtime.stage.shapes import varying_dims
from runtime.transport import Key, Transport

_HEADER, _PARTS = MESSAGE_KINDS = "H", "D"
"""Kinds of messages; between hosts, wherever stages compute."""

_PLACE = 4
"""Numbers of a header before those of the micro-batches: whether there is a batch, and the position after it."""


class Feed(Protocol):
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


@dataclass(frozen=True, slots=True)
class Consumer:
    """Who is fed.

    Attributes:
        inputs: what a step is given.
        preparation: makes the graph's inputs of them, on every rank; None: they are the graph's inputs.
        counted: by stage, inputs of which each rank reads its samples to know what parts of a batch count for.
        turns: numbers the batches of all feeds of this rank; the same on all ranks.
    """

    decision: Decision
    graph: Graph
    inputs: InputSpecs
    transport: Transport
    turns: Iterator[int]
    deadline_s: float
    preparation: Preparation | None = None
    counted: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of the job."""
        return tuple(range(self.transport.world_size))

    def needs(self, rows: tuple[int, ...], rank: int | None = None) -> tuple[Need, ...]:
        """What a rank, by default this one, reads of micro-batches of ``rows``."""
        if self.preparation is not None:
            return whole_needs(self.inputs.specs, rows)
        return needs(self.decision, self.graph, self.transport.rank if rank is None else rank, rows, self.counted)

    @property
    def per_site(self) -> tuple[bool, ...]:
        """Of each target of a sparse network, whether it has a value a point."""
        return () if self.preparation is None else self.preparation.per_site

    def dtype(self, name: str) -> torch.dtype:
        """Of an input."""
        return dtype_of(self.inputs.specs[name])

    def nothing(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An input of micro-batches of ``shape``, without samples."""
        return torch.empty(self.inputs.shape(name, shape, 0), dtype=self.dtype(name))


def agreement_of(consumer: Consumer, step: int, **options: Any) -> Agreement:
    """Whether the ranks of ``consumer`` are fed the same, from ``step`` on."""
    return Agreement(consumer.transport, tuple(consumer.inputs.specs), consumer.deadline_s, step, **options)


def consumer_of(decision: Decision, model: CapturedModel, transport: Transport, deadline_s: float) -> Consumer:
    """The consumer of this rank of ``transport``."""
    inputs = InputSpecs(model.fed, model.graph.samples, varying_dims(model))
    preparation = None if model.prepared is None else model.prepared.preparation
    counted = inputs_counted(model, decision)
    return Consumer(decision, model.graph, inputs, transport, count(), deadline_s, preparation, counted)


class OwnFeed:
    """This rank reads all of the data.

    Args:
        epochs: to read; 0: as many as there are.
        agreement: with the others that read it; None: there are none.
    """

    def __init__(
        self,
        consumer: Consumer,
        data: Data,
        start: Position,
        epochs: int = 0,
        agreement: Agreement | None = None,
    ) -> None:
        self._consumer, self._items = consumer, read(data, start, epochs)
        self.position, self.agreement = start, agreement

    def take(self) -> Batch | None:
        found = next(self._items, None)
        if found is None:
            if self.agreement is not None:
                self.agreement.note(None)
            return None
        epoch, item = found
        batch = bound(item, self._consumer.inputs, self._consumer.decision.micro_batches)
        self.position = self.position.after(epoch, sum(batch.rows))
        if self.agreement is not None:
            self.agreement.note(tensors_of(item), f" (batch {self.position.batches - 1} of epoch {epoch})")
        return batch


class SentFeed:
    """Rank 0 reads and sends; the others receive.

    Args:
        own: what rank 0 reads; None on the others.
    """

    def __init__(self, consumer: Consumer, own: OwnFeed | None, start: Position) -> None:
        self._consumer, self._own = consumer, own
        self.position, self.agreement = start, None

    def take(self) -> Batch | None:
        turn = next(self._consumer.turns)
        if self._own is None:
            return self._receive(turn)
        batch = self._own.take()
        self.position = self._own.position
        header = self._header(batch)
        for rank in self._consumer.ranks[1:]:
            self._consumer.transport.send(_key(turn, _HEADER), rank, (header,))
            if batch is not None:
                self._send(turn, rank, batch)
        return batch

    def _send(self, turn: int, rank: int, batch: Batch) -> None:
        wanted = [need for need in self._consumer.needs(batch.rows, rank) if need.count]
        parts = [
            batch.part(need.name, need.microbatch, need.start, need.count)
            .to(self._consumer.dtype(need.name))
            .contiguous()
            for need in wanted
        ]
        if parts:
            self._consumer.transport.send(_key(turn, _PARTS), rank, parts)

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
        consumer, transport = self._consumer, self._consumer.transport
        size = self._header_size()
        transport.post_receive(_key(turn, _HEADER), 0, [((size,), torch.int64)])
        (header,) = transport.receive(_key(turn, _HEADER), 0, consumer.deadline_s)
        there, *place = header[:_PLACE].tolist()
        if not there:
            return None
        self.position = Position(*place)
        rows, shapes = self._shapes(header[_PLACE:].tolist())
        wanted = [need for need in consumer.needs(rows) if need.count]
        parts: tuple[Tensor, ...] = ()
        if wanted:
            specs = [
                (
                    consumer.inputs.shape(need.name, shapes[need.microbatch][need.name], need.count),
                    consumer.dtype(need.name),
                )
                for need in wanted
            ]
            transport.post_receive(_key(turn, _PARTS), 0, specs)
            parts = transport.receive(_key(turn, _PARTS), 0, consumer.deadline_s)
        return PartialBatch(consumer, rows, shapes, dict(zip(wanted, parts, strict=True)))

    def _shapes(self, numbers: list[int]) -> tuple[tuple[int, ...], list[Shapes]]:
        rows, shapes, left = [], [], iter(numbers)
        for _ in self._consumer.decision.micro_batches:
            rows.append(next(left))
            shapes.append({name: tuple(next(left) for _ in spec.shape) for name, spec in self._specs.items()})
        return tuple(rows), shapes

    def _header_size(self) -> int:
        each = 1 + sum(len(spec.shape) for spec in self._specs.values())
        return _PLACE + each * len(self._consumer.decision.micro_batches)

    @property
    def _specs(self) -> Mapping[str, TensorSpec]:
        return self._consumer.inputs.specs


class PartialBatch:
    """The rows and inputs that this rank reads, and no others.

    Args:
        shapes: by micro-batch, of all inputs.
        parts: what was read.
    """

    def __init__(
        self, consumer: Consumer, rows: tuple[int, ...], shapes: list[Shapes], parts: Mapping[Need, Tensor]
    ) -> None:
        self.rows = rows
        self._consumer, self._shapes, self._parts = consumer, shapes, parts

    def shapes(self, microbatch: int) -> Shapes:
        return self._shapes[microbatch]

    def part(self, name: str, microbatch: int, start: int, count: int) -> Tensor:
        if not count:
            return self._consumer.nothing(name, self._shapes[microbatch][name])
        found = self._parts.get(Need(name, microbatch, start, count))
        if found is None:
            rank = self._consumer.transport.rank
            raise TransportError(
                f"rank {rank} has no samples {start} to {start + count} of {name}, micro-batch {microbatch}",
                ["its stages should not read them"],
                ["--data-from each"],
            )
        return found


def _key(turn: int, kind: str) -> Key:
    return Key(turn, kind, 0, 0, 0)
