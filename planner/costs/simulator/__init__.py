"""A step, simulated.

    start of an action   max over end of the one before on its rank, arrivals of its messages, members of its sum
    arrival              max(send, end of the message before on the channel) + t, or more where cards are shared
    step                 max over ranks of the end of its row

A program as integers (``program``), its prices (``prices``), its events: where everything lasts as long as it does
alone (``events``) and where messages share network cards max-min fairly (``contention``), both ``rows`` of
:mod:`planner.passes.events`; ranks that do the same (``symmetry``), inputs of the next step, where the time went.

Besides:

    breakdown   Where the time of a step goes on each rank, from a predicted timeline or a measured one by the same
                rules
    next_step   What ranks prepare of the next step while this one runs, and how much of it is left when their rows end
    replay      A simulated step once more with other durations, many at a time: every time is a vector, an entry a draw
    traffic     What messages and sums of gradients share: network cards, and the cores of the ranks that they move
                between
"""
