"""A batch of seeds as the inputs of a graph network: sampled in a thread of its own, piece by piece, ahead of its step.

The seeds of a micro-batch are cut where some stage's ranks share them, by the edges that each is expected to need.
What lies between two cuts is a *piece*: it is sampled by itself, and the rows of pieces lie side by side on every
level.  So what a rank has of any level is an interval of its rows, as of sparse tensors (decision 0014), and no rank
reads rows of another; nodes that two pieces have in common are computed in both.  Neighbours follow from (seed, draw,
layer, node) alone (:mod:`cuda_ops.extras.sampling.draws`), so that pieces and the whole batch give every seed the same.

The thread samples and copies features while the rank's own thread computes, a whole step ahead where the next batch is
known (:meth:`SampledPreparing.expect`).
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from cuda_ops.extras.sampling.graph import GraphError
from cuda_ops.extras.sampling.preparation import SampledPreparation, draw_of
from cuda_ops.extras.sampling.sampler import SampledLevels, joined
from planner.ir.errors import StageFailedError
from planner.ir.graph import SAMPLE
from planner.ir.plan import Decision
from planner.sites.partition import balanced_cuts
from runtime.pipeline.microbatches import Batch
from runtime.sparse.ahead import Expected, PreparationClock, PreparationThread
from runtime.sparse.batch import PreparedInputs, SeparateBatch, site_speeds

_FEATURES = "features"


@contextmanager
def telling(microbatch: int) -> Iterator[None]:
    """Raises :class:`StageFailedError` for seeds of a micro-batch that cannot be used."""
    try:
        yield
    except GraphError as error:
        raise StageFailedError(f"seeds of micro-batch {microbatch} cannot be sampled for", [str(error)]) from error


@dataclass(frozen=True, slots=True)
class SampledPreparing:
    """Prepares the batches of a run.

    Attributes:
        speeds: by stage of several ranks, their shares.
        aside: the thread that samples.
    """

    prepared: PreparedInputs
    preparation: SampledPreparation
    decision: Decision
    speeds: dict[int, tuple[float, ...]]
    aside: PreparationThread = field(default_factory=PreparationThread)
    _expected: Expected[SampledBatch] = field(default_factory=Expected)

    @classmethod
    def of(
        cls, decision: Decision, prepared: PreparedInputs, aside: PreparationThread | None = None
    ) -> SampledPreparing:
        """For a plan (that its ranks can share seeds, :mod:`planner.layers.stage_rules` has seen to)."""
        speeds = {
            stage: of_stage for stage in range(len(decision.stages)) if (of_stage := site_speeds(decision, stage))
        }
        preparation = cast("SampledPreparation", prepared.preparation)
        return cls(prepared, preparation, decision, speeds, aside or PreparationThread())

    @property
    def clock(self) -> PreparationClock:
        return self.aside.clock

    @property
    def looks_ahead(self) -> bool:
        """Always: a rank samples for its own seeds alone, and needs nobody's word."""
        return True

    def batch(self, raw: Batch) -> SampledBatch:
        return self._expected.take(raw) or SampledBatch(raw, self)

    def expect(self, raw: Batch, rank: int) -> None:
        batch = SampledBatch(raw, self)
        batch.begin(rank)
        self._expected.add(raw, batch)


