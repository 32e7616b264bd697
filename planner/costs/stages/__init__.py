"""What a stage costs.

    F, B, I, W      sums over its layers on each rank; with recomputation B + F            ``stage_sums.PassTimes``
    of a plan       at the rank's own samples, exchanges and additions included            ``action_costs.StageCosts``
    at least        least head and back, most work, between any two cuts                   ``stage_bound.StageBound``
                    whatever the shares of members are                      ``shared_bound``
    with layouts    sum over layers of (slowest rank + statistics) + messages between      ``stage_cost.stage_cost``
                    of each option of each layer                                           ``layouts.LayoutPrices``
    gradients       max over buckets of (sums from it on - backward left)     ``gradient_overlap.exposed_s``
    inputs          made before the program and in it, by the rank or beside it            ``input_pipeline``

Around them ``placement`` (where stages lie) and ``coverage`` (what was not measured).
"""
