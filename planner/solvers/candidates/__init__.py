"""Points of the searched space: what may be chosen, how it becomes a plan, and what the simulator says of it.

Modules:

    candidate     What a solver chooses, and the way from it to a whole plan
    choose        The best of a few candidates; why not another plan
    constraints   Fix and forbid rules of a problem: the stages that they allow, and rules that no plan can satisfy
                  together
    evaluate      Prices candidates by the true simulator, quickly: programs of the same shape are lowered and
                  compiled once
    explain       What a solver answers besides the decision: what binds, why other plans lose, and why nothing fits
    feasibility   What may be chosen for a problem, and a candidate held against everything that was asked
"""

from __future__ import annotations

__all__: list[str] = []
