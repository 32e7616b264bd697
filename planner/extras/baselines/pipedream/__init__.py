"""PipeDream (Narayanan et al., SOSP 2019): the shortest slowest stage of a pipeline with replicated stages.

    minimise   max over stages of  max(T_s / m_s + sums of gradients, messages in and out)    ``planner.best_row``
    over       cuts at states of the graph, m_s replicas, level by level of the machine       ``format.states_of``
    plan       its stages on devices of ours, simulated                                       ``solver``

Modules:

    format    PipeDream's ``graph.txt``: layers with their measured costs for one mini-batch, and edges; and the states
              to cut at
    planner   PipeDream's planner: the shortest slowest stage of a pipeline with replicated stages, flat or level by
              level
    solver    PipeDream's planner (Narayanan et al., SOSP 2019): the shortest slowest stage of a replicated pipeline
"""
