"""From gradients to new parameters: sums over ranks, ties, clipping, optimisers whole and divided, and their state.

Which ranks sum a gradient, and when in the step: the table at the head of ``of_stage``.

Modules:

    coupling          Whether an optimiser makes one parameter's update of others, or of its place among them
    followed          An optimiser object of the user's, which the optimisers of all stages follow
    gradient_buckets  Gradients summed over a stage's ranks in buckets, overlapped with the backward
    gradient_sync     What all ranks do together between the last gradient of a step and its updates: sums of ties, and
                      clipping
    of_stage          How the parameters of one stage are updated: over which ranks gradients are summed, and what steps
                      them
    optimizer         A stage's optimiser and its schedule: made by factories, stepped once an update, saved by the
                      parameters' names
    optimizer_state   What an optimiser and its schedule keep, by the names of the model's parameters: saved, and read
                      under another plan
    pass_shards       ZeRO-2 and ZeRO-3: gradients, and parameters, that ranks have in parts while passes run
    schedules         Schedules of learning rates: several of an optimiser, and what they keep as numbers
    sharding          ZeRO-1: an optimiser's state divided over ranks
    ties              Parameters that layers of several stages use: an embedding that is the output's weight as well
    user_object       An optimiser object of the user's as a whole: what goes along into copies, what is refused
    whole_state       The state of the optimisers of all ranks as one mapping, by names of parameters, for checkpoints
                      of a user's own
"""

from __future__ import annotations

__all__: list[str] = []
