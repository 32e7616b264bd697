"""From a model and a cluster to a plan, and questions about it.

Modules:

    calibration       What a run teaches its profile: an observation, corrections; whether the machine or the model was
                      off
    compare           Plans beside one another: a table, and what differs in meaning between two decisions
    edits             Changes to a problem as people write them: ``stages=4,schedule=gpipe``, ``n1/gpu0.memory=32GiB``,
                      ``devices=8``
    jobs              Searches that need nothing of one another, in processes of their own: the same answers, whatever
                      the number
    measure           Measuring a model: what a person names becomes a source, the profiler measures it, and its result
                      in a few lines
    measure_missing   Plans, measures what the plan and its close rivals use and nobody measured, plans again, until
                      nothing is left
    options           What may be asked of a plan, and of a profile: the lists of options that ``halopipe plan`` and
                      ``profile`` take
    pareto            The Pareto front of step time and memory: the best step under each memory limit, every point a
                      plan
    plan_files        Plans in files, and the profiles that they were made from: where these lie, and whether they still
                      are the same
    problem           What a person asks for as a problem for a solver, and the problem that a plan answers
    replan            Another plan for the machines as they stand: devices that are gone, devices that run at another
                      speed
    resized           A profile for another height, width or length than it was measured at: of a network whose sizes
                      vary
    search_progress   Searches with their progress on stderr: the best step so far, the bound below it, the gap between
                      them
    searched_space    Of which plans a search says that it found the best, in words, and what else one may ask for
    shadow_prices     Prices of what limits a plan: what one more GiB, one more device, a link twice as fast would save
    solve             From problems to plans, baselines and predicted timelines
    what_if           Questions about a plan: why not another one, and what if something were otherwise; answered by
                      searching again
"""
