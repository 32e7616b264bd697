"""The integer program over spans behind :mod:`planner.solvers.ilp.solver`: its tables, its rows, its objective.

Cuts, groups of devices, prices of stages and of messages are those of :mod:`planner.solvers.best_first`; what is solved
here is the program alone.

Modules:

    formulas        The mathematical program over spans: each constraint beside the function that adds it; solved by
                    HiGHS
    solver          The integer program over spans: a second road to the best plan, for cross-checks and for side
                    constraints
    spans           The tables of the integer program, read off the search's prices: spans that may be stages, and
                    hand-overs
"""

from __future__ import annotations

__all__: list[str] = []
