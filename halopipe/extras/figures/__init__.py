"""Plans and runs as figures, as one offline page, and in notebooks: ``halopipe draw``, ``report`` and ``notebook``.

Read ``figures`` (matplotlib), ``report`` with ``charts`` (bokeh) and the templates in ``page``, then ``notebook``.

Besides:

    colours        Of figures and pages, and what operations are called
    graph_layout   A network on paper: layers from left to right, wrapped into rows as words are, each value on a lane
                   of its own
    verbs          ``halopipe report``, ``draw`` and ``notebook``
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from halopipe.extra import FaceExtra

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from planner.ir.plan import Plan
    from planner.ir.profile import Profile
    from planner.ir.timeline import Timeline, TimelineFile


class FigureVerbs(FaceExtra):
    """Plans and runs as pictures."""

    verbs: ClassVar = {
        "40 report": "halopipe.extras.figures.verbs:report",
        "42 draw": "halopipe.extras.figures.verbs:draw",
        "44 notebook": "halopipe.extras.figures.verbs:notebook",
    }
    public: ClassVar = {"halopipe.reports.figures": {"*": "halopipe.extras.figures.figures"}}

    def write_report(
        self, files: Sequence[str | Path | Plan | Profile | TimelineFile], path: str | Path, profile: Profile | None
    ) -> bool:
        from halopipe.extras.figures import report

        report.write(files, path, profile)
        return True

    def register_notebook(self, shell: Any) -> None:
        from halopipe.extras.figures import notebook

        notebook.register(shell)

    def draw_run(self, folder: Path, timelines: Sequence[Timeline], devices: Sequence[str]) -> None:
        from halopipe.extras.figures.figures import draw_step

        draw_step(folder, timelines, devices)


EXTRA = FigureVerbs()
