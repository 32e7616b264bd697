"""Systems that split a network in one more way: what each gains here beside what is published, and whether it is exact.

    python -m benchmarks.seeds [--quick] [--json]

A module a kind of system, each with its ``rows`` (:data:`SYSTEMS`).  *Predicted* gains are the simulator's; *executed*
are jobs of this host, compared with one device by :mod:`~benchmarks.seeds.jobs`.  Nothing is measured with a clock
unless its row says so.
"""

from __future__ import annotations

from benchmarks.report import Row
from benchmarks.seeds import (
    boards,
    branches,
    fields,
    graphs,
    parareal,
    primitives,
    schedules,
    streams,
    terapipe,
    transformers,
)

__all__ = ["SYSTEMS", "measure"]

SYSTEMS = (schedules, branches, parareal, terapipe, streams, fields, graphs, boards, transformers, primitives)
"""In the order of the table."""


def measure(quick: bool) -> list[Row]:
    """All rows."""
    return [row for system in SYSTEMS for row in system.rows(quick)]
