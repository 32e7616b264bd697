"""What a plan, a layer or a run looks like to a person.

Modules:

    charts                  The charts of a report, for bokeh: the step of every rank, memory over time, and plans by
                            step and memory
    doctor                  What of this machine is missing or odd for halopipe, and what to do about it; a few seconds
    explain                 Why this plan: the step as a picture, stages, memory, what binds, how good it is, and what
                            else there was
    figures                 Figures: a step as a Gantt chart, memory by rank and over time, the network, predicted
                            against measured
    graph_layout            A network on paper: layers from left to right, wrapped into rows as words are, each value on
                            a lane of its own
    layer                   Where a layer runs, what it reads from other stages, and what it costs
    notebook                Notebooks: how plans and timelines show themselves, and the comparison of strategies as
                            cells
    predicted_vs_measured   Predicted beside measured: the step, its stages, and where the time of their ranks goes
    report                  A plan as one offline page: network, step, memory, rivals, proof, and how each figure is
                            known
    run                     A run with its progress on stderr, and what it showed: predicted beside measured, the
                            losses, the numerics
"""
