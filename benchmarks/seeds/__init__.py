"""Systems that split a network in one more way: what each gains here beside what is published, and whether it is exact.

    python -m benchmarks.seeds [--quick] [--json]

A function of rows a kind of system (:data:`SYSTEMS`).  *Predicted* gains are the simulator's; *executed*
are jobs of this host, compared with one device by :mod:`~benchmarks.seeds.jobs`.  Nothing is measured with a clock
unless its row says so.
"""

from __future__ import annotations

from benchmarks.report import Row
from benchmarks.seeds import boards, branches, fields, graphs, jobs, parareal, schedules, streams, terapipe

__all__ = ["SYSTEMS", "measure"]

SYSTEMS = (
    schedules.rows,
    branches.rows,
    parareal.rows,
    terapipe.rows,
    streams.rows,
    fields.rows,
    graphs.rows,
    boards.rows,
    jobs.transformer_rows,
    jobs.primitive_rows,
)
"""In the order of the table."""


def measure(quick: bool) -> list[Row]:
    """All rows."""
    return [row for rows in SYSTEMS for row in rows(quick)]
