"""What a plan costs: layers, links, memory, and the simulation of a whole step.  Pure functions over a profile.

    decision -> program            its actions by rank, with all messages, reductions and updates    ``pricing``
    seconds of a layer             measured, between measurements, or modelled                       ``layers``
    seconds of x bytes on a link   latency + x / bandwidth, or a table; sums over ranks, halos       ``communication``
    part of a layer on a rank      boxes under its layout, and what moves between two                ``shards``
    seconds of F, B, I, W          sums over the layers of a stage, exactly or at least              ``stages``
    bytes of a rank                the largest sum of what is alive                                  ``memory``
    step                           the longest path through all actions and messages                 ``simulator``
    p10, p90                       the step replayed with costs drawn anew                           ``uncertainty``
    which of two is faster         the sign of their difference under the same draws                 ``ties``
    corrections                    exp of the shrunken median of log(measured / predicted)           ``calibration``

Import from the module that defines a name: ``from planner.costs.predict import forecast``.

Besides:

    candidate    A decision in indices: what the search looks at, and what is priced, of a candidate and of a plan's
                 file alike
    cost_model   All that a profile says of prices, looked up once
    observe      What a run of a plan says of the costs it was predicted from: one ``Observation``
    predict      What a decision is predicted to cost: its step and timeline, memory by rank, deciles, and the rate that
                 it sustains
    rows         Plans and stages as flat rows: what tables print, frames hold and ``--json`` writes, under the same
                 names
    sentences    Sentences of a plan's file, each made of figures: what limits the step, and why another plan was not
                 taken
    timeline     When everything in a simulated step happened
"""
