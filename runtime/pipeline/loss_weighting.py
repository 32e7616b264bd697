"""Loss weights: the factors of a rank's stages for one batch at a time; see :mod:`runtime.stage.sample_weights`."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from runtime.pipeline.microbatches import Batch
from runtime.rank import RankContext
from runtime.stage.local_stage import LocalStage
from runtime.stage.sample_weights import SUM, TERMS, Counting, Weighed, countings, factor, weighed_in


class LossWeighting:
    """What the layers of this rank's stages take in each micro-batch."""

    def __init__(self, context: RankContext) -> None:
        model = context.model
        self._context = context
        self._shapes = {layer.name: layer.outputs[0].shape for layer in context.graph.layers}
        self._weighed = {stage: weighed_in(model, context.decision.layers_of(stage)) for stage in context.stages}
        self._countings = {stage: countings(model, weighed) for stage, weighed in self._weighed.items()}
        self._factors: dict[tuple[int, str, int], Tensor] = {}

    def begin(self, batch: Batch, local_stages: Mapping[int, LocalStage]) -> None:
        """Finds the factors for ``batch``; all ranks of a stage together, in the order of the stages.

        Args:
            local_stages: with their shares of the batch.
        """
        self._factors.clear()
        for stage, countings_of_stage in self._countings.items():
            local_stage = local_stages[stage]
            for one in self._weighed[stage]:
                if one.reduction == SUM:
                    self._note(stage, one, local_stage, batch, None)
            for counting in countings_of_stage:
                counts = self._counted(stage, counting, local_stage, batch)
                for one in counting.weighed:
                    self._note(stage, one, local_stage, batch, counts[one.layer])

    def factor(self, batch: Batch, stage: int, name: str, microbatch: int) -> Tensor:
        """An input of a stage."""
        return self._factors[stage, name, microbatch]

    def _note(self, stage: int, one: Weighed, local_stage: LocalStage, batch: Batch, counts: Tensor | None) -> None:
        """The factors of a layer, of which ``counts`` is what each micro-batch adds to the whole batch's number."""
        for share in local_stage.shares:
            m = share.of
            if batch.rows[m] and not share.microbatch % self._context.decision.num_parts:
                together = self._together(m)
                samples = sum(batch.rows[together.start : together.stop])
                count = None if counts is None else counts[together.start : together.stop].sum(0)
                part = share.num_samples
                self._factors[stage, one.factor, m] = factor(one, part, samples, count)

    def _together(self, microbatch: int) -> range:
        """The micro-batches that make up an update with this one."""
        ends = self._context.updates_after
        last = next(end for end in ends if end >= microbatch)
        return range(max((end + 1 for end in ends if end < microbatch), default=0), last + 1)

    def _counted(self, stage: int, counting: Counting, local_stage: LocalStage, batch: Batch) -> dict[str, Tensor]:
        """By layer, what each micro-batch adds to the whole batch's number, over all ranks of the stage."""
        shapes = [() if one.reduction == TERMS else self._shapes[one.layer] for one in counting.weighed]
        sizes = [prod(shape) for shape in shapes]
        table = torch.zeros(len(batch.rows), sum(sizes), dtype=torch.float64)
        for m, rows in enumerate(batch.rows):
            first, count = self._own(stage, local_stage, m, rows)
            if count:
                parts = {name: batch.part(name, m, first, count).cpu() for name in counting.sources}
                parts.update((one.factor, self._factors[stage, one.factor, m]) for one in counting.needed)
                table[m] = torch.cat([counted.double().flatten() for counted in counting.of(count, parts)])
        if len(local_stage.ranks) > 1:
            local_stage.add(table)
        columns = zip(counting.weighed, torch.split(table, sizes, 1), shapes, strict=True)
        return {one.layer: column.reshape(-1, *shape) for one, column, shape in columns}

    def _own(self, stage: int, local_stage: LocalStage, microbatch: int, rows: int) -> tuple[int, int]:
        """The first sample that this rank counts, and how many; where layers are divided, one rank counts for all."""
        context = self._context
        if stage not in context.divided:
            share = local_stage.shares[microbatch * context.decision.num_parts]
            return share.start, share.num_samples
        return 0, rows if context.position(stage) == 0 else 0
