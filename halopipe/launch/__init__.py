"""From a plan to its ranks: spawned here, or started by torchrun; a profile of several hosts is such a job, too.

Read ``run``, then ``restart``, ``spawn``, ``processes`` and ``worker`` (ranks of this host) or ``job_environment`` and
``torchrun`` (one rank of a job), and ``combine`` (their results as one); ``execute`` is a rank inside a script of one's
own.  What a rank does is in ``halopipe.training``.
"""

from __future__ import annotations

__all__: list[str] = []
