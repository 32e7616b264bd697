"""A transformer's training step on a cluster of GPUs: what it takes, what it holds, and which way is the best.

Read ``shape`` (the network, and the ways to divide it), ``software`` (what runs a step), ``passes`` (times by what they
are spent on), ``host`` (what hosts keep for their devices), ``cluster`` (devices and tiers of links), ``dispatch``
(tokens on their way to experts), ``layers`` (kernels and exchanges of a block, of embedding and head), ``pipeline`` and
``step`` (what is around them), ``memory``, ``pools`` (of GPUs that are not alike), then ``space``, ``search`` and, for
its stages, ``division``.  Times come from :mod:`planner.extras.kernels`; nothing here is fitted to a run.

Besides:

    hf_config      A transformer as a Hugging Face ``config.json`` states it
    recomputation  What of a block is kept where modules or operators of it are computed again
    fits           Whether a step fits by memory alone, and what would make it fit
    placement      How a captured network's layers are placed by a way: stages of blocks, and each layer's cuts over
                   tensor ranks
"""
