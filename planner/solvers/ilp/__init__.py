"""The integer program over spans: a second road to the best plan, for cross-checks and for side constraints.

    z[v], y[h]   spans that are stages, and hand-overs between groups at a cut       ``spans.SpanBuilder``
    groups       n_gk devices of class k, and the least that two groups hand over    ``device_groups.groups``
    minimise T   below the simulated step of every synchronous schedule with a
                 stage a position; all constraints, solved by HiGHS                   ``formulas``
    excluded     sum of a solution's z <= its stages - 1, once it is simulated       ``solver.Enumeration``

Read ``formulas``, whose head is the program.
"""

from __future__ import annotations

__all__: list[str] = []
