"""A Dataset of which each rank reads the samples that its stages need, and no others.

All ranks know the order of the samples; where the model's sizes vary, they also tell one another the shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count

import torch
from torch import Tensor

from halopipe.agreement import Agreement
from halopipe.datasets import Position, Samples, digest
from halopipe.feeding import Consumer, PartialBatch
from halopipe.needs import Need
from planner.ir.errors import UsageError
from runtime.batch import Batch, Shapes, filled


class SharedFeed:
    """Batches of ``samples`` from ``start`` on; ``epochs`` of them in all, 0: without end.

    Args:
        agreement: of the digests of every sample with the ranks that read it too.
    """

    def __init__(
        self,
        consumer: Consumer,
        samples: Samples,
        start: Position,
        epochs: int = 0,
        agreement: Agreement | None = None,
    ) -> None:
        for name, spec in consumer.inputs.specs.items():
            if not spec.has_samples:
                raise UsageError(
                    f"ranks cannot share a Dataset: {name} has no samples",
                    [f"its dims are {', '.join(spec.dims) or 'none'}"],
                    ["--data-from each", "--data-from first"],
                )
        self._consumer, self._samples = consumer, samples
        self._wanted = _wanted(samples, start, epochs)
        self.position, self.agreement = start, agreement
        samples.require_repeatable(start)

    def take(self) -> Batch | None:
        found = next(self._wanted, None)
        if found is None:
            return None
        epoch, indices = found
        self.position = self.position.after(epoch, len(indices))
        rows = filled(len(indices), self._consumer.decision.micro_batches)
        digests: dict[int, list[int]] = {}
        parts = self._read(epoch, indices, rows, digests)
        if self.agreement is not None:
            self.agreement.note_slots(digests, f" (batch {self.position.batches - 1} of epoch {epoch})")
        return PartialBatch(self._consumer, rows, self._shapes(rows, parts), parts)

    def _read(
        self, epoch: int, indices: Sequence[int], rows: tuple[int, ...], digests: dict[int, list[int]]
    ) -> dict[Need, Tensor]:
        """What this rank needs; stages that have the same samples read them once.

        Args:
            digests: of each sample of the batch that was read, to be filled.
        """
        inputs = self._consumer.inputs
        read: dict[tuple[int, int, int], dict[str, Tensor]] = {}
        parts = {}
        for need in self._consumer.needs(rows):
            if not need.count:
                continue
            place = need.microbatch, need.start, need.count
            if place not in read:
                first = sum(rows[: need.microbatch]) + need.start
                given, targets = self._samples.collated(epoch, indices[first : first + need.count])
                inputs.rows((*given, *targets))  # are they what the model takes?
                read[place] = dict(zip(inputs.specs, (*given, *targets), strict=True))
                for sample in range(need.count):
                    found = (inputs.narrow(each, name, sample, 1) for name, each in read[place].items())
                    digests[first + sample] = [digest(each) for each in found]
            parts[need] = read[place][need.name]
        return parts

    def _shapes(self, rows: tuple[int, ...], parts: Mapping[Need, Tensor]) -> list[Shapes]:
        inputs, transport = self._consumer.inputs, self._consumer.transport
        free = sorted(inputs.free)
        extents = torch.zeros(len(rows), len(free), dtype=torch.int64)
        for need, part in parts.items():
            for place, (name, dim) in enumerate(free):
                if name == need.name:
                    extents[need.microbatch, place] = part.shape[dim]
        if free:
            transport.all_max(extents, self._consumer.ranks, self._consumer.deadline_s)
        shapes: list[Shapes] = []
        for m, samples in enumerate(rows):
            known = {name: list(inputs.shape(name, spec.shape, samples)) for name, spec in inputs.specs.items()}
            for place, (name, dim) in enumerate(free):
                known[name][dim] = int(extents[m, place])
            shapes.append({name: tuple(shape) for name, shape in known.items()})
        for need, part in parts.items():
            expected = inputs.shape(need.name, shapes[need.microbatch][need.name], need.count)
            if tuple(part.shape) != expected:
                raise UsageError(
                    f"samples of one micro-batch have different shapes of {need.name}",
                    [f"here {tuple(part.shape)}, another rank's samples ask for {expected}"],
                    ["pad them in the Dataset", "--data-from each, with a DataLoader that pads"],
                )
        return shapes


def _wanted(samples: Samples, start: Position, epochs: int) -> Iterator[tuple[int, Sequence[int]]]:
    at = start
    for epoch in count(start.epoch):
        if epochs and epoch >= epochs:
            return
        for indices in samples.indices(at):
            yield epoch, indices
        at = Position(epoch + 1)
