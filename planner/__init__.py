"""The planner: chooses stages, schedule, devices and layouts from a profile.  Needs no torch and no devices."""

from __future__ import annotations

__all__: list[str] = []
