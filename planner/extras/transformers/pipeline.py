"""Chunks of a pipeline: what a step of them takes, simulated, and the least that it can take, by the core's recurrence.

    stage       head and back: passes of a micro-batch in its first chunk; work: of all of them in all its chunks
    message     in the passes of who waits for it, once or from both sides (``Sends``); else on a channel beside them
    1F1B        stage r of p keeps p - r micro-batches: it makes rounds there and back, and waits under its window
    any other   whatever is kept

Of stages alike the least of 1F1B is (M + p - 1) (f + b), the simulator's time; of unlike ones the simulator's too, in
294 of 300 drawn at random (a test draws others).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.costs.simulator.events import execute
from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.program import CompiledProgram, compile_program
from planner.costs.timeline import Trace
from planner.extras.transformers.shape import Sends
from planner.ir.program import Message, Part
from planner.ir.schedule import MESSAGE, PER_STEP, Action, Op, Pipeline, StageGraph
from planner.passes import lower
from planner.schedules import positions, schedule
from planner.solvers.best_first.message_bound import HandoverBound
from planner.solvers.best_first.recurrence import (
    Labels,
    LaidOutStages,
    across,
    others_of,
    prepend,
    rounds_of,
    waits_of,
)

MOST_ACTIONS = 12_000
"""Of a pipeline that is simulated whole: about a second."""
MOST_BLOCKS = 192
"""That :func:`even_s` is asked for: an array of their square for each stage."""
N = TypeVar("N", float, NDArray[np.float64])
"""Seconds of one pass, or of many."""
_ALWAYS = np.array([True])
"""A stage reads what the stage before sends, and a gradient comes back."""


def longer(stages: LaidOutStages, behind: Labels, message_s: float, micro_batches: int, window: int) -> Labels:
    """Pipelines with a stage more, elementwise.

    Args:
        behind: of the stages that are there (:func:`label_of`).
        message_s: of one that overlaps.
        window: micro-batches that the stage keeps; of fewer than there are it waits for gradients, as in 1F1B.
    """
    if message_s:
        behind = across(behind, _overlapped(message_s, micro_batches))
    if window < micro_batches:
        work_s = stages.work_s + waits_of(stages, behind.round_trip_s, window - 1, np.zeros(1))
        stages = replace(stages, work_s=work_s, all_work_s=work_s)
    rounds = rounds_of(micro_batches, np.array([window]))
    others_s = others_of(micro_batches, stages.forward_s, stages.backward_s)
    return prepend(stages, behind, rounds, 0.0, _ALWAYS, _ALWAYS, others_s)


def _overlapped(message_s: float, micro_batches: int) -> HandoverBound:
    """A message each way beside the passes, one after another on its channel."""
    hop_s = np.array([message_s])
    all_s = micro_batches * hop_s
    return HandoverBound(
        hop_s, hop_s, hop_s, hop_s, load_forward_s=all_s, load_backward_s=all_s, load_both_s=np.zeros(1)
    )


def label_of(trip_s: float = 0.0, end_s: float = 0.0) -> Labels:
    """Of one pipeline, after whose last backward nothing is counted here; of none."""
    end = np.array([end_s])
    return Labels(np.array([trip_s]), end, end, end, end)


@functools.cache
def even_s(stages: int, blocks: int, micro_batches: int) -> NDArray[np.float64]:
    """[blocks and fewer] what 1F1B takes at least, however they are divided; a block's two passes take 1.

    As long as each other: what stages wait for is convex in f for f + b given, so that no other f takes less.  And no
    message, embedding or head makes a pipeline shorter.
    """
    numbers = np.arange(blocks + 1)
    if not stages:
        return np.where(numbers, np.inf, 0.0)
    own = numbers[:, None].astype(float)
    behind = numbers - numbers[:, None]  # [of the stage, of all]
    end = np.where((own > 0) & (behind >= 0), even_s(stages - 1, blocks, micro_batches)[behind], np.inf)
    pipelines = Labels(np.maximum(behind, 0.0), end, end, end, end)
    work = micro_batches * own
    stage = LaidOutStages(own / 2, own / 2, work, work)
    return np.asarray(longer(stage, pipelines, 0.0, micro_batches, stages).last_backward_s.min(axis=0))


@dataclass(frozen=True, slots=True)
class Chunks:
    """Passes of a micro-batch through each chunk, messages included where somebody waits for them.

    Attributes:
        overlapped_s: of a message beside the passes.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    stages: int
    overlapped_s: float = 0.0

    def least_s(self, micro_batches: int) -> float:
        """No synchronous schedule is shorter."""
        pipelines = label_of()
        for stage in reversed(range(self.stages)):
            forward_s = np.array(self.forward_s[stage :: self.stages])
            backward_s = np.array(self.backward_s[stage :: self.stages])
            work_s = micro_batches * (forward_s + backward_s).sum(keepdims=True)
            own = LaidOutStages(forward_s[:1], backward_s[:1], work_s, work_s)
            message_s = self.overlapped_s if stage < self.stages - 1 else 0.0
            pipelines = longer(own, pipelines, message_s, micro_batches, micro_batches)
        return float(pipelines.last_backward_s[0])

    def step_s(self, micro_batches: int, name: str = "1f1b") -> float:
        """By the simulator; where there are too many actions for it the rest as :meth:`_cycle_s` says."""
        most = MOST_ACTIONS // (2 * len(self.forward_s)) // self.stages * self.stages
        simulated = min(micro_batches, max(most, 4 * self.stages))
        if self.stages == 1:
            return micro_batches * (sum(self.forward_s) + sum(self.backward_s))
        simulated_s = self.simulated(simulated, name)[1].step_s
        return simulated_s + (micro_batches - simulated) * self._cycle_s(name)

    def simulated(self, micro_batches: int, name: str) -> tuple[CompiledProgram, Trace]:
        """All passes of so many micro-batches, with when each begins and ends."""
        interleave = len(self.forward_s) // self.stages
        compiled = _compiled("interleaved" if interleave > 1 else name, self.stages, interleave, micro_batches)
        seconds = [self._action_s(slot.action) for slot in compiled.actions]
        transfers = [self.overlapped_s] * len(compiled.transfers)
        return compiled, execute(compiled, SlotPrices(seconds, transfers, range(len(compiled.channels))))

    def _action_s(self, action: Action) -> float:
        """Of a pass; nothing of a message that is apart from it, nor of what comes after all passes."""
        if action.op in MESSAGE or action.op in PER_STEP:
            return 0.0
        return (self.forward_s if action.op is Op.FORWARD else self.backward_s)[action.stage]

    def _cycle_s(self, name: str) -> float:
        """What one more micro-batch of many adds: GPipe's forwards end before its backwards begin."""
        p = self.stages
        x = self.overlapped_s
        ahead = [sum(self.forward_s[r::p]) for r in range(p)]
        back = [sum(self.backward_s[r::p]) for r in range(p)]
        if name == "gpipe":
            return max(*ahead, x) + max(*back, x)
        return max(*(f + b for f, b in zip(ahead, back, strict=True)), x)


