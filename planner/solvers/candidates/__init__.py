"""Points of the searched space: what may be chosen, how it becomes a plan, and what the simulator says of it.

    space        sizes of micro-batches, schedules, positions to cut at                  ``feasibility``
                 orders of stages that do not depend on one another                      ``stage_orders``
                 fix and forbid rules, as masks over stages                              ``constraints.Constraints``
    point        stages, groups, shares, schedule -> a decision                          ``candidate.decision_of``
    its value    the simulated step, and memory against limits                           ``evaluate.Evaluator``
    the best     least step; within a tie, fewest ranks                                  ``choose.choose``
    why          what binds, and by how much others are slower or too large              ``choose.heuristic_plan``

All solvers share these; a search adds the order in which it looks.
"""
