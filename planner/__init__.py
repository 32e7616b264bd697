"""The planner: chooses stages, schedule, devices and layouts from a profile.  Needs no torch and no devices."""

from __future__ import annotations

from planner.ir import validation
from planner.ir.profile import Profile
from planner.layers.fitting import misfits

__all__: list[str] = []

validation.also(Profile, misfits)  # floors: files are read below the layer kinds, which have a say in what makes sense
