"""What a plan costs: layers, links, memory, and the simulation of a whole step.  Pure functions over a profile.

Import from the module that defines a name: ``from planner.costs.predict import predict``.

Modules:

    calibration     Corrections of a profile's costs: fitted to runs of plans, and applied
    candidate       A decision in indices: what the search looks at, and what is priced, of a candidate and of a plan's
                    file alike
    communication   What messages cost: links, collectives, resharding between layers, halos, and the least that stages
                    hand over
    cost_model      All that a profile says of prices, looked up once
    layers          What a layer costs: as measured, read between measurements, or by a model of its family or device
    memory          Memory of a rank, action by action
    observe         What a run of a plan says of the costs it was predicted from: one ``Observation``
    predict         What a decision is predicted to cost: its step and timeline, memory by rank, deciles, and the rate
                    that it sustains
    pricing         What a decision costs: the one way from a candidate, or a plan's file, to the numbers that the
                    simulator runs on
    sentences       Sentences of a plan's file, each made of figures: what limits the step, and why another plan was not
                    taken
    shards          What each rank of a group has of a layer: device meshes, boxes, sharding specs and partial sums
    simulator       A step, simulated
    stages          What a stage costs
    ties            Which of two plans is the faster, and how sure that is; where it is not, the one on fewer ranks is
                    taken
    timeline        When everything in a simulated step happened
    uncertainty     How far a step may lie from its prediction: the step replayed with costs drawn anew, a few hundred
                    times
"""

from __future__ import annotations

__all__: list[str] = []
