"""Stages of several ranks that share out the sites of sparse tensors: inspector and executor (Saltz et al. 1991).

The *inspector* looks at a micro-batch's maps once, on the host: which rows this rank has, which it reads of others, and
which others read of it (:mod:`cuda_ops.sparse.local`).  The *executor* moves just those rows
(:mod:`runtime.sparse.halo`).

Modules:

    ahead       Batches of sparse and graph networks, made the graph's inputs by whoever prepares them, maybe a step
                ahead
    batch       A batch of clouds as the graph's inputs: prepared when they are asked for, micro-batch by micro-batch
    halo        The executor: layers over sites that several ranks share, as autograd functions
    preparing   Who prepares the batches of a run: of clouds sites and maps; of others an extra
    rules       The rule that puts shared layers in place of sparse operators, on a stage whose ranks share out sites
    share       One rank's share of the sites of a micro-batch, in a stage of several ranks: what it is fed, and what it
                lends
"""

from __future__ import annotations

__all__: list[str] = []