@functools.lru_cache(maxsize=64)
def _compiled(name: str, stages: int, interleave: int, micro_batches: int) -> CompiledProgram:
    number = stages * interleave
    graph = StageGraph.chain(number, micro_batches)
    placed = positions(name, stages, interleave)[:number]
    rows = schedule(name)(Pipeline(graph, placed))
    part = (Part("activation", (), 1),)
    messages = {
        (s, s + 1, m): (Message(placed[s], placed[s + 1], part, part),)
        for s in range(number - 1)
        for m in range(micro_batches)
    }
    program = lower(rows, graph, tuple((position,) for position in placed), messages, stages)
    return compile_program(program, (1,) * micro_batches)


def chunked(passes: Sequence[tuple[float, float]], hop_s: Sequence[float], sends: Sends, stages: int) -> Chunks:
    """Chunks of (forward, backward), with the messages that somebody waits for.

    Args:
        hop_s: a message from each chunk to the next; one fewer than there are chunks.
    """
    around = [0.0, *hop_s, 0.0]
    waited = [waited_s(sends, *sides) for sides in pairwise(around)]
    forward = tuple(f + ahead_s for (f, _), (ahead_s, _) in zip(passes, waited, strict=True))
    backward = tuple(b + back_s for (_, b), (_, back_s) in zip(passes, waited, strict=True))
    overlapped_s = max(hop_s, default=0.0) if sends is Sends.OVERLAPPED else 0.0
    return Chunks(forward, backward, stages, overlapped_s)


def waited_s(sends: Sends, before_s: N, behind_s: float) -> tuple[N, N]:
    """What a stage's forward and its backward wait for messages from and to the stages before and behind it."""
    waits = sends is not Sends.OVERLAPPED
    also = sends is Sends.BLOCKING
    return waits * before_s + also * behind_s, waits * behind_s + also * before_s
