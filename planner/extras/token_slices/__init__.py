"""Token slices (TeraPipe; Li et al., ICML 2021): sequences cut along time, an axis with an order, in training steps.

The plan's field is ``token_slices``; the axis is ``time`` of ``--allow``.

Modules:

    axes        Where tokens lie in a graph, and how slices divide its layers
    order       The order of token slices: that of micro-batches, a longer warm-up, backwards turned round
    prices      What layers cost slice by slice
    refusals    What token slices cannot be combined with
    search      Plans with token slices: stages, micro-batches and lengths of slices, after the best plan without
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from planner.ir.planner_extra import PlannerExtra
from planner.ir.problem import TIME_DIMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from planner.costs.candidate import Candidate
    from planner.costs.cost_model import CostModel
    from planner.ir.graph import Graph
    from planner.ir.plan import Decision
    from planner.ir.planner_extra import PartPrices
    from planner.ir.problem import Problem
    from planner.ir.schedule import Pipeline, Schedule
    from planner.layers.boundary import OrderedAxis
    from planner.layers.sized import SizedLayer
    from planner.schedules import Order
    from planner.solvers.best_first.continued import ContinuedSearch
    from planner.solvers.candidates.constraints import Constraints
    from planner.solvers.requests import Refusal


class TokenSlicePlans(PlannerExtra):
    """Training steps whose sequences are cut along time."""

    allows: ClassVar = (TIME_DIMS,)

    def ordered_axis(self, graph: Graph, lengths: tuple[int, ...], ranks: Sequence[tuple[int, ...]]) -> OrderedAxis:
        from planner.extras.token_slices.axes import along_time

        return along_time(graph, lengths, ranks)

    def order_of_parts(self, schedule: str, order: Order, pipeline: Pipeline) -> Schedule:
        from planner.extras.token_slices.order import in_slices

        return in_slices(schedule, order, pipeline)

    def part_prices(self, cost_model: CostModel) -> PartPrices:
        from planner.extras.token_slices.prices import SlicePrices

        return cost_model.beside(SlicePrices)

    def part_shapes(self, graph: Graph) -> Callable[[SizedLayer], Iterator[tuple[tuple[int, ...], int]]]:
        from planner.extras.token_slices.prices import part_shapes

        return part_shapes(graph)

    def searches(self) -> Sequence[ContinuedSearch]:
        from planner.extras.token_slices.search import SEARCH

        return (SEARCH,)

    def refusals(self, problem: Problem) -> Sequence[Refusal]:
        from planner.extras.token_slices.refusals import of_request

        return of_request(problem)

    def faults(self, decision: Decision, graph: Graph | None) -> Iterable[str]:
        from planner.extras.token_slices.refusals import faults

        return faults(decision, graph)

    def unmet(self, constraints: Constraints, candidate: Candidate) -> str:
        from planner.extras.token_slices.refusals import unmet

        return unmet(constraints, candidate)


EXTRA = TokenSlicePlans()
