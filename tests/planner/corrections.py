"""Random corrections of a profile: of devices within a factor of two, of links too."""

from __future__ import annotations

import math
import random

from planner.ir.profile import (
    ALL_REDUCES,
    BACKWARD,
    FORWARD,
    MESSAGES,
    OVERHEAD,
    STATISTIC_SUMS,
    UPDATE,
    Correction,
    CostClass,
    Profile,
)


def classes(profile: Profile) -> tuple[CostClass, ...]:
    """All classes of costs that a profile has."""
    kinds = sorted({device.kind for device in profile.cluster.devices})
    of_layers = [
        CostClass(what, kind, shared) for what in (FORWARD, BACKWARD) for kind in kinds for shared in (False, True)
    ]
    of_devices = [CostClass(what, kind) for what in (UPDATE, OVERHEAD) for kind in kinds]
    of_links = [
        CostClass(what, link) for what in (MESSAGES, ALL_REDUCES, STATISTIC_SUMS) for link in profile.cluster.links
    ]
    return (*of_layers, *of_devices, *of_links)


def random_corrections(
    draw: random.Random, profile: Profile, spread: float = 0.3, share: float = 0.8
) -> tuple[Correction, ...]:
    """Of about ``share`` of the classes; logarithms of factors scatter by ``spread``."""
    chosen = (of for of in classes(profile) if draw.random() < share)
    return tuple(Correction(of, math.exp(draw.gauss(0.0, spread)), 3) for of in chosen)