class SampledBatch(SeparateBatch):
    """``raw`` as the graph's inputs: see the module."""

    def __init__(self, raw: Batch, preparing: SampledPreparing) -> None:
        super().__init__(raw, preparing.prepared)
        self._preparing = preparing
        self._preparation = preparing.preparation
        self._cuts: dict[tuple[int, tuple[float, ...]], tuple[int, ...]] = {}
        self._pieces: dict[tuple[int, int], Future[SampledLevels]] = {}
        self._features: dict[tuple[int, int], Future[Tensor]] = {}
        self._joined: dict[tuple[int, int, int], SampledLevels] = {}
        self._sizes: dict[int, dict[str, int]] = {}

    def begin(self, rank: int) -> None:
        """Starts sampling what the stages of ``rank`` need, micro-batch by micro-batch."""
        decision = self._preparing.decision
        layers = self.prepared.graph.by_name()
        named = {own: name for name, own in self.prepared.names.items()}
        for m, rows in enumerate(self.rows):
            for stage, each in enumerate(decision.stages):
                if not rows or rank not in each.ranks:
                    continue
                reads = {value for name in decision.layers_of(stage) for value in layers[name].inputs}
                speeds = self._preparing.speeds.get(stage)
                points = self.cuts(m, speeds) if speeds else (0, rows)
                position = each.ranks.index(rank) if speeds else 0
                for piece in self._between(m, points[position], points[position + 1]):
                    self._piece(m, piece)
                    if named[_FEATURES] in reads:
                        self._features_of(m, piece)

    def cuts(self, microbatch: int, speeds: tuple[float, ...]) -> tuple[int, ...]:
        """Where ranks of ``speeds`` cut the seeds of a micro-batch: by the edges that each is expected to need."""
        seed_cuts = self._cuts.get((microbatch, speeds))
        if seed_cuts is None:
            with telling(microbatch):
                before = self._preparation.sampler.work_before(self._seeds(microbatch))
            seed_cuts = self._cuts[microbatch, speeds] = tuple(int(cut) for cut in balanced_cuts(before, speeds))
        return seed_cuts

    def sizes(self, microbatch: int) -> dict[str, int]:
        level_sizes = self._sizes.get(microbatch)
        if level_sizes is None:
            level_sizes = self._sizes[microbatch] = self._preparation.sizes(
                self.levels(microbatch, 0, self.rows[microbatch])
            )
        return level_sizes

    def whole(self, name: str, microbatch: int) -> Tensor:
        return self.interval(name, microbatch, 0, self.rows[microbatch])

    def share(self, microbatch: int, speeds: tuple[float, ...], position: int) -> SampledShare:
        return SampledShare(self, microbatch, self.cuts(microbatch, speeds), position)

    def part(self, name: str, microbatch: int, start: int, count: int) -> Tensor:
        if self._target(name) is not None:
            return self.interval(name, microbatch, start, start + count)
        tensor = self.whole(name, microbatch)
        return tensor if self.prepared.graph.inputs[name].has_sites else tensor[start : start + count]

    def interval(self, name: str, microbatch: int, start: int, stop: int) -> Tensor:
        """A graph input of the seeds from one cut to another."""
        dtype = getattr(torch, self.prepared.graph.inputs[name].dtype)
        target = self._target(name)
        if target is not None:
            return self.raw.part(target, microbatch, 0, self.rows[microbatch])[start:stop].to(dtype)
        own = self.prepared.names[name]
        if own == _FEATURES:
            pieces = self._between(microbatch, start, stop)
            futures = [self._features_of(microbatch, piece) for piece in pieces]
            with telling(microbatch):
                parts = [self._preparing.aside.result(each) for each in futures]
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).to(dtype)
        return self._preparation.tensor(self.levels(microbatch, start, stop), own).to(dtype)

    def levels(self, microbatch: int, start: int, stop: int) -> SampledLevels:
        """What was sampled for the seeds from one cut to another."""
        key = (microbatch, start, stop)
        sampled = self._joined.get(key)
        if sampled is None:
            futures = [self._piece(microbatch, piece) for piece in self._between(microbatch, start, stop)]
            with telling(microbatch):
                sampled = joined([self._preparing.aside.result(each) for each in futures])
            self._joined[key] = sampled
        return sampled

    def _target(self, name: str) -> str | None:
        """The user's tensor that a graph input is; None: it is prepared."""
        kind, _, number = self.prepared.names[name].rpartition("_")
        if kind != "target":
            return None
        return list(self.prepared.raw)[2 + int(number)]

    def _points(self, microbatch: int) -> list[int]:
        """All cuts of a micro-batch."""
        cuts = {0, self.rows[microbatch]}
        for speeds in self._preparing.speeds.values():
            cuts.update(self.cuts(microbatch, speeds))
        return sorted(cuts)

    def _between(self, microbatch: int, start: int, stop: int) -> list[int]:
        """The pieces from one cut to another, by where they begin; one without seeds where there are none."""
        return [first for first in self._points(microbatch)[:-1] if start <= first < stop] or [-1]

    def _piece(self, microbatch: int, first: int) -> Future[SampledLevels]:
        future = self._pieces.get((microbatch, first))
        if future is None:
            seeds = self._seeds(microbatch, first)
            draw = self._draws(microbatch)
            sampler = self._preparation.sampler
            future = self._preparing.aside.begin(lambda: sampler.levels(seeds, draw_of(draw)))
            self._pieces[microbatch, first] = future
        return future

    def _features_of(self, microbatch: int, first: int) -> Future[Tensor]:
        future = self._features.get((microbatch, first))
        if future is None:
            piece = self._piece(microbatch, first)
            sampler = self._preparation.sampler
            future = self._preparing.aside.begin(lambda: sampler.features(piece.result().nodes))
            self._features[microbatch, first] = future
        return future

    def _seeds(self, microbatch: int, first: int | None = None) -> Any:
        """Seeds of a micro-batch, or of the piece that begins there."""
        rows = self.rows[microbatch]
        seeds = self.raw.part(next(iter(self.prepared.raw)), microbatch, 0, rows).numpy()
        if first is None:
            return seeds
        if first < 0:
            return seeds[:0]
        return seeds[first : next(point for point in self._points(microbatch) if point > first)]

    def _draws(self, microbatch: int) -> Tensor:
        return self.raw.part(list(self.prepared.raw)[1], microbatch, 0, self.rows[microbatch])


class SampledShare:
    """The seeds of one rank of a stage that shares them, with their neighbourhoods.

    Attributes:
        points: where the stage's ranks cut the seeds.
        shares: seeds of each rank.
        sizes: this rank's rows and edges, by the name of the number.
    """

    def __init__(self, batch: SampledBatch, microbatch: int, points: tuple[int, ...], position: int) -> None:
        self._batch = batch
        self._microbatch = microbatch
        self.points = points
        self._position = position
        self.shares = tuple(stop - start for start, stop in pairwise(points))

    @property
    def sizes(self) -> dict[str, int]:
        return self._of(self._position)

    @property
    def cuts(self) -> dict[str, tuple[int, ...]]:
        """The cut points of the seeds and among the rows of every level: all ranks' pieces are sampled for these."""
        sizes = [self._of(position) for position in range(len(self.shares))]
        return {
            SAMPLE: self.points,
            **{word: tuple(accumulate((each[word] for each in sizes), initial=0)) for word in sizes[0]},
        }

    def tensor(self, name: str) -> Tensor:
        return self._batch.interval(name, self._microbatch, *self._ends(self._position))

    def _of(self, position: int) -> dict[str, int]:
        levels = self._batch.levels(self._microbatch, *self._ends(position))
        return self._batch._preparation.sizes(levels)

    def _ends(self, position: int) -> tuple[int, int]:
        return self.points[position], self.points[position + 1]
