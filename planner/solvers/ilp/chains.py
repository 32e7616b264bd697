"""T is at least what passes before a stage (or a message) and all its own work: one row for each cut.

Two chains pass: round trips (F and B, both messages) and forwards (F, message there).  Each begins at the start of the
pipeline, and anew behind a stage from which the next need not read (a break).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.costs.columns import Flags
from planner.costs.tables import Array
from planner.solvers.ilp.model import Model


def round_trips(model: Model) -> None:
    """The rows of stages and messages behind round trips; the first stage's reduction and update come after all."""
    spans = model.instance.spans
    before = _Passing.of(model, "A", spans.round_s, model.instance.handovers.round_s, spans.linked_back)
    _stages(before, spans.turn_s, spans.last_s)
    _wires(before)


def forwards(model: Model) -> None:
    """The rows of stages, each with its own reduction and update, behind forwards."""
    spans = model.instance.spans
    before = _Passing.of(model, "B", spans.there_s, model.instance.handovers.there_s, spans.linked)
    _stages(before, spans.work_s + spans.last_s, np.zeros(len(spans)))


@dataclass(frozen=True, slots=True, eq=False)
class _Passing:
    """A chain, as sums over the cuts.

    Attributes:
        passed: by cut, what the stages and messages up to there pass.
        breaks: by cut, how many stages up to there need not be read by the next.
        starts: the cuts where the chain may begin.
        enough: more than any row without a break comes to, in the unit of rows: with a break a row says nothing.
    """

    model: Model
    name: str
    passed: tuple[Any, ...]
    breaks: tuple[Any, ...]
    starts: tuple[int, ...]
    enough: float

    @classmethod
    def of(cls, model: Model, name: str, passing: Array, message: Array, linked: Flags) -> _Passing:
        """The chain of what passes through spans and hand-overs."""
        spans, handovers = model.instance.spans, model.instance.handovers
        broken = ~linked & (spans.last < model.instance.end)
        passed: list[Any] = [0]
        breaks: list[Any] = [0]
        for cut in range(1, model.instance.end):
            ending = np.flatnonzero(spans.last == cut)
            more = model.seconds(passing, model.stages, ending)
            more += model.seconds(message, model.handovers, np.flatnonzero(handovers.cut == cut))
            passed.append(model.running(f"passed{name}{cut}", passed[-1], more))
            last = breaks[-1]
            if broken[ending].any():
                last = model.running(f"breaks{name}{cut}", last, model.number(model.stages, ending[broken[ending]]))
            breaks.append(last)
        starts = (0, *sorted({int(cut) for cut in spans.last[broken]}))
        return cls(model, name, tuple(passed), tuple(breaks), starts, model.scaled(_longest_s(model)))

    def bound(self, cut: int, done: Any, first_s: Array, name: str) -> None:
        """T >= what passed up to ``cut`` + ``done``, from the start and from every break; void if a break follows.

        Args:
            first_s: what the first stage adds at the end of the step, if that is not ``done`` already.
        """
        model = self.model
        for start in self.starts:
            if start > cut or (name != "stage" and start == cut):
                continue
            row = done - model.step
            if start < cut:
                row += self.passed[cut] - self.passed[start]
                row -= self.enough * (self.breaks[cut] - self.breaks[start])
            if start == 0 and cut > 0:
                first = np.flatnonzero((model.instance.spans.first == 0) & (first_s > 0))
                row += model.seconds(first_s, model.stages, first)
            model.add(row <= 0, f"{name}{self.name}{start}_{cut}")


def _stages(before: _Passing, own_s: Array, first_s: Array) -> None:
    """A row for each stretch of layers between two cuts: of the stages that may have it, one does.

    (Rows for the stages that start there would do, but bound far less while z are fractions.)
    """
    model, spans = before.model, before.model.instance.spans
    for cut in range(model.instance.end):
        own = np.flatnonzero((spans.first <= cut) & (cut < spans.last))
        before.bound(cut, model.seconds(own_s, model.stages, own), first_s, "stage")


def _wires(before: _Passing) -> None:
    """All messages on a wire: one way, with the last F and B behind it, or both ways where they share it."""
    model, spans, handovers = before.model, before.model.instance.spans, before.model.instance.handovers
    for cut in range(1, model.instance.end):
        pair = model.seconds(spans.pair_s, model.stages, np.flatnonzero(spans.first == cut))
        for name, seconds, more in (("wire", handovers.wire_s, pair), ("shared", handovers.shared_s, 0)):
            over = np.flatnonzero((handovers.cut == cut) & (seconds > 0))
            if len(over):
                before.bound(cut, model.seconds(seconds, model.handovers, over) + more, spans.last_s, name)


def _longest_s(model: Model) -> float:
    spans, handovers = model.instance.spans, model.instance.handovers
    passing, messages = np.zeros(len(model.instance.cuts)), np.zeros(len(model.instance.cuts))
    np.maximum.at(passing, spans.last, spans.round_s)
    np.maximum.at(messages, handovers.cut, handovers.round_s)
    ending = (spans.work_s + spans.pair_s + spans.last_s).max(initial=0.0)
    ending += np.maximum(handovers.wire_s, handovers.shared_s).max(initial=0.0)
    return float(passing.sum() + messages.sum() + ending + spans.last_s.max(initial=0.0))
