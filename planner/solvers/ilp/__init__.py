"""The integer program over spans behind :mod:`planner.solvers.ilp.solver`: its tables, its rows, its objective.

Modules:

    device_groups   Groups of devices that may run a stage, what limits how many there are, and what they hand to one
                    another
    formulas        The mathematical program over spans: each constraint beside the function that adds it; solved by
                    HiGHS
    solver          The integer program over spans: a second road to the best plan, for cross-checks and for side
                    constraints
    spans           The tables of the integer program: every span that may be a stage, and every hand-over between two
                    groups
"""

from __future__ import annotations

__all__: list[str] = []
