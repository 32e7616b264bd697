"""Parallel degrees of a transformer's training step, and plans of them.

Modules:

    command   ``halopipe ways``: how to divide a transformer's training step over a cluster of GPUs
    options   What ``halopipe ways`` takes
    networks  Its network: a name, a ``config.json``, or sizes
    fits      What ``halopipe ways --fits`` says
    ways      What ``halopipe ways`` searches and says; ``halopipe plan --ways``
    evidence  How far off it was on published runs, by kind of run: what its range is made of
    page      ``halopipe ways --report``: time against memory, the best way's step, what limits it
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from halopipe.extra import FaceExtra

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from planner.ir.plan import Plan
    from planner.ir.profile import Profile


class Transformers(FaceExtra):
    """Parallel degrees of a transformer's training step."""

    verbs: ClassVar = {"17 ways": "halopipe.extras.transformers.command:ways"}

    def plan_by_ways(
        self, profile: Profile, ways: str, global_batch: int, micro_batch: Sequence[int], memory_bytes: int
    ) -> Plan:
        from halopipe.extras.transformers.ways import plan_by

        return plan_by(profile, ways, global_batch, micro_batch, memory_bytes=memory_bytes)

    def write_page(self, file: Path, page: Path) -> bool:
        from halopipe.extras.transformers import page as pages
        from halopipe.extras.transformers.ways import asked_again, space_of

        report = asked_again(file)
        if report is not None:
            pages.write(report, space_of(report.asked.options), page)
        return report is not None


EXTRA = Transformers()
