"""The integer program over spans: a second road to the best plan, for cross-checks and for side constraints.

    spans        what may be a stage, and every hand-over between two            ``spans.span_tables``
    minimise T   below the simulated step of every synchronous schedule with a
                 stage a position; all constraints, solved by HiGHS              ``formulas``
    excluded     sum of a solution's z <= its stages - 1, once it is simulated   ``solver.Enumeration``

Read ``formulas``, whose head is the program.  Cuts, groups of devices, prices of stages and of messages are those of
:mod:`planner.solvers.best_first`; what is solved here is the program alone.
"""
