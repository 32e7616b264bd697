"""All that extras may add to the command line and the Python API (:mod:`planner.ir.extras` says how)."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from planner.ir.extras import Extra, ImportPaths

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from halopipe.planning.options import ProfileOptions
    from planner.ir.plan import Plan
    from planner.ir.profile import ModelSource, Profile
    from planner.ir.timeline import Timeline, TimelineFile


class FaceExtra(Extra):
    """What an extra may add to the face."""

    verbs: ClassVar[ImportPaths] = MappingProxyType({})
    """Verbs of the command line, whose parameters typer reads, by place in the help and name: ``46 export``."""

    def profile_on(
        self, source: ModelSource, options: ProfileOptions, refused: Sequence[str], quiet: bool
    ) -> Profile | None:
        """A profile that is not measured: on the machines of ``options.on``, which are not here.

        Args:
            refused: options that are of no use here, and were given.
        """
        return None

    def plan_by_ways(
        self, profile: Profile, ways: str, global_batch: int, micro_batch: Sequence[int], memory_bytes: int
    ) -> Plan | None:
        """The plan that ``plan --ways`` states."""
        return None

    def write_report(
        self, files: Sequence[str | Path | Plan | Profile | TimelineFile], path: str | Path, profile: Profile | None
    ) -> bool:
        """Writes a report of a plan and what belongs to it; whether it was done."""
        return False

    def serve(self, plan: Plan, module: Any, **options: Any) -> Any | None:
        """A plan that answers requests."""
        return None

    def register_notebook(self, shell: Any) -> None:
        """Tells IPython's ``shell`` how to show plans."""

    def draw_run(self, folder: Path, timelines: Sequence[Timeline], devices: Sequence[str]) -> None:
        """Draws the step of a run, predicted and measured, into a folder."""
