"""What makes a choice of spans a pipeline: the path, devices, memory, and the numbers of stages."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pulp

from planner.solvers.ilp.model import Model


def path(model: Model) -> None:
    """A stage starts at the first cut; where one ends, its group hands over to that of the next."""
    spans, handovers = model.instance.spans, model.instance.handovers
    starts, ends = _by(spans.first, spans.group), _by(spans.last, spans.group)
    given, taken = _by(handovers.cut, handovers.source), _by(handovers.cut, handovers.destination)
    model.add(model.number(model.stages, np.flatnonzero(spans.first == 0)) == 1, "start")
    for cut in range(1, model.instance.end):
        for group in range(len(model.instance.groups)):
            for name, stages, over in (("end", ends, given), ("begin", starts, taken)):
                here, there = stages.get((cut, group), []), over.get((cut, group), [])
                if here or there:
                    row = model.number(model.stages, here) == model.number(model.handovers, there)
                    model.add(row, f"{name}{cut}_{group}")


def resources(model: Model) -> None:
    """No more devices of a class, nor time on them, than there is; like hosts in order; a limit on stages.

    Time on devices follows from the rest; while z are fractions it says more.
    """
    instance, spans = model.instance, model.instance.spans
    counts = np.array([group.takes for group in instance.groups])[spans.group]
    used = [pulp.lpSum(int(count[v]) * model.stages[v] for v in np.flatnonzero(count)) for count in counts.T]
    across_hosts = any(len({member.host for member in group.classes}) > 1 for group in instance.groups)
    for number, found in enumerate(instance.classes):
        model.add(used[number] <= len(found.ranks), f"devices{number}")
        if found.twin >= 0 and not across_hosts:  # else the order of a group's hosts tells them apart
            model.add(used[number] <= used[found.twin], f"twin{number}")
        work_s = counts[:, number] * (spans.work_s + spans.last_s)
        busy = model.seconds(work_s, model.stages, np.flatnonzero(work_s))
        model.add(busy <= len(found.ranks) * model.step, f"capacity{number}")
    model.add(pulp.lpSum(model.stages) <= instance.most_stages, "stages")


def depths(model: Model) -> None:
    """A stage that starts at a cut has at most ``depth`` stages downstream, if all of them surely wait in a row."""
    spans, most = model.instance.spans, model.instance.most_stages
    broken = ~spans.linked & (spans.last < model.instance.end)
    for cut in range(model.instance.end):
        tight = np.flatnonzero((spans.first == cut) & (spans.depth < most))
        if len(tight):
            later = np.flatnonzero(spans.first >= cut)
            weights = np.where(broken[later], 1 - most, 1)
            downstream = pulp.lpSum(int(n) * model.stages[v] for v, n in zip(later, weights, strict=True))
            missing = pulp.lpSum(int(most - spans.depth[v]) * model.stages[v] for v in tight)
            model.add(downstream + missing <= most, f"depth{cut}")


def stage_numbers(model: Model) -> None:
    """The number of a layer's stage is how many stages start before its end, less one."""
    instance, most = model.instance, model.instance.most_stages
    for rule, (number, fixed, layers) in enumerate(instance.stage_rules):
        for cut in sorted({int(np.searchsorted(instance.cuts, layer, side="right")) - 1 for layer in layers}):
            started = model.number(model.stages, np.flatnonzero(instance.spans.first <= cut))
            name = f"number{rule}_{cut}"
            if fixed:
                model.add(started == number + 1, name)
            else:
                above = model.binary(f"above{rule}_{cut}")
                model.add(started <= number + most * above, f"{name}_below")
                model.add(started >= (number + 2) * above, f"{name}_above")


def _by(cut: Iterable[int], group: Iterable[int]) -> dict[tuple[int, int], list[int]]:
    """Indices by (cut, group)."""
    found: dict[tuple[int, int], list[int]] = {}
    for index, key in enumerate(zip(map(int, cut), map(int, group), strict=True)):
        found.setdefault(key, []).append(index)
    return found
