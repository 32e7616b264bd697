"""Steps of a plan on two processes, one of which is a slower device, and what SparsePipe's split of a batch is here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from benchmarks.devices.ranks import WARM_UP, CapturedNetwork, RankStep, Step, on_ranks, sgd, timed_steps
from benchmarks.devices.virtual_device import HeldTransport, VirtualDevice, hold
from benchmarks.sparse_vgg.plans import Batch, Case
from cuda_ops.sparse.geometry import KernelMap, MapSpec, Route
from cuda_ops.sparse.local import LocalMap, RowHalo
from cuda_ops.sparse.preparation import Clouds
from planner.ir.plan import Decision
from planner.ir.profile import ModelSource
from planner.sites.partition import SiteLevel
from runtime.engine import Engine
from runtime.optim.ties import groups_of
from runtime.pipeline.microbatches import Batch as RawBatch
from runtime.rank import RankContext
from runtime.sparse.ahead import PreparationClock
from runtime.sparse.batch import ArrangedClouds, PreparedBatch
from runtime.sparse.preparing import Preparing
from runtime.sparse.share import SiteShare
from runtime.transport import Transport

_COUNTS = "counts"


class Network(CapturedNetwork):
    """A network that is run on devices of several speeds.

    Args:
        factors: of each rank's device.
    """

    def __init__(self, source: ModelSource, factors: Sequence[float]) -> None:
        super().__init__(source)
        self._factors = tuple(factors)

    def run(self, case: Case, batches: Sequence[Batch], warm_up: int = WARM_UP) -> list[Step]:
        """A training step on each of ``batches``, after some to warm up."""
        groups = groups_of(case.decision, self.captured.graph)

        def work(transport: Transport) -> list[RankStep]:
            return self._run(case, batches, warm_up, transport)

        found = on_ranks(len(self._factors), work, groups)
        return [Step(ranks) for ranks in zip(*found, strict=True)]

    def _run(self, case: Case, batches: Sequence[Batch], warm_up: int, transport: Transport) -> list[RankStep]:
        device = VirtualDevice(self._factors[transport.rank])
        held = HeldTransport(transport, device)
        told = {"model": self.captured, "module": self.model.module, "transport": held}
        engine = Engine(RankContext(case.decision, sgd, **told))  # type: ignore[arg-type]
        if case.counts_samples:
            count_samples(engine, case.decision)
        hold(engine, device)
        warm = [tuple(batches[0])] * warm_up
        return timed_steps(engine, device, transport, [*warm, *map(tuple, batches)])[warm_up:]


class CountedClouds(ArrangedClouds):
    """One rank's samples of a stage on all ranks: all that there is in ``clouds``, whose rows stay as they are sorted.

    Args:
        clouds: of the whole micro-batch, where those of other ranks have no sites.
    """

    def __init__(self, clouds: Clouds, position: int) -> None:
        self.clouds, self._position = clouds, position
        self._levels = {route: SiteLevel(*clouds.level(route)) for route in clouds.preparation.size_of}
        self._orders: dict[Route, tuple[Tensor, Tensor, Tensor]] = {}
        self._maps: dict[MapSpec, KernelMap] = {}

    def places(self, speeds: Sequence[float]) -> list[int]:
        """The rank's own interval is everything, of one block; others are empty."""
        return [0] * (self._position + 1) + [1] * (len(speeds) - self._position)

    def _order(self, route: Route) -> tuple[Tensor, Tensor, Tensor]:
        rows = torch.arange(-1, len(self._levels[route].samples))
        return rows[1:], torch.zeros_like(rows[1:]), rows.int()


class CountedBatch(PreparedBatch):
    """A batch of which every rank takes as many whole samples, in their order, and prepares those alone."""

    def __init__(self, raw: RawBatch, given: Preparing, position: int) -> None:
        super().__init__(raw, given.prepared, given.price, given.speeds)
        self._position = position

    def clouds(self, microbatch: int) -> Clouds | ArrangedClouds:
        found = self._clouds.get(microbatch)
        if found is None:
            rows, shares, ends = self.rows[microbatch], self._speeds, (self._position, self._position + 1)
            first, last = (round(rows * sum(shares[:end]) / sum(shares)) for end in ends)
            tensors = {name: self.raw.part(name, microbatch, 0, rows) for name in self.prepared.raw}
            counts = tensors[_COUNTS]
            tensors[_COUNTS] = torch.cat([0 * counts[:first], counts[first:last], 0 * counts[last:]])
            clouds = self.prepared.preparation.clouds(list(tensors.values()))
            found = self._clouds[microbatch] = CountedClouds(clouds, self._position)
        return found


class CountedShare(SiteShare):
    """One rank's samples of such a batch: nobody reads another's rows, so that the maps of its own are the rank's."""

    def _map(self, name: str) -> LocalMap:
        prepared = self._batch.prepared
        clouds = cast("CountedClouds", self._clouds).clouds
        found = prepared.preparation.recipe.passage(clouds, prepared.names[name]).kernel_map
        return LocalMap(found.neighbours, found.reverse, found.reverse.shape[1], RowHalo({}, {}))


@dataclass(frozen=True, slots=True)
class CountedPreparing:
    """Prepares such batches on the rank at ``position``."""

    given: Preparing
    position: int

    @property
    def clock(self) -> PreparationClock:
        """Of nobody: a step is prepared in itself."""
        return self.given.clock

    @property
    def looks_ahead(self) -> bool:
        """Never."""
        return False

    def expect(self, raw: RawBatch, rank: int) -> None:
        """Nothing is begun."""

    def batch(self, raw: RawBatch) -> PreparedBatch:
        """``raw`` as the graph's inputs."""
        return CountedBatch(raw, self.given, self.position)


def count_samples(engine: Engine, decision: Decision) -> None:
    """Has the ranks of a stage take equal numbers of whole samples; call it before the engine is held.

    Raises:
        ValueError: the plan has another stage beside one of several ranks, which would have to know of all rows.
    """
    sizes = [len(stage.ranks) for stage in decision.stages]
    if max(sizes) == 1 or engine.preparing is None:
        return
    if len(sizes) > 1:
        raise ValueError(f"stages on {sizes} ranks: samples are counted out in plans of one stage alone")
    position = decision.stages[0].ranks.index(engine._transport.rank)
    engine._runner.preparing = CountedPreparing(engine.preparing, position)  # type: ignore[assignment]
    layout = decision.layout_of(0)

    def share(stage: int, batch: PreparedBatch, microbatch: int) -> SiteShare:
        samples = layout.samples(batch.rows[microbatch])
        return CountedShare.of(batch, microbatch, samples, position, samples)

    engine._runner.specializer._site_share = share  # type: ignore[method-assign]
