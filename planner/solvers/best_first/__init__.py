"""The exact search.

Read ``solver`` (the program it solves), ``search`` (when it ends, and whether as proven) and ``prefixes``; what they
ask: ``graph_cuts``, ``device_groups`` and what the problem leaves open (``priced_groups.Freedom``); the bounds:
``bound`` over suffixes, made of ``priced_groups`` (with the prices of ``planner.costs.stages.stage_bound``) and
``message_bound``, ``counts_table`` by counts of devices (with ``counts_columns``), both by the ``recurrence`` of all
pipelines, and ``leaf_bound`` over complete ones. ``first_answers`` (of ``like_stages``), ``incumbents`` and
``warm_start`` are what it starts from, ``objectives`` what is asked beside the step, and said where nothing fits,
``layout_search`` with ``layout_bound`` the search beyond samples.

Besides:

    capacity            The device time of all layers, and what unlike devices can do of it: no step is shorter
    chunked             Pipelines of several stages a position beside those of one, where no schedule is named
    continued           Searches that go on where this one ended, among plans that are not in its space; extras add them
    followers           Layers that cost nothing and stay with another one, so that there are fewer places to cut
    layer_links         What is known of messages between two layers, whatever the layouts of these
    layout_chains       Pipelines of stretches of layers on groups of ranks, whatever their layouts: by their bounds,
                        the least first
    layout_plans        From stages to plans with layouts
    policy              Shares of its work, for each of these
    repair              A few neighbouring stages of the best plan solved again, for searches that have no proof in
                        time; and samples moved where memory is too small for them
    share_bound         What pipelines take at least, whatever shares of the samples members of their stages have
    share_search        All shares of the samples that members of a pipeline's stages may have, by branch and bound
    virtual_bound       What pipelines of several stages a position take at least, by their cuts: paths through the
                        order of their schedule
    virtual_pipelines   Pipelines of several stages a position (interleaved, ZB-V, hanayo, greedy, chimera), in the
                        queue of the search
    virtual_stages      What stages of these take, and messages between them
"""
