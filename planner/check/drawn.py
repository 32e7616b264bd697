"""What only the simulator can say again: the range of the step, and how well its prices are known.

Deciles are of numbers drawn at random.  Others that are drawn have other deciles, so these are drawn as they were, by
``planner.costs.uncertainty`` itself.  This is the one module of the checker that asks the planner's own simulator.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.costs.cost_model import PriceBook
from planner.costs.predict import forecast
from planner.costs.pricing import Pricing
from planner.costs.uncertainty import DRAWS
from planner.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Drawn:
    """As in :class:`planner.ir.plan.Prediction`."""

    evidence: str
    p10_s: float
    p90_s: float
    sustained_per_s: float
    sustained_p10_per_s: float
    sustained_p90_per_s: float


def drawn(plan: Plan, book: PriceBook) -> Drawn:
    """Of the plan's decision; no range where the plan states none.

    Raises:
        HalopipeError: the profile lacks a measurement, or the program is not legal.
    """
    request, said = plan.inputs.request, plan.prediction
    num_draws = DRAWS if said.p10_s or said.p90_s else 0
    found = forecast(Pricing(book), plan.decision, request.memory_margin, request.memory_bytes, num_draws).prediction
    rates = found.sustained_per_s, found.sustained_p10_per_s, found.sustained_p90_per_s
    return Drawn(found.evidence, found.p10_s, found.p90_s, *rates)
