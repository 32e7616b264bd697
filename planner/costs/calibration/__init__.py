"""Corrections of a profile's costs: fitted to runs of plans, and applied.

Modules:

    apply_corrections   A profile's costs under its corrections (``Profile.calibration``), and what is left to correct
                        by stage
    fit                 From what runs of plans showed to corrections of a profile's costs
    machine             How fast the machine is now, told apart from what is wrong with the model of it
"""

from __future__ import annotations

__all__: list[str] = []
