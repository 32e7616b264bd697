"""Chunks of a pipeline: what a step of them takes, simulated, and the least that it can take.

    stage r of 1F1B     c = f + b; W = p - r micro-batches go on before the first comes back; D = what a micro-batch
                        spends below it (passes and messages of the later stages, both ways):
                        M <= W:  max(M c,  f + D + M b,  M f + D + b)
                        else     max(W f, f + D)  +  (M - W) c  +  max(W b, D + b)
                        the stage's first forward to its last backward (:func:`stay_s`)
    all stages          V(r) = max(stay(r),  c(r) + 2 messages + V(r + 1));  no 1F1B of these passes ends before V(0)

    any division        with C = the sum of all c, r = 0 ... p - 1 and M >= p, twice the sum over stages of
                        C - D(r) + (M - 1) c(r) and once that of  C + D(r) + (M - p + r) c(r), neither of which V(0) is
                        below, is  (3 M + 2 (p - 1)) C: V(0) >= (M + 2 (p - 1) / 3) C / p  (:func:`even_s`)

Of stages alike V(0) = (M + p - 1) c, the simulator's time; of unlike ones the simulator's too, in 294 of 300 drawn at
random (a test draws others).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from planner.costs.simulator.events import execute
from planner.costs.simulator.prices import SlotPrices
from planner.costs.simulator.program import CompiledProgram, compile_program
from planner.extras.transformers.shape import Sends
from planner.ir.program import Message, Part
from planner.ir.schedule import MESSAGE, Op, Pipeline, StageGraph
from planner.passes import lower
from planner.schedules import positions, schedule

MOST_ACTIONS = 12_000
"""Of a pipeline that is simulated whole: about a second."""


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
        p = self.stages
        passes = [f + b for f, b in zip(self.forward_s, self.backward_s, strict=True)]
        bound_s = 0.0
        before = 0.0
        for stage in range(p):
            bound_s = max(bound_s, before + micro_batches * sum(passes[stage::p]))
            before += passes[stage] + 2 * self.overlapped_s
        return bound_s

    def step_s(self, micro_batches: int, name: str = "1f1b") -> float:
        """By the simulator; see the module's text for what is too long for it."""
        interleave = len(self.forward_s) // self.stages
        most = MOST_ACTIONS // (2 * len(self.forward_s)) // self.stages * self.stages
        simulated = min(micro_batches, max(most, 4 * self.stages))
        if self.stages == 1:
            return micro_batches * (sum(self.forward_s) + sum(self.backward_s))
        named = "interleaved" if interleave > 1 else name
        compiled = _compiled(named, self.stages, interleave, simulated)
        simulated_s = _run(compiled, self)
        return simulated_s + (micro_batches - simulated) * self._cycle_s(name)

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


def _run(compiled: CompiledProgram, chunks: Chunks) -> float:
    """When the last pass of a program of those chunks ends."""
    seconds = []
    for slot in compiled.actions:
        op = slot.action.op
        stage = slot.action.stage
        passes = op not in MESSAGE and op not in (Op.REDUCE_GRAD, Op.UPDATE)
        seconds.append((chunks.forward_s if op is Op.FORWARD else chunks.backward_s)[stage] if passes else 0.0)
    transfers = [chunks.overlapped_s] * len(compiled.transfers)
    return execute(compiled, SlotPrices(seconds, transfers, range(len(compiled.channels)))).step_s


def chunked(passes: Sequence[tuple[float, float]], hop_s: Sequence[float], sends: Sends, stages: int) -> Chunks:
    """Chunks of (forward, backward), with the messages that somebody waits for.

    Args:
        hop_s: a message from each chunk to the next; one fewer than there are chunks.
    """
    waits = sends is not Sends.OVERLAPPED
    also = sends is Sends.BLOCKING
    around = [0.0, *hop_s, 0.0]
    forward = tuple(f + waits * around[i] + also * around[i + 1] for i, (f, _) in enumerate(passes))
    backward = tuple(b + waits * around[i + 1] + also * around[i] for i, (_, b) in enumerate(passes))
    return Chunks(forward, backward, stages, 0.0 if waits else max(hop_s, default=0.0))


def stay_s(forward_s: float, backward_s: float, below_s: float, window: int, micro_batches: int) -> float:
    """Least seconds of a stage of 1F1B from its first forward to its last backward.

    Args:
        below_s: what a micro-batch spends on later stages and on the way there and back.
        window: stages from this one on.
    """
    f = forward_s
    b = backward_s
    m = micro_batches
    w = window
    if m <= w:
        return max(m * (f + b), f + below_s + m * b, m * f + below_s + b)
    return max(w * f, f + below_s) + (m - w) * (f + b) + max(w * b, below_s + b)


def even_s(stages: int, micro_batches: int, work_s: float, interleave: int = 1) -> float:
    """No pipeline is shorter whose stages have ``work_s`` seconds of passes of a micro-batch together, however divided.

    Interleaved chunks are alike: passes of the first chunks of all stages but one come before and after the last's.
    """
    p = stages
    m = micro_batches
    if interleave > 1:
        return (m + (p - 1) / interleave) * work_s / p
    return (m + 2 * (p - 1) / 3 if m >= p else m) * work_s / p
