"""Graph networks on sampled neighbours: each rank samples those of its own seeds (decision 0014).

Modules:

    preparing   A batch of seeds as the inputs of a graph network: sampled in a thread of its own, piece by piece, ahead
                of its step
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.ir.extras import is_a
from runtime.extra import RuntimeExtra

if TYPE_CHECKING:
    from cuda_ops.preparation import InputPreparation
    from planner.ir.plan import Decision
    from runtime.sparse.ahead import BatchPreparation, PreparationThread
    from runtime.sparse.batch import PreparedInputs


class SampledGraphBatches(RuntimeExtra):
    """Graph networks on sampled neighbours."""

    def batch_preparation(
        self, preparation: InputPreparation, decision: Decision, prepared: PreparedInputs, aside: PreparationThread
    ) -> BatchPreparation[Any] | None:
        if not is_a(preparation, "cuda_ops.extras.sampling.preparation.SampledPreparation"):
            return None
        from runtime.extras.sampled_graphs.preparing import SampledPreparing

        return SampledPreparing.of(decision, prepared, aside)


EXTRA = SampledGraphBatches()
