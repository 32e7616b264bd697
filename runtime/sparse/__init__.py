"""Stages of several ranks that share out the sites of sparse tensors: inspector and executor (Saltz et al. 1991).

The *inspector* looks at a micro-batch's maps once, on the host: which rows this rank has, which it reads of others, and
which others read of it (:mod:`cuda_ops.sparse.local`).  The *executor* moves just those rows
(:mod:`runtime.sparse.halo`).
"""

from __future__ import annotations

__all__: list[str] = []
