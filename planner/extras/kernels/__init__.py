"""Kernels and links of GPUs that are not here, from tables that others measured.

    kernels("A100-80GB", "bfloat16").gemm(2048, 12288, 12288)      seconds, a range, and the evidence
    links("a100_dgx").collective("all_reduce", 50 << 20, 8, 8)

Read: ``estimates`` (a time and its range), ``tables`` (what is read), ``curves`` (the formulas), ``fit`` (constants and
held-back errors), ``models`` (kernels of a device), ``links``, ``clusters`` (systems by name).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.planner_extra import PlannerExtra

if TYPE_CHECKING:
    from collections.abc import Iterable


class KernelSystems(PlannerExtra):
    """GPUs that one does not have at hand."""

    def systems(self) -> Iterable[str]:
        from planner.extras.kernels.clusters import SYSTEMS

        return SYSTEMS


EXTRA = KernelSystems()
