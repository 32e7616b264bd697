"""The bound of a complete pipeline, every message and window known: so that few are simulated.

A schedule lets stage s do ``early`` forwards before its first backward, and leaves ``late`` backwards after its last
forward (GPipe: M and M; 1F1B: the stages downstream, twice).  Per stage, with f, b the shortest F and B, w all its
work, c the messages between neighbours and M micro-batches:

    begin(s) = max(early f, f + 2 c + begin(s + 1)) + b             from its first F to the end of its first B
    finish(s) = f + max(late b, 2 c + finish(s + 1) + b)            from the start of its last F to its last B
    wait for the first B:   f + 2 c + begin(s + 1)                  instead of early F
    wait for the last B:    2 c + finish(s + 1) + b                 instead of late B

A stage that does all else without a pause still pays both waits: w - early F - late B + the two.  Holds where each
stage certainly reads from the one before, gets gradients back, and micro-batches keep their order; else it says 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.solvers.search.frontier import Node
from planner.solvers.search.windows import Window, windows


@dataclass(frozen=True, slots=True)
class _Stage:
    """Scalars of a stage.

    Attributes:
        there_s, back_s: messages to and from the stage behind; 0 at the end.
        path_s: ``there_s`` for a single rank of the stage, whose message may be smaller.
    """

    forward_s: float
    backward_s: float
    longest_forward_s: float
    longest_backward_s: float
    work_s: float
    last_s: float
    overhead_s: float
    there_s: float = 0.0
    path_s: float = 0.0
    back_s: float = 0.0


def refined_bound_s(node: Node) -> float:
    """What the complete pipeline ``node`` takes at least; 0 if there is nothing to say."""
    crossing = node.bounds.stretches.crossing
    links = list(pairwise(node.cuts))[:-1]
    if not all(crossing.has_gradient[a, b] for a, b in links):
        return 0.0
    found = windows(node.bounds.schedule, len(node.groups), len(node.bounds.micro_batches))
    if found is None:
        return 0.0
    return _bound_s(_stages(node), found, len(node.bounds.micro_batches))


def _stages(node: Node) -> list[_Stage]:
    bounds = node.bounds
    found = []
    for s, (group, (a, b)) in enumerate(zip(node.groups, pairwise(node.cuts), strict=True)):
        messages: tuple[float, ...] = ()
        if s + 1 < len(node.groups):
            behind = node.groups[s + 1]
            messages = tuple(float(seconds[a, b]) for seconds in bounds.link_s(group, behind))
        found.append(
            _Stage(
                float(group.head_s[a, b]),
                float(group.back_s[a, b]),
                float(group.longest_head_s[a, b]),
                float(group.longest_back_s[a, b]),
                float(bounds.work_s(group)[a, b]),
                float(group.last_s[a, b]),
                group.overhead_s,
                *messages,
            )
        )
    return found


def _bound_s(stages: Sequence[_Stage], found: Sequence[Window], num_microbatches: int) -> float:
    begin = finish = 0.0  # of the stage behind
    end = total = 0.0  # G and V of the stage behind
    for stage, window in zip(reversed(stages), reversed(found), strict=True):
        is_last = stage is stages[-1]
        first_backward = 0.0 if is_last else stage.forward_s + stage.there_s + begin + stage.back_s
        last_backward = 0.0 if is_last else stage.path_s + finish + stage.back_s + stage.backward_s
        before = window.early * stage.longest_forward_s + stage.overhead_s
        after = window.late * stage.longest_backward_s + stage.overhead_s
        own = max(stage.work_s, first_backward + stage.work_s - before, stage.work_s - after + last_backward)
        if window.early < num_microbatches:
            own = max(own, first_backward + (stage.work_s - before - after) + last_backward)
        if not is_last:
            own = max(own, stage.forward_s + stage.there_s + end + stage.back_s + stage.backward_s)
            total = max(own + stage.last_s, stage.forward_s + stage.there_s + total)
        else:
            total = own + stage.last_s
        begin = max(window.early * stage.forward_s, first_backward) + stage.backward_s
        finish = stage.forward_s + max(window.late * stage.backward_s, last_backward)
        end = own
    return total
