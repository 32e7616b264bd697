"""The first hour on a GPU: what halopipe does there is run, compared, timed, and written down.

Read ``frame`` (steps of parts, each step in a process of its own, what is written), ``networks`` (profiles, and the
tables' error), ``plans`` (runs beside predictions), then ``machine`` and ``kernels`` (exchanges of two ranks as well).
"""

from __future__ import annotations

__all__: list[str] = []
