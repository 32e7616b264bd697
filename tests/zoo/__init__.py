"""Small networks with the habits of real ones, and what is right for each: equal to one device, or refused.

``entries`` says what an entry is, ``judging`` runs one under all plans beside the user's own module, ``drawing`` hands
that module the random numbers of a plan, ``operators`` has networks of one operator each, for the rows of the operator
table.  All others are networks, a module a habit; importing this package registers them.

``packages`` has networks of other people, ``scripts`` some as their users call them: rows of ``benchmarks.networks``
and ``benchmarks.journey``.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module

from tests.zoo.entries import NETWORKS

__all__ = ["ALL", "NETWORKS"]

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("test_"):
        import_module(f"{__name__}.{_module.name}")

ALL = {name: entry for name, entry in NETWORKS.items() if not entry.origin}
"""Those that were written for the zoo."""
