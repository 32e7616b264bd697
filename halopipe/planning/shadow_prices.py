"""Prices of what limits a plan: what one more GiB, one more device, a link twice as fast would save.

Each is a search of its own on the changed machines, so a price counts whatever the planner would decide otherwise, and
is exact where that search ends with a proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from halopipe.planning import edits, solve
from halopipe.planning import problem as problems
from halopipe.terminal import tables, units
from planner.ir.cluster import DATASHEET, Cluster
from planner.ir.errors import InfeasibleError, UsageError
from planner.ir.plan import Plan
from planner.ir.profile import Profile

GIB = 2**30
_NOTHING = 1e-6  # relative; rounding of the simulator is smaller

Show = Callable[[int, int, str], None]
"""Called with (done, total, what is priced next)."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a change of the machines saves a step.

    Attributes:
        saves_s: seconds a step that are saved at least; 0 if no faster plan was found.
        at_most_s: seconds that can be saved at most, by the bound of the search; as ``saves_s`` where it is proven.
        status: how the search ended, or why there is no plan.
        evidence: how well the faster step is known.
    """

    what: str
    saves_s: float
    at_most_s: float
    step_s: float
    status: str
    evidence: str


@dataclass(frozen=True, slots=True)
class ShadowPrices:
    """The prices of a plan's limits, the largest saving first."""

    plan: Plan
    prices: tuple[Price, ...]

    def __str__(self) -> str:
        return self.render()

    def render(self) -> str:
        """A table."""
        step_s = self.plan.prediction.step_s
        cells = [
            [
                price.what,
                units.seconds(price.saves_s) if price.saves_s else "nothing",
                units.percent(price.saves_s / step_s if step_s else 0.0),
                units.seconds(price.at_most_s) if price.at_most_s > price.saves_s else "the same",
                price.status,
                price.evidence,
            ]
            for price in self.prices
        ]
        table = tables.table(["more of", "saves a step", "of it", "at most", "search", "costs"], cells)
        return f"Prices, of a step of {units.seconds(step_s)}\n{table}"

    def data(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"step_s": self.plan.prediction.step_s, "prices": [asdict(price) for price in self.prices]}


def prices(plan: Plan, profile: Profile, time_limit_s: float = 60.0, show: Show | None = None) -> ShadowPrices:
    """What one more GiB on each kind of device, one more device of each, and each link twice as fast would save.

    Args:
        time_limit_s: for all searches together, shared evenly.
    """
    offers = list(_offers(profile.cluster))
    asked = problems.problem_of(plan, profile)
    base = replace(asked, time_limit_s=time_limit_s / max(1, len(offers)), confidence=0.0)  # optima beside the optimum
    priced = []
    for number, (what, cluster, assumed) in enumerate(offers):
        if show is not None:
            show(number, len(offers), what)
        problem = replace(base, profile=replace(profile, cluster=cluster))
        try:
            other = solve.solve(problem)
        except InfeasibleError as error:
            priced.append(Price(what, 0.0, 0.0, plan.prediction.step_s, error.title, plan.prediction.evidence))
            continue
        priced.append(_price(what, plan, other, assumed))
    return ShadowPrices(plan, tuple(sorted(priced, key=lambda price: (-price.saves_s, -price.at_most_s))))


def _price(what: str, plan: Plan, other: Plan, assumed: bool) -> Price:
    step_s = plan.search.optimum_s(plan.prediction.step_s)
    saves_s = step_s - other.prediction.step_s
    if saves_s < _NOTHING * step_s:  # the plan itself still runs on more than it needs
        saves_s = 0.0
    proven = other.search.status == "proven"
    at_most_s = saves_s if proven else max(saves_s, step_s - other.search.bound_s)
    evidence = DATASHEET if assumed else other.prediction.evidence
    return Price(what, saves_s, at_most_s, step_s - saves_s, other.search.status, evidence)


def _offers(cluster: Cluster) -> Iterator[tuple[str, Cluster, bool]]:
    """(what, the machines with it, whether a measured figure was assumed otherwise)."""
    for kind in dict.fromkeys(device.kind for device in cluster.devices):
        devices = tuple(
            replace(device, memory_bytes=device.memory_bytes + GIB) if device.kind == kind else device
            for device in cluster.devices
        )
        yield f"1 GiB on each {kind}", replace(cluster, devices=devices), False
    for kind in dict.fromkeys(device.kind for device in cluster.devices):
        try:
            yield f"1 {kind}", edits.with_one_more(cluster, kind), False
        except UsageError:  # one device alone: nothing is known of a link to another
            continue
    for name in cluster.links:
        yield f"link {name} twice as fast", edits.with_faster_link(cluster, name, 2.0), True
