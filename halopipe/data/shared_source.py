"""A Dataset of which each rank reads the samples that its stages need, and no others.

All ranks know the order of the samples; where the model's sizes vary, they also tell one another the shapes.

The sources of one rank's batches, of the data that a run names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count

import torch
from torch import Tensor

from halopipe.data.batch_sources import (
    Agreement,
    BatchSource,
    OwnSource,
    PartialBatch,
    SentSource,
    agreement_of,
    needs_of,
)
from halopipe.data.rank_slices import Need
from halopipe.data.sources import Data, Position, Samples, digest, open_data, samples_of_epoch
from halopipe.run_spec.options import EACH, FIRST, SHARE, RunOptions
from planner.ir.errors import UsageError
from planner.layers import require_several_values
from planner.passes.versions import partial_batch_refused, updates_within
from profiler.source.model import LoadedModel
from runtime.pipeline.microbatches import Batch, InputShapes, filled
from runtime.rank import RankContext


class SharedSource:
    """Batches of ``samples`` from ``start`` on; ``epochs`` of them in all, 0: without end.

    Args:
        agreement: of the digests of every sample with the ranks that read it too.
    """

    def __init__(
        self,
        context: RankContext,
        samples: Samples,
        start: Position,
        epochs: int = 0,
        agreement: Agreement | None = None,
    ) -> None:
        for name, spec in context.inputs.specs.items():
            if not spec.has_samples:
                raise UsageError(
                    f"ranks cannot share a Dataset: {name} has no samples",
                    [f"its dims are {', '.join(spec.dims) or 'none'}"],
                    ["--data FACTORY --data-from each: a factory of whole batches, which need no Dataset"],
                )
        self._context = context
        self._samples = samples
        self._wanted = _wanted(samples, start, epochs)
        self.position = start
        self.agreement = agreement
        samples.require_repeatable(start)

    def take(self) -> Batch | None:
        upcoming = next(self._wanted, None)
        if upcoming is None:
            return None
        epoch, indices = upcoming
        self.position = self.position.after(epoch, len(indices))
        rows = filled(len(indices), self._context.decision.micro_batches)
        digests: dict[int, list[int]] = {}
        parts = self._read(epoch, indices, rows, digests)
        if self.agreement is not None:
            self.agreement.note_slots(digests, f" (batch {self.position.batches - 1} of epoch {epoch})")
        return PartialBatch(self._context, rows, self._shapes(rows, parts), parts)

    def _read(
        self, epoch: int, indices: Sequence[int], rows: tuple[int, ...], digests: dict[int, list[int]]
    ) -> dict[Need, Tensor]:
        """What this rank needs; stages that have the same samples read them once.

        Args:
            digests: of each sample of the batch that was read, to be filled.
        """
        inputs = self._context.inputs
        read: dict[tuple[int, int, int], dict[str, Tensor]] = {}
        parts = {}
        for need in needs_of(self._context, rows):
            if not need.count:
                continue
            place = need.microbatch, need.start, need.count
            if place not in read:
                first = sum(rows[: need.microbatch]) + need.start
                model_inputs, targets = self._samples.collated(epoch, indices[first : first + need.count])
                inputs.rows((*model_inputs, *targets))  # are they what the model takes?
                read[place] = dict(zip(inputs.specs, (*model_inputs, *targets), strict=True))
                for sample in range(need.count):
                    slices = (inputs.narrow(each, name, sample, 1) for name, each in read[place].items())
                    digests[first + sample] = [digest(each) for each in slices]
            parts[need] = read[place][need.name]
        return parts

    def _shapes(self, rows: tuple[int, ...], parts: Mapping[Need, Tensor]) -> list[InputShapes]:
        inputs = self._context.inputs
        transport = self._context.transport
        free = sorted(inputs.free)
        extents = torch.zeros(len(rows), len(free), dtype=torch.int64)
        for need, part in parts.items():
            for place, (name, dim) in enumerate(free):
                if name == need.name:
                    extents[need.microbatch, place] = part.shape[dim]
        if free:
            transport.all_max(extents, self._context.ranks)
        shapes: list[InputShapes] = []
        for m, samples in enumerate(rows):
            extents_of = {name: list(inputs.shape(name, spec.shape, samples)) for name, spec in inputs.specs.items()}
            for place, (name, dim) in enumerate(free):
                extents_of[name][dim] = int(extents[m, place])
            shapes.append({name: tuple(shape) for name, shape in extents_of.items()})
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


class DataSources:
    """Opens the data once, on the ranks that read it.

    Args:
        seed: of the order of samples, and of what the data draws.

    Attributes:
        origin: what data it is, and how it was asked for; empty on ranks that do not read it.

    Raises:
        ModelNotFoundError, FactoryError: a factory is not there, or fails.
        UsageError: the ranks are to share something else than a Dataset.
    """

    def __init__(self, context: RankContext, options: RunOptions, model: LoadedModel, seed: int) -> None:
        self._context = context
        self._way = options.data_from
        self._reads = options.data_from != FIRST or context.transport.rank == 0
        self._training = self._opened(options.data, model, seed, shuffled=True)
        self._evaluation = self._opened(options.eval_data, model, seed, shuffled=False) if options.eval_data else None
        self._require_last(options)
        self.origin = "" if self._training is None else self._training.origin

    def training(self, start: Position, step: int = 0) -> BatchSource:
        """Batches to train on from ``start`` on, epoch after epoch, the first for ``step``.

        Raises:
            DifferentDataError: they cannot be read again as they were.
        """
        if start != Position() and isinstance(self._training, Samples):
            self._training.require_repeatable(start)
        return self._source(self._training, start, 0, step)

    def evaluation(self) -> BatchSource:
        """Batches to evaluate on, one epoch."""
        return self._source(self._evaluation, Position(), 1, 0)

    def _require_last(self, options: RunOptions) -> None:
        """Raises :class:`UsageError` where an epoch's smaller last batch would end the job in the middle."""
        decision = self._context.decision
        samples = samples_of_epoch(self._training)
        batch = decision.global_batch
        fits = samples - samples % batch
        last = samples % batch
        if not last or options.steps <= samples // batch or not decision.trains:
            return
        length = f"the data have {samples} samples: {last} of {batch} in an epoch's last batch"
        remedies = [
            f"leave the last {last} out: torch.utils.data.Subset(dataset, range({fits}))",
            "DataLoader(..., drop_last=True)",
            f"halopipe plan --global-batch of another number than {batch}",
        ]
        try:
            require_several_values(self._context.graph, filled(last, decision.micro_batches), remedies)
        except UsageError as error:
            error.details = (*error.details, length)
            raise
        if updates_within(decision.rows()):
            raise partial_batch_refused(decision.schedule, [length], remedies)

    def _opened(self, name: str, model: LoadedModel, seed: int, *, shuffled: bool) -> Data | None:
        if not self._reads:
            return None
        data = open_data(name, model, self._context.decision.global_batch, seed, shuffled=shuffled)
        if self._way == SHARE and not isinstance(data, Samples):
            raise UsageError(
                f"ranks cannot share what {name} gives",
                ["it is no map-style torch.utils.data.Dataset, whose samples can be read one by one"],
                [f"--data-from {EACH}", f"--data-from {FIRST}"],
            )
        return data

    def _source(self, data: Data | None, start: Position, epochs: int, step: int) -> BatchSource:
        context = self._context
        if self._way == SHARE and isinstance(data, Samples):
            slots = context.decision.global_batch
            return SharedSource(
                context, data, start, epochs, agreement_of(context, step, slots=slots, always=epochs > 0)
            )
        if data is None or self._way == FIRST:
            own = OwnSource(context, data, start, epochs) if data is not None else None
            return SentSource(context, own, start)
        return OwnSource(context, data, start, epochs, agreement_of(context, step, always=epochs > 0))
