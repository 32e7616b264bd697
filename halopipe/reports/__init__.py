"""What a plan, a layer or a run looks like to a person.

Modules:

    doctor                  What of this machine is missing or odd for halopipe, and what to do about it; a few seconds
    explain                 Why this plan: the step as a picture, stages, memory, what binds, how good it is, and what
                            else there was
    figures                 Figures of plans and runs, for users; they are an extra's
    layer                   Where a layer runs, what it reads from other stages, and what it costs
    measured                What was measured, in a few lines: the summary of a profile
    predicted_vs_measured   Predicted beside measured: the step, its stages, and where the time of their ranks goes
    run                     A run with its progress on stderr, and what it showed: predicted beside measured, the
                            losses, the numerics
"""
