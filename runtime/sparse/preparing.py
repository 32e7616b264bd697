"""Who prepares the batches of a run: of clouds sites and maps; of others an extra (``RuntimeExtra.batch_preparation``).

Of clouds a plan says whether each step's are prepared in it, micro-batch by micro-batch, or while the step before waits
(:attr:`planner.ir.plan.Decision.prepares_next_step`).  Then a thread of each rank finds the sites of the whole batch,
shares them out where ranks share them, describes the network at their number, and makes what the rank's own stages
read, before the step that uses them begins; ``PREP`` finds them made.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from cuda_ops.preparation import InputPreparation
from planner.ir.extras import extras
from planner.ir.plan import Decision
from planner.sites.prices import SitePrices, prices
from runtime.captured import CapturedModule
from runtime.extra import RuntimeExtra
from runtime.pipeline.microbatches import Batch
from runtime.sparse.ahead import BatchPreparation, Expected, PreparationClock, PreparationThread
from runtime.sparse.batch import PreparedBatch, PreparedInputs, site_speeds
from runtime.sparse.share import AnyBatch, share_of


def preparing(
    decision: Decision, model: CapturedModule, core: int | None = None, *, gives_way: bool = False
) -> BatchPreparation[AnyBatch]:
    """What makes batches of clouds or seeds the graph's inputs.

    Args:
        model: of a sparse or graph network.
        core, gives_way: of the thread, as of :class:`runtime.sparse.ahead.PreparationThread`.

    Raises:
        UnsupportedModelError: ranks share what cannot be shared.
    """
    preparation = cast("InputPreparation", model.preparation)
    prepared = PreparedInputs.of(model.graph, preparation, dict(model.raw))
    aside = PreparationThread(core=core, gives_way=gives_way)
    for extra in extras(RuntimeExtra):
        of_extra = extra.batch_preparation(preparation, decision, prepared, aside)
        if of_extra is not None:
            return of_extra
    return Preparing.of(decision, prepared, aside)


@dataclass(frozen=True, slots=True)
class Preparing:
    """Prepares the clouds of a run.

    Attributes:
        speeds: shares of the ranks of the largest stage that shares out sites; empty: there is none.
        aside: the thread that prepares what is expected.
    """

    prepared: PreparedInputs
    price: SitePrices
    speeds: tuple[float, ...]
    decision: Decision
    aside: PreparationThread = field(default_factory=PreparationThread)
    _expected: Expected[tuple[PreparedBatch, Future[None]]] = field(default_factory=Expected)

    @classmethod
    def of(cls, decision: Decision, prepared: PreparedInputs, aside: PreparationThread | None = None) -> Preparing:
        """For a plan of a model."""
        by_stage = [site_speeds(decision, stage) for stage in range(len(decision.stages))]
        speeds = max(by_stage, key=len, default=())
        return cls(prepared, prices(prepared.graph), speeds, decision, aside or PreparationThread())

    @property
    def clock(self) -> PreparationClock:
        return self.aside.clock

    @property
    def looks_ahead(self) -> bool:
        """As the plan says."""
        return self.decision.prepares_next_step

    def batch(self, raw: Batch) -> PreparedBatch:
        """``raw`` as the graph's inputs; where it was expected, once all that this rank reads of it is made.

        Raises:
            StageFailedError: clouds that were expected cannot be used.
        """
        expected = self._expected.take(raw)
        if expected is None:
            return self._new(raw)
        batch, is_made = expected
        self.aside.result(is_made)
        return batch

    def expect(self, raw: Batch, rank: int) -> None:
        batch = self._new(raw)
        self._expected.add(raw, (batch, self.aside.begin(partial(self._make, batch, rank))))

    def _new(self, raw: Batch) -> PreparedBatch:
        return PreparedBatch(raw, self.prepared, self.price, self.speeds)

    def _make(self, batch: PreparedBatch, rank: int) -> None:
        """All that is asked of ``batch`` before the program and in the ``PREP`` of this rank's stages."""
        inputs = self.prepared.graph.inputs
        layers = self.prepared.graph.by_name()
        for m, rows in enumerate(batch.rows):
            if not rows:
                continue
            batch.sizes(m)
            for stage, each in enumerate(self.decision.stages):
                reads = {v for name in self.decision.layers_of(stage) for v in layers[name].inputs if v in inputs}
                if len(each.ranks) > 1:
                    position = each.ranks.index(rank) if rank in each.ranks else 0
                    share = batch.shares[stage, m] = share_of(self.decision, batch, m, stage, position)
                    if rank in each.ranks:
                        for name in sorted(reads):
                            share.tensor(name)
                elif rank in each.ranks:
                    for name in sorted(reads):
                        batch.whole(name, m)
