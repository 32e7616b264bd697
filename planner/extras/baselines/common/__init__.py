"""What the papers' planners share.

Networks (graphs and chains) and clusters as they see them, ideals, readers of files, answers and their candidates.

Modules:

    answer       What a published planner answers, and the candidates that come of it
    as_profile   A published profile as one of ours, so that every solver can plan the network; clusters by a few
                 numbers
    budgets      What the authors of published planners say their planners take, or let them take
    ideals       Ideals of a directed acyclic graph: what may be done when a stage ends, as bits in a Python integer
    problem      A problem's network as the published planners see it: layers with costs for one micro-batch on one kind
                 of device
    reading      Reading a JSON file of a published format: typed fields, and faults that name the place in the file
"""
