"""Proofs of plans: what a search claims, in a form that little code verifies.

    claim       no plan of a space takes less than (1 - gap) of this one's step               ``prove.prove``
    space       cuts, groups, schedules, sizes of micro-batches, from the request anew        ``space.PlanSpace``
    least       of stages and messages, from the profile anew                                ``prices.SpacePrices``
    holds       potentials are dual feasible; every prefix reaches the claim by them, or
                is opened, and all that may follow it are looked at                           ``verify.verify``
                of a whole pipeline, the least step under all schedules and windows           ``step.least_step_s``

``space``, ``prices``, ``verify`` and ``step`` are all that has to be trusted; they ask nothing of the search, the costs
or the checker.  ``prove`` makes a proof; ``scope``: for which requests.
"""
