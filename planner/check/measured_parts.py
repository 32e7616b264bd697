"""What a part of a layer costs, looked up a second time for the checker: the rule of ``planner.costs.layers.shards``.

None of its code: one loop over the measurements for every question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from planner.check.families import Modelled
from planner.check.reading import at_samples
from planner.ir.profile import Measurement, Profile

Part = tuple[int, ...]


def cost_of_part(
    profile: Profile,
    device_kind: str,
    layer: str,
    samples: int,
    part: Part,
    whole: Part,
    what: str,
    modelled: Modelled | None = None,
    share: Mapping[str, float] | None = None,
) -> float | None:
    """Seconds or bytes (``what``) of a part; None where it is a share of as many whole samples.

    Args:
        part, whole: extents of the work of the part and of the layer, without the dim of the samples.
        modelled: for parts that nobody measured at any number of samples; None: there is no model of them.
        share: by name: the seconds of as large a share of the whole at these samples.
    """
    if part == whole or samples == 0 or 0 in part:
        return None
    measured = [m for m in profile.parts.get(device_kind, ()) if m.layer == layer]
    alike = [m for m in measured if m.part == part]
    if alike:
        try:
            return at_samples(alike, samples, what)
        except LookupError:
            alike = []
    if modelled is not None and share is not None and what in share:
        least = [share]
        for m in measured:
            if m.samples == samples:
                least.append({name: getattr(m, name) * math.prod(part) / math.prod(m.part) for name in share})
        said = modelled.part(layer, samples, part, least, what)
        if said is not None:
            return said
    now = [m for m in measured if m.samples == samples and _is_cut(m.part, whole) == _is_cut(part, whole)]
    if not now:
        return None
    now += [m for m in profile.measurements[device_kind] if m.layer == layer and m.samples == samples]
    return _by_elements(now, math.prod(part), math.prod(whole), what)


def _by_elements(measured: Sequence[Measurement], wanted: int, whole: int, what: str) -> float:
    """The value at ``wanted`` elements of work."""
    sizes = [(math.prod(m.part) if m.part else whole, m) for m in measured]
    below = [(size, m) for size, m in sizes if size <= wanted]
    above = [(size, m) for size, m in sizes if size >= wanted]
    lowest, highest = max((size for size, _ in below), default=0), min((size for size, _ in above), default=0)
    # Of several of one size the last counts below, the first above.
    low = next((m for size, m in reversed(below) if size == lowest), None)
    high = next((m for size, m in above if size == highest), None)
    if low is not None and high is not None and low.key == high.key and lowest != highest:
        a, b = float(getattr(low, what)), float(getattr(high, what))
        if a <= 0 or b <= 0:
            return a + (b - a) * (wanted - lowest) / (highest - lowest)
        return float(a * (b / a) ** (math.log(wanted / lowest) / math.log(highest / lowest)))
    is_low = high is None or (low is not None and wanted * wanted <= lowest * highest)
    nearest, size = (low, lowest) if is_low else (high, highest)
    return float(getattr(nearest, what)) * wanted / size


def _is_cut(part: Part, whole: Part) -> list[bool]:
    return [mine < of_all for mine, of_all in zip(part, whole, strict=True)]
