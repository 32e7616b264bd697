"""Executes plans: one process a rank, the program's actions in their order, over torch.distributed.

:class:`Engine` is one rank's part of a plan; :mod:`~runtime.monitor.watch` starts and watches the processes;
:mod:`~runtime.numerics.single_device` is the one device that every plan must equal.
"""

from __future__ import annotations

from runtime.engine import Engine, StepResult
from runtime.numerics.compare import NumericsReport
from runtime.numerics.single_device import serial_step
from runtime.stage.builder import groups_of

__all__ = ["Engine", "NumericsReport", "StepResult", "groups_of", "serial_step"]
