"""A problem's fix and forbid rules, compiled for a search: the stages they allow, all stretches of layers at once.

What a rule means is said in :mod:`planner.ir.constraints`; this is the same in numpy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.ir.constraints import (
    DEVICE,
    KIND,
    STAGE,
    TOGETHER,
    StageFacts,
    Ways,
    allowed,
    allowed_together,
    check_names,
    matching,
)
from planner.ir.problem import Problem
from planner.solvers.candidates.contradictions import Applied, check

Flags = NDArray[np.bool_]
Counts = NDArray[np.int64]
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """Every rule of a problem with the layers it matches.

    Attributes:
        problem: whose rules they are.
        rules: fixes first, then what is forbidden.
    """

    problem: Problem
    rules: tuple[Applied, ...]

    @classmethod
    def of(cls, problem: Problem) -> Constraints:
        """The rules of ``problem``, compiled once.

        Raises:
            UnknownNameError: a rule matches no layer, or names a device or kind that the cluster does not have.
            InfeasibleError: two rules, or a rule and another constraint, contradict each other.
        """
        names = tuple(layer.name for layer in problem.profile.graph.layers)
        rules = []
        for rule, fixed in (*((rule, True) for rule in problem.fix), *((rule, False) for rule in problem.forbid)):
            check_names(rule, problem.profile.cluster)
            rules.append(Applied(rule, fixed, matching(rule, names)))
        check(problem, rules)
        return cls(problem, tuple(rules))

    def allows_stage(
        self,
        layer_indices: Iterable[int],
        ranks: Sequence[int] = (),
        recompute: bool | None = None,
        ways: Ways | None = None,
        number: int | None = None,
    ) -> bool:
        """Whether a stage may have these layers (by index); what is not decided (no ranks, None) is allowed.

        Args:
            ways: of all layers of the stage.
            number: of the stage, from 0.
        """
        inside = self._flags(layer_indices)
        if bool((self._wrong(ranks, recompute, ways, number) & inside).any()):
            return False
        by_number = self._by_number()
        if number in by_number and not (inside | ~by_number[number]).all():
            return False
        held = sum(bool((flags & inside).any()) for flags in by_number.values())
        return held <= 1 and all(
            allowed_together(int((flags & inside).sum()), int(flags.sum()), fixed) for flags, fixed in self._sets()
        )

    def allows_layer(self, index: int, ways: Ways) -> bool:
        """Whether the layer may be cut so, whatever its stage."""
        return not self._wrong((), None, ways, None)[index]

    def allows_stages(
        self, stage_of: Sequence[int], groups: Sequence[Sequence[int]], recompute: Sequence[bool], ways: Sequence[Ways]
    ) -> bool:
        """Whether the rules allow a complete assignment: the stage of each layer, the rest by stage."""
        by_stage = np.asarray(stage_of)
        return all(
            self.allows_stage(np.flatnonzero(by_stage == number), ranks, recompute[number], ways[number], number)
            for number, ranks in enumerate(groups)
        )

    def mask(
        self,
        cuts: ArrayLike,
        ranks: Sequence[int] = (),
        recompute: bool | None = None,
        ways: Ways | None = None,
        number: int | None = None,
    ) -> Flags:
        """:meth:`allows_stage` of every stage from one of ``cuts`` to another, [a, b] that between cuts a and b.

        Where no number is given, a stage that starts with nothing before it is number 0 and no other is.  False where
        the one cut is not a smaller part of the other.

        Args:
            cuts: positions in the list of layers; or ideals, 1 where a layer (second index) is in one (first index).
        """
        at = np.asarray(cuts)
        members = at if at.ndim == 2 else np.arange(len(self))[None, :] < at[:, None]
        between = _Between(members.astype(np.float64))
        found: Flags = between.nested
        found &= between.count(self._wrong(ranks, recompute, ways, number)) == 0
        by_number = self._by_number()
        if number is None:
            found &= self._start_first(by_number, between)
        elif number in by_number:
            found &= between.count(by_number[number]) == by_number[number].sum()
        held = np.zeros(found.shape, dtype=np.int64)
        for flags in by_number.values():
            held += between.count(flags) > 0
        found &= held <= 1
        for flags, fixed in self._sets():
            count, total = between.count(flags), int(flags.sum())
            found &= ((count == 0) | (count == total)) if fixed else (count < total)
        return found

    def device_class(self, rank: int) -> tuple[bool, ...]:
        """What the rules tell apart: ranks of equal classes (and equal cost) are interchangeable."""
        device = self.problem.profile.cluster.devices[rank]
        facts = StageFacts((device.name,), (device.kind,))
        return tuple(
            allowed(applied.rule, facts, applied.fixed) for applied in self.rules if applied.rule.what in (DEVICE, KIND)
        )

    def stage_rules(self) -> tuple[tuple[int, bool, tuple[int, ...]], ...]:
        """Rules about the number of a stage: (number, whether fixed, layers)."""
        return tuple(
            (int(applied.rule.value), applied.fixed, applied.layers)
            for applied in self.rules
            if applied.rule.what == STAGE
        )

    def __len__(self) -> int:
        """The number of layers."""
        return len(self.problem.profile.graph.layers)

    def _wrong(self, ranks: Sequence[int], recompute: bool | None, ways: Ways | None, number: int | None) -> Flags:
        """The layers that may not be in such a stage."""
        devices = [self.problem.profile.cluster.devices[rank] for rank in ranks]
        facts = StageFacts(
            tuple(device.name for device in devices), tuple(device.kind for device in devices), number, recompute, ways
        )
        wrong = np.zeros(len(self), dtype=bool)
        for applied in self.rules:
            if not allowed(applied.rule, facts, applied.fixed):
                wrong[list(applied.layers)] = True
        return wrong

    def _start_first(self, by_number: Mapping[int, Flags], between: _Between) -> Flags:
        """Number 0 starts with nothing before it, and no other stage does."""
        first = between.count(self._wrong((), None, None, 0)) == 0
        own = by_number.get(0, np.zeros(len(self), dtype=bool))
        inside = between.count(own)
        return np.asarray(np.where(between.from_nothing[:, None], first & (inside == own.sum()), inside == 0))

    def _by_number(self) -> dict[int, Flags]:
        """The layers fixed to each number of a stage."""
        found: dict[int, list[int]] = {}
        for number, fixed, layers in self.stage_rules():
            if fixed:
                found.setdefault(number, []).extend(layers)
        return {number: self._flags(layers) for number, layers in found.items()}

    def _sets(self) -> list[tuple[Flags, bool]]:
        """Layers of which a stage may not have some (True) or all (False)."""
        together = [
            (self._flags(applied.layers), applied.fixed) for applied in self.rules if applied.rule.what == TOGETHER
        ]
        return together + [(flags, True) for flags in self._by_number().values()]

    def _flags(self, layers: Iterable[int]) -> Flags:
        found = np.zeros(len(self), dtype=bool)
        found[list(layers)] = True
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Between:
    """Stages between any two ideals; ``members``: 1 where a layer is in an ideal."""

    members: Array

    @property
    def nested(self) -> Flags:
        """[a, b]: whether a is a part of b, and smaller."""
        size = self.members.sum(axis=1)
        shared = self.members @ self.members.T
        return np.asarray((shared == size[:, None]) & (size[:, None] < size[None, :]))

    @property
    def from_nothing(self) -> Flags:
        """By ideal: whether it is empty."""
        return np.asarray(self.members.sum(axis=1) == 0)

    def count(self, flags: Flags) -> Counts:
        """How many of ``flags`` are in the stage between two ideals."""
        inside = (self.members @ flags).astype(np.int64)
        return np.asarray(inside[None, :] - inside[:, None])
