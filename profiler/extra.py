"""All that extras may add to the profiler (:mod:`planner.ir.extras` says how)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from planner.ir.extras import Extra

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from planner.ir.graph import Graph
    from planner.ir.profile import PreparationCost
    from profiler.source.losses import TrainedLoss
    from profiler.source.model import LoadedModel, PreparedExample


class ProfilerExtra(Extra):
    """What an extra may add to the profiler."""

    def loaded(
        self, factory: str, module: nn.Module, inputs: Any, targets: Any, loss: TrainedLoss
    ) -> tuple[LoadedModel, Mapping[str, Any]] | None:
        """A factory's network as a model on tensors, and what varies in it; None: its inputs are of no kind known here.

        Args:
            factory: its name, for people.
            inputs: of the example; ``targets``: with them.
        """
        return None

    def raw(self, inputs: Any) -> tuple[Tensor, ...] | None:
        """The tensors of an input of a user's batch; None: it is of no kind known here."""
        return None

    def preparation_cost(
        self, graph: Graph, example: PreparedExample, raw: tuple[Tensor, ...], samples: int
    ) -> PreparationCost | None:
        """What a host takes to prepare ``samples`` samples of ``raw``; None: the example is of no kind known here."""
        return None
