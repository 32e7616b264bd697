"""What papers, peers and particular machines brought to the face: a folder each, which the verbs do without.

An extra states in ``HOOKS`` of its ``__init__`` what it adds, by the point that the core asks at
(:mod:`planner.ir.extras`).  At ``verbs`` it adds to the command line, by place in the help and name::

    HOOKS = {"verbs": {"17 ways": "halopipe.extras.transformers.command:ways"}}

Modules:

    baselines        Profiles that papers published, as ours
    catalogue        Machines that are described: the catalogue of devices, and cluster files
    export           Plans in the formats of other tools
    figures          Plans and runs as figures, as one offline page, and in notebooks
    kernels          Times from models of kernels, in place of measurements
    point_clouds     Clouds to train on, for sparse networks
    sampled_graphs   Graph networks on sampled neighbours: data, and the names of ``halopipe.graphs``
    serving          A plan that answers a stream of requests: ``halopipe serve`` and ``hp.serve``
    transformers     Parallel degrees of a transformer's training step, and plans of them
"""
