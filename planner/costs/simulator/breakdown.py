"""Where the time of a step goes on each rank, from a predicted timeline or a measured one by the same rules.

Every instant between a step's start and its end counts once, as one of

    compute          forward, backward, update, preparing on the rank itself (of the next step: what its waits did not
                     hide), and what the executor does about them
    communication    sends, and what does not overlap with computing: waiting for a message after its sender began to
                     send it, for a sum of gradients once all members are there, exchanges inside an action
    bubble           waiting for what another rank has not computed yet, while the rank has something left to do
    idle             after its last action

A message of several senders counts from the last of them that began before it was there.  What hosts prepare beside
their devices is nobody's time; waiting for it is bubble.  A measured timeline does not tell exchanges from computing
around them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from planner.ir.timeline import Span, Timeline

_RECEIVED = re.compile(r"(\d+)RECV_([FB]\d+)<(\d+)(!|~~?|)")


@dataclass(frozen=True, slots=True)
class Parts:
    """The four parts of a rank's step; they add up to it."""

    compute_s: float
    communication_s: float
    bubble_s: float
    idle_s: float

    def seconds(self, names: str) -> float:
        """Of a part, or of several with `` + `` between them."""
        by_name = {field.name.removesuffix("_s"): getattr(self, field.name) for field in fields(self)}
        return float(sum(by_name[name] for name in names.split(" + ")))


def breakdown(
    timeline: Timeline,
    num_ranks: int,
    exchanged_s: Sequence[float] = (),
    beside: Sequence[bool] = (),
    left_s: Sequence[float] = (),
) -> tuple[Parts, ...]:
    """The parts by rank.

    Args:
        exchanged_s: by span of the timeline, how much of it ranks exchange parts of tensors; empty: not known.
        beside: by rank, whether what is prepared is prepared beside it; empty: nowhere.
        left_s: by rank, what it prepares of the next step after its last action; empty: nothing.
    """
    sends: dict[str, list[float]] = defaultdict(list)
    joined: dict[str, list[float]] = defaultdict(list)
    rows: list[list[tuple[Span, float]]] = [[] for _ in range(num_ranks)]
    for number, span in enumerate(timeline.spans):
        if "SEND" in span.action:
            sends[span.action].append(span.start_s)
        elif "REDUCE" in span.action:
            joined[span.action].append(span.start_s)
        if not ("PREP" in span.action and beside and beside[span.rank]):
            rows[span.rank].append((span, exchanged_s[number] if exchanged_s else 0.0))
    parts = [_of_rank(row, timeline.step_s, sends, joined) for row in rows]
    more_s = [min(each.idle_s, own_s) for each, own_s in zip(parts, left_s or [0.0] * num_ranks, strict=True)]
    return tuple(
        replace(each, compute_s=each.compute_s + own_s, idle_s=each.idle_s - own_s)
        for each, own_s in zip(parts, more_s, strict=True)
    )


def mean_parts(parts: Sequence[Parts]) -> Parts:
    """The mean of several ranks."""
    count = max(1, len(parts))
    return Parts(
        sum(each.compute_s for each in parts) / count,
        sum(each.communication_s for each in parts) / count,
        sum(each.bubble_s for each in parts) / count,
        sum(each.idle_s for each in parts) / count,
    )


def _of_rank(
    row: Sequence[tuple[Span, float]],
    step_s: float,
    sends: Mapping[str, Sequence[float]],
    joined: Mapping[str, Sequence[float]],
) -> Parts:
    """Time that spans share belongs to the one that started first, and time between them is bubble."""
    compute_s = communication_s = bubble_s = until_s = 0.0
    for span, exchanged_s in sorted(row, key=lambda pair: (pair[0].start_s, pair[0].stop_s)):
        start_s = max(span.start_s, until_s)
        stop_s = max(span.stop_s, until_s)
        bubble_s += start_s - until_s
        until_s = stop_s
        if "RECV" in span.action:
            waited_s = _clipped(_sent_s(span, sends), start_s, stop_s) - start_s
        elif "REDUCE" in span.action:
            waited_s = _clipped(max(joined[span.action]), start_s, stop_s) - start_s
        elif "SEND" in span.action:
            waited_s = 0.0
        else:
            moved_s = min(exchanged_s, stop_s - start_s)
            compute_s += stop_s - start_s - moved_s
            communication_s += moved_s
            continue
        bubble_s += waited_s
        communication_s += stop_s - start_s - waited_s
    return Parts(compute_s, communication_s, bubble_s, max(0.0, step_s - until_s))


def _sent_s(span: Span, sends: Mapping[str, Sequence[float]]) -> float:
    """When the message that a span waits for began to be sent; its own start if no send is known."""
    match = _RECEIVED.fullmatch(span.action)
    if match is None:
        return span.start_s
    stage, what, peer, mark = match.groups()
    began = [at for at in sends.get(f"{peer}SEND_{what}>{stage}{mark}", ()) if at <= span.stop_s]
    return max(began, default=span.start_s)


def _clipped(at_s: float, low_s: float, high_s: float) -> float:
    return min(max(at_s, low_s), high_s)
