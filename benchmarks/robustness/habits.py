"""Habits of people's training scripts: each in a plain torch loop on one device, and by halopipe; the two are equal.

A habit is a pair of scripts.  Each writes down what it reads as it goes, so that what was done before an error is
known.

    equal      both read the same numbers, losses and parameters among them, to 1e-10 in float64
    refused    halopipe's script ends with a typed error before its first step
    silent     they read different numbers, and nothing is said
    late       a typed error, but behind a step
    untyped    another error, or the plain loop fails
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from planner.ir.errors import HalopipeError

EQUAL = "equal"
REFUSED = "refused"
SILENT = "silent"
LATE = "late"
UNTYPED = "untyped"
RELATIVE = 1e-10
ABSOLUTE = 1e-12
"""Of numbers in float64."""


@dataclass(slots=True)
class Notes:
    """What a script reads.

    Attributes:
        numbers: losses, metrics, learning rates, in the order in which they are read; one at least for each step.
        parameters: at the end, by name.
    """

    numbers: list[float] = field(default_factory=list)
    parameters: Mapping[str, Tensor] = field(default_factory=dict)


Script = Callable[[Notes], None]


@dataclass(frozen=True, slots=True)
class Habit:
    """What people do in a training script.

    Attributes:
        plain: with torch alone, on one device.
        ours: the same by halopipe.
        says: of a habit that is to be refused, what the error says; empty: it is to be equal.
    """

    name: str
    plain: Script
    ours: Script
    says: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a habit.

    Attributes:
        kind: one of those of the module.
        detail: the error's text, or the two numbers that differ.
    """

    kind: str
    detail: str = ""

    def fault(self, habit: Habit) -> str:
        """Why that is not what is wanted of the habit; empty: it is."""
        wanted = REFUSED if habit.says else EQUAL
        if self.kind != wanted:
            return f"{self.kind} where it should be {wanted}: {self.detail}"
        return "" if habit.says in self.detail else f"refused, but {habit.says!r} is not said: {self.detail}"


def judge(habit: Habit) -> Outcome:
    """Runs both scripts of a habit."""
    plain = Notes()
    ours = Notes()
    try:
        habit.plain(plain)
        habit.ours(ours)
    except HalopipeError as error:
        return Outcome(LATE if ours.numbers else REFUSED, str(error))
    except Exception as error:  # noqa: BLE001 - whatever else people see
        return Outcome(UNTYPED, f"{type(error).__name__}: {error}")
    difference = next(_differences(plain, ours), "")
    return Outcome(SILENT, difference) if difference else Outcome(EQUAL)


def _differences(plain: Notes, ours: Notes) -> Iterator[str]:
    if len(plain.numbers) != len(ours.numbers):
        yield f"{len(ours.numbers)} numbers for {len(plain.numbers)}"
    for place, (wanted, number) in enumerate(zip(plain.numbers, ours.numbers, strict=False)):
        if not math.isclose(number, wanted, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            yield f"number {place}: {number!r} for {wanted!r}"
    if missing := plain.parameters.keys() ^ ours.parameters.keys():
        yield f"parameters of one alone: {', '.join(sorted(missing))}"
    for name, wanted in plain.parameters.items():
        error = (ours.parameters[name].double() - wanted.double()).abs().max().item()
        if not torch.allclose(ours.parameters[name], wanted, rtol=RELATIVE, atol=ABSOLUTE):
            yield f"{name}: {error:.2g} off"


def fault(habit: Habit) -> str:
    """What is wrong with how halopipe takes the habit; empty if nothing is."""
    return judge(habit).fault(habit)


def counted(habits: Sequence[Habit]) -> tuple[Mapping[str, int], Mapping[str, str]]:
    """How many habits are of which kind, and by name what is wrong with some."""
    outcomes = {habit.name: judge(habit) for habit in habits}
    kinds = [outcome.kind for outcome in outcomes.values()]
    faults = {habit.name: outcomes[habit.name].fault(habit) for habit in habits}
    return {kind: kinds.count(kind) for kind in (EQUAL, REFUSED, SILENT, LATE, UNTYPED)}, {
        name: text for name, text in faults.items() if text
    }
