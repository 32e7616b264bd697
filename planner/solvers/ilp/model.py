"""The variables of the integer program, and the few ways in which its rows are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pulp

from planner.costs.tables import Array
from planner.solvers.ilp.spans import Instance

_SCALE = 100.0
"""The objective is about that large, so that HiGHS' absolute tolerances are fine enough."""


@dataclass(slots=True, eq=False)
class Model:
    """A PuLP problem over an instance.

    Attributes:
        unit_s: what 1 stands for in rows of time.
        step: T, the objective.
        stages: z[v] = 1 if span v is a stage.
        handovers: y[h] = 1 if hand-over h happens; whole where z are.
    """

    instance: Instance
    unit_s: float
    problem: Any = field(init=False, repr=False)
    step: Any = field(init=False, repr=False)
    stages: list[Any] = field(init=False, repr=False)
    handovers: list[Any] = field(init=False, repr=False)

    @classmethod
    def of(cls, instance: Instance, upper_s: float) -> Model:
        """Scaled for solutions of at most ``upper_s``."""
        longest_s = float((instance.spans.work_s + instance.spans.last_s).max(initial=0.0))
        return cls(instance, (upper_s if np.isfinite(upper_s) else longest_s or 1.0) / _SCALE)

    def __post_init__(self) -> None:
        self.problem = pulp.LpProblem("spans", pulp.LpMinimize)
        self.step = self.variable("T")
        self.stages = [self.binary(f"z{v}") for v in range(len(self.instance.spans))]
        self.handovers = [self.variable(f"y{h}", 1.0) for h in range(len(self.instance.handovers))]
        self.problem.setObjective(self.step)

    def variable(self, name: str, most: float | None = None) -> Any:
        """A number from 0 to ``most``."""
        return self.problem.add_variable(name, lowBound=0, upBound=most)

    def binary(self, name: str) -> Any:
        """0 or 1."""
        return self.problem.add_variable(name, cat=pulp.LpBinary)

    def add(self, row: Any, name: str) -> None:
        """One more row."""
        self.problem.addConstraint(row, name)

    def running(self, name: str, before: Any, more: Any) -> Any:
        """A variable that is ``before + more``."""
        found = self.variable(name)
        self.add(found == before + more, f"is_{name}")
        return found

    def scaled(self, seconds: float) -> float:
        """Seconds in the unit of the rows."""
        return float(seconds) / self.unit_s

    def seconds(self, each: Array, variables: Sequence[Any], which: Iterable[int]) -> Any:
        """The sum of seconds of those chosen, scaled."""
        return pulp.lpSum(self.scaled(each[v]) * variables[v] for v in which)

    def number(self, variables: Sequence[Any], which: Iterable[int]) -> Any:
        """How many of those are chosen."""
        return pulp.lpSum(variables[int(v)] for v in which)
