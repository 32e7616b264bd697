"""From a plan to its ranks: spawned here, or started by torchrun; a profile of several hosts is such a job, too.

Read ``run``; then how a rank of this host

    starts   ``processes``: forked, with the environment of a rank of torchrun (``job_environment``, ``job_stores``)
    works    ``worker``, and ``halopipe.training.work``, as under torchrun
    ends     ``spawn``: its result is taken from the store, and is one of those that ``combine`` makes a run of
    fails    ``runtime.monitor.watch``: all are watched, and its error is raised; ``restart`` (a rank is lost: what is
             tried again, and what is not) starts them anew

``torchrun`` is a rank that has no launcher: together they do what one does.  ``execute`` is a rank inside a script.

Besides:

    ahead           What several processes would do alike, done once before them: they are forked from the process that
                    did it
    packed_optimizer  An optimiser object of a script's for its ranks: pickled whole, its parameters by name
    parallelize     A module trained on the devices of this host from a plain script or a notebook cell
    profile_hosts   A profile of several hosts: every process that torchrun starts measures, and rank 0 makes one
                    profile of it all
    replanning      Jobs whose machines come and go: which devices are there, and the plan for them (``--replan``)
    script_module   The script's own module while ranks train theirs: what the script does to it, no rank sees
    script_rank     A rank of a script's job: it does what the script asks for, until the run is closed
"""
