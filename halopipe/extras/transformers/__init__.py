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

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from halopipe.extra import FaceExtra

if TYPE_CHECKING:
    from collections.abc import Sequence

    from planner.ir.plan import Plan
    from planner.ir.profile import Profile
    from planner.ir.timeline import TimelineFile


class Transformers(FaceExtra):
    """Parallel degrees of a transformer's training step."""

    verbs: ClassVar = {"17 ways": "halopipe.extras.transformers.command:ways"}

    def plan_by_ways(
        self, profile: Profile, ways: str, global_batch: int, micro_batch: Sequence[int], memory_bytes: int
    ) -> Plan:
        from halopipe.extras.transformers.ways import plan_by

        return plan_by(profile, ways, global_batch, micro_batch, memory_bytes=memory_bytes)

    def write_report(
        self, files: Sequence[str | Path | Plan | Profile | TimelineFile], path: str | Path, profile: Profile | None
    ) -> bool:
        """Of one file, where that is an answer of ``halopipe ways``."""
        from halopipe.extras.transformers import page
        from halopipe.extras.transformers.ways import asked_again, space_of

        report = asked_again(Path(files[0])) if len(files) == 1 and isinstance(files[0], (str, Path)) else None
        if report is not None:
            page.write(report, space_of(report.asked.options), Path(path))
        return report is not None


EXTRA = Transformers()
