"""Executes plans: one process a rank, the program's actions in their order, over torch.distributed.

:class:`Engine` is one rank's part of a plan; :mod:`~runtime.jobs.launch` starts and watches the processes;
:mod:`~runtime.serial` is the one device that every plan must equal.
"""

from __future__ import annotations

from runtime.build import groups_of
from runtime.engine import Engine, StepResult
from runtime.numerics import NumericsReport
from runtime.serial import serial_step

__all__ = ["Engine", "NumericsReport", "StepResult", "groups_of", "serial_step"]
