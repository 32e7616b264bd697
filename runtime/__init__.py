"""Executes plans: one process a rank, the program's actions in their order, over torch.distributed.

:class:`Engine` is one rank's part of a plan; :mod:`~runtime.monitor.watch` starts and watches the processes;
:mod:`~runtime.numerics.single_device` is the one device that every plan must equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.ir.lazy import lazily

if TYPE_CHECKING:
    from runtime.engine import Engine, StepResult
    from runtime.numerics.compare import NumericsReport
    from runtime.numerics.single_device import serial_step
    from runtime.stage.builder import groups_of

__all__ = ["Engine", "NumericsReport", "StepResult", "groups_of", "serial_step"]

_HOMES = {
    "Engine": "engine",
    "NumericsReport": "numerics.compare",
    "StepResult": "engine",
    "groups_of": "stage.builder",
    "serial_step": "numerics.single_device",
}

__getattr__ = lazily(__name__, _HOMES)
