"""What a plan costs: layers, links, memory, and the simulation of a whole step.  Pure functions over a profile.

Import from the module that defines a name: ``from planner.costs.predict import predict``.
"""

from __future__ import annotations

__all__: list[str] = []
