"""The planner: chooses stages, schedule, devices and layouts from a profile.  Needs no torch and no devices."""

from __future__ import annotations

from collections.abc import Iterator

from planner.ir import validation
from planner.ir.profile import Profile
from planner.ir.quantities import Fault

__all__: list[str] = []


def _misfits(profile: Profile) -> Iterator[Fault]:
    from planner.layers.fitting import misfits  # late: a rank reads no profile

    yield from misfits(profile)


validation.also(Profile, _misfits)  # floors: files are read below the layer kinds, which have a say in what makes sense
