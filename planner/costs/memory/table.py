"""The memory model in one table: what a rank holds, from when to when; and what ZeRO divides.

Everybody who says how much memory something takes reads this: a rank's row action by action (``lifetimes``), the bounds
of searches (``memory_bound``, which counts fewer lines of it), and a transformer's stages
(:mod:`planner.extras.transformers.memory`).  How many bytes a line has is in ``sizes``.

Parameters, state and gradients that lie in a memory beside the main one of a device are left out here
(``RankMemory.bytes_beside``).  A stage that recomputes keeps received inputs alone, and has its activations
back while B runs, or from I to W; segments of layers that are computed again keep what they read, and have theirs back
one segment at a time.

Ignored: what a process takes before it has a model (interpreter, libraries), what libraries take without torch's
allocator (oneDNN and MKL little), what passes between stages of one rank, and fragmentation.  Where layers have layouts
of their own a rank holds its parts of their parameters, what its group sent it and what it reads and saves whole, each
layer has its part's share of the whole one's levels, and I makes the gradients of weights as well; only where such a
stage recomputes does every action need the workspace of the hungriest layer beyond all that is saved.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum
from itertools import accumulate
from typing import NamedTuple

from planner.ir.schedule import Action, Op, Pipeline, StageGraph
from planner.schedules import schedule

What = IntEnum(
    "What", "PARAMETERS GRADIENTS OPTIMISER_STATE BUFFERS BATCH RECEIVE_BUFFERS ACTIVATIONS WORKSPACE", start=0
)
"""The parts of what a rank holds."""

SizeKey = tuple[str, int, *tuple[int, ...]]
"""Whose size: the name of it, and a transfer slot, an activation slot, a rank, or a rank and a stage."""


class Lifetime(NamedTuple):
    """What a rank holds from the moment ``born`` on, and no longer from ``dies`` on.

    The action number k of a row, of those that are neither receives nor preparations, runs in moment 2 k and is over in
    2 k + 1.  What comes meanwhile counts from the next of them on.

    Attributes:
        size: whose number of bytes it has (:class:`planner.costs.memory.sizes.Sizes`).
    """

    what: What
    born: int
    dies: int
    size: SizeKey


class Line(NamedTuple):
    """A line of the table: the name of a size, and the names of two moments.

    ``F``, ``B``, ``I`` and ``W`` are the moments in which that action of the micro-batch begins, ``F over`` and so on
    when it is over.  A line counts where there are both of its moments: with a backward in halves there is no ``B``.
    """

    what: What
    size: str
    born: str
    dies: str


TABLE: Mapping[str, tuple[Line, ...]] = {
    "rank": (
        Line(What.PARAMETERS, "PARAMETERS", "start", "end"),  # all versions that are in use
        Line(What.OPTIMISER_STATE, "OPTIMISER_STATE", "start", "end"),  # or a part of it; of forward passes alone none
        Line(What.BUFFERS, "BUFFERS", "start", "end"),  # each once
        # Every rank is given the whole batch, and the sites of all its clouds; if the next step's is prepared, twice.
        Line(What.BATCH, "BATCH", "start", "end"),
        # Receives that stand ready for exchanges inside a stage, and for small sums; in shared memory none.
        Line(What.RECEIVE_BUFFERS, "RECEIVE_BUFFERS", "start", "end"),
        # Small tensors are copied into frames to be sent: as many of each kind as are under way at once.
        Line(What.ACTIVATIONS, "frames", "start", "end"),
    ),
    # Of inputs that the step prepares itself.
    "prepared": (Line(What.ACTIVATIONS, "prepared", "made", "end"),),
    "received input": (
        Line(What.RECEIVE_BUFFERS, "posted", "announced", "received"),  # with room to spare; in shared memory none
        Line(What.ACTIVATIONS, "buffer", "received", "F over"),
    ),
    "received gradient": (
        Line(What.RECEIVE_BUFFERS, "posted", "announced", "received"),
        Line(What.ACTIVATIONS, "buffer", "received", "B"),  # of whose peak it is a part
        Line(What.ACTIVATIONS, "buffer", "received", "I"),
    ),
    # Gradients, and outputs that nobody saves, until a message tells that they came; in shared memory the receiver's.
    "sent": (Line(What.ACTIVATIONS, "kept", "sent", "told"),),
    "micro-batch": (
        # What was received, put together if it came in parts; longer if weight gradients are made of it.
        Line(What.ACTIVATIONS, "inputs", "F over", "B over"),
        Line(What.ACTIVATIONS, "inputs of I", "F over", "I over"),
        Line(What.ACTIVATIONS, "inputs of W", "F over", "W over"),
        Line(What.ACTIVATIONS, "saved", "F over", "B"),  # less what lies in such buffers
        Line(What.ACTIVATIONS, "saved", "F over", "I"),
        Line(What.ACTIVATIONS, "deferred", "I over", "W"),  # what deferred weight gradients are made of
    ),
    # Those of parameters that cannot be deferred, from the first I to the first W.
    "early gradients": (Line(What.GRADIENTS, "early gradients", "early", "made"),),
    # Of parameters, from the first B or W on: whole, or in ZeRO-2's slices.
    "gradients": (
        Line(What.GRADIENTS, "gradients", "made", "updated"),
        Line(What.GRADIENTS, "gradients of others", "made", "summed"),  # which other ranks update by (ZeRO-1)
    ),
    # The highest that layers rise (``action_peaks``); what sums of gradients and the largest parameter's update need.
    "action": (Line(What.WORKSPACE, "", "runs", "over"),),
}
"""By what has the moments: a rank, a message, a micro-batch on a stage, gradients of a stage between two updates."""

DIVIDED_FROM = {What.OPTIMISER_STATE: 1, What.GRADIENTS: 2, What.PARAMETERS: 3}
"""The level of ZeRO (Rajbhandari et al. 2020) from which on the ranks of a stage divide it among them."""


def lifetimes_of(
    of: str, key: tuple[int, *tuple[int, ...]], moments: Mapping[str, int], size: str = ""
) -> Iterator[Lifetime]:
    """Of the lines under a heading, those that have both moments.

    Args:
        key: whose sizes they are.
        size: the name of the size, where a line has none.
    """
    for what, name, born, dies in TABLE[of]:
        if born in moments and dies in moments:
            yield Lifetime(what, moments[born], moments[dies], (name or size, *key))


def moments_of(passes: Iterable[tuple[int, Op, tuple[int, int]]]) -> dict[tuple[int, int], dict[str, int]]:
    """By stage and micro-batch, when its passes begin and are over; given when each runs, what it is, and these two."""
    moments = defaultdict[tuple[int, int], dict[str, int]](dict)
    for start, op, key in passes:
        moments[key] |= {op.value: start, f"{op.value} over": start + 1}
    return moments


def divided(what: What, zero: int, ranks: int) -> int:
    """In how many parts ``ranks`` that share a stage hold it at a level of ZeRO."""
    return ranks if zero >= DIVIDED_FROM[what] else 1


def most_held(rows: Iterable[Iterable[Action]], num_stages: int) -> tuple[int, ...]:
    """By stage, of how many micro-batches a rank holds what is saved at most, the one that runs forward included.

    Args:
        rows: of compute, in which a pass begins and is over as in the whole row, messages and sums aside; a stage that
            is never run backward holds none.
    """
    most = [0] * num_stages
    for row in rows:
        changes = defaultdict[int, Counter[int]](Counter)
        passes = ((2 * place, one.op, (one.stage, one.microbatch or 0)) for place, one in enumerate(row))
        for key, moments in moments_of(passes).items():
            sizes = lifetimes_of("micro-batch", key, moments)
            saved = [(each.born, each.dies) for each in sizes if each.size[0] == "saved"]
            for born, dies in saved and [*saved, (moments["F"], moments["F over"])]:  # a forward has what it makes
                changes[key[0]][born] += 1
                changes[key[0]][dies] -= 1
        for stage, by_moment in changes.items():
            most[stage] = max(most[stage], *accumulate(change for _, change in sorted(by_moment.items())))
    return tuple(most)


@functools.cache
def held_in_turn(window: int, num_microbatches: int) -> int:
    """The same of a stage that runs ``window`` forwards, then a backward and a forward in turn."""
    few = min(num_microbatches, window + 2)  # no more are held of more micro-batches
    pipeline = Pipeline(StageGraph.chain(1, few), windows=(min(window, few),))
    return most_held(schedule("1f1b-windowed")(pipeline).rows, 1)[0]
