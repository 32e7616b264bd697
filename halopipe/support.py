"""What the runtime executes today: a plan beyond that is refused before any process starts."""

from __future__ import annotations

from collections.abc import Iterator

from planner.ir.errors import UsageError
from planner.ir.graph import SAMPLE
from planner.ir.plan import Decision, Plan

_SUPPORTED = "executed today: layers cut along samples alone, all layers of a stage alike"


def require_executable(plan: Plan) -> None:
    """Raises :class:`UsageError`, which names every reason, if the runtime cannot execute the plan as it is priced."""
    reasons = list(_reasons(plan.decision))
    if reasons:
        raise UsageError(
            "this plan cannot be run yet",
            [*reasons, _SUPPORTED],
            ["plan again without --allow", "halopipe explain shows what it would do"],
        )


def _reasons(decision: Decision) -> Iterator[str]:
    cut = {name: sorted(set(p.cuts) - {SAMPLE}) for name, p in decision.layers.items() if set(p.cuts) - {SAMPLE}}
    if cut:
        name, dims = next(iter(cut.items()))
        yield f"{len(cut)} layers are cut along other dims than samples, such as {name} along {', '.join(dims)}"
    odd = _several_layouts(decision)
    if odd and not cut:
        yield f"stage {odd[0][0]} divides {odd[0][1]} otherwise than its other layers"


def _several_layouts(decision: Decision) -> list[tuple[int, str]]:
    """(stage, layer) of each layer whose layout differs from the first of its stage."""
    first: dict[int, object] = {}
    found = []
    for name, placement in decision.layers.items():
        if dict(placement.cuts) != first.setdefault(placement.stage, dict(placement.cuts)):
            found.append((placement.stage, name))
    return found
