"""The best option (layout, recompute) of every layer of a stage, exactly.

    minimise    sum_v c_v(x_v) + sum_uv c_uv(x_u, x_v)                               ``factor_graph.LabelledGraph``
    such that   sum m + max w <= memory, by rank
    c, m, w     a step's seconds and bytes of each option, from prices               ``stage.labelled_graph``
    solved      variable by variable, where cliques are small                        ``variable_elimination.eliminate``
                by an integer program, where they or budgets are not                 ``milp.solve_integer``
    bounded     by prices on budgets (Lagrange)                                      ``solve.lagrangian``

Read ``stage``, which also says what else a layer could do, then ``solve.minimise``, which chooses the way.
"""
