"""The published planners: each one's own objective under its own restrictions, solved exactly, with a proof.

One module a planner, which begins with its mathematical program and has ``solve(instance, ...) -> Answer``; import from
the module: ``from planner.peers import pipedream``.  What a peer's records are is said by ``planner.formats``; the same
planners as baselines on a :class:`planner.ir.problem.Problem` are in ``planner.solvers``.
"""

from __future__ import annotations

__all__: list[str] = []
