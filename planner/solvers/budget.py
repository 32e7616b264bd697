"""What a search may spend: work that is counted, and no more seconds by the clock.

    whole    ends when so much work is done, and on a slow or loaded machine by the clock                 ``Budget``
    parts    end when so much work is done, or the whole ends                                        ``Budget.part``
    work     simulated actions, numbers of tables, ..., in the seconds that they take on one core of an Intel Xeon at
             2.6 GHz, rather more than less                                            ``ACTION_S``, ``NUMBER_S``

Whatever happens "after a third of the time" happens after so much work, and so does the end.  So the same problem is
searched in the same way on every machine that is as fast as that one, and its plan is the same byte for byte.  What a
slower machine does not get done by the clock it leaves out; what it does until then is the same.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

from planner.ir.extras import extras
from planner.ir.planner_extra import PlannerExtra

Made = TypeVar("Made")

ACTION_S = 1.6e-5
"""Of an action of a program: to lower, compile and simulate it, and what its rank holds then."""

NUMBER_S = 2e-8
"""Of a number of a table."""

CALL_S = 1e-5
"""Of one turn of a loop that asks."""

MOST_BYTES = 1 << 30
"""Of all tables that exist at a time: half of the memory that a search may take."""

_MOST_PACE = 10.0
_SLOW = 1.2  # a pace that is no error of what is counted
_PACE_AFTER_S = 0.2  # of work, from which a machine's pace can be told


def now_s() -> float:
    """The clock."""
    return time.monotonic()


class OutOfTimeError(Exception):
    """Raised out of work that was not done when its budget ended."""


@dataclass(slots=True, eq=False)
class _Ledger:
    """What has been done under a whole budget and all of its parts."""

    limit_s: float
    begun_s: float
    work_s: float = 0.0
    reserve_s: float = 0.0


@dataclass(slots=True, eq=False)
class Budget:
    """A whole budget of seconds from now on; see :meth:`part` for others.

    Attributes:
        limit_s: of work, and of a whole by the clock too.
    """

    limit_s: float
    _ledger: _Ledger = field(init=False, repr=False)
    _ends_at_s: float = field(init=False, default=inf, repr=False)
    _reserve_s: float = field(init=False, default=0.0, repr=False)
    _until_s: float = field(init=False, default=inf, repr=False)

    def __post_init__(self) -> None:
        self._ledger = _Ledger(self.limit_s, now_s())
        self._ends_at_s = self.limit_s

    def part(self, limit_s: float = inf, reserve_s: float = 0.0, until_s: float = inf) -> Budget:
        """What ends after ``limit_s`` of work, ``reserve_s`` of work before the end of this budget, and with the clock.

        Args:
            until_s: seconds since the whole began.
        """
        part = Budget.__new__(Budget)
        part._until_s = min(until_s, self._until_s)
        part._ledger = self._ledger
        part._reserve_s = self._reserve_s + reserve_s
        part._ends_at_s = min(self.work_s + max(0.0, limit_s), self._ends_at_s - reserve_s)
        part.limit_s = max(0.0, part._ends_at_s - self.work_s)
        return part

    @property
    def work_s(self) -> float:
        """Work done so far, by this budget's whole."""
        return self._ledger.work_s

    @property
    def left_s(self) -> float:
        """Work that is left."""
        return max(0.0, self._ends_at_s - self.work_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the whole began, by the clock: they decide when it ends, and nothing else."""
        return now_s() - self._ledger.begun_s

    def spend(self, work_s: float) -> None:
        """Notes work that is done."""
        self._ledger.work_s += work_s

    def allows(self, work_s: float) -> bool:
        """Whether there is room for so much more work."""
        until_end_s = work_s + max(self._reserve_s, self._ledger.reserve_s)
        if self.work_s + work_s > self._ends_at_s or self.work_s + until_end_s > self._ledger.limit_s:
            return False
        return self.elapsed_s + until_end_s * self._pace <= min(self._until_s, self._ledger.limit_s)

    def takes(self, work_s: float) -> bool:
        """Whether there is room for so much more work, which is then noted as done."""
        is_allowed = self.allows(work_s)
        if is_allowed:
            self.spend(work_s)
        return is_allowed

    def reserve(self, work_s: float) -> None:
        """Keeps so much work, and no other, for the end of the whole: everything else is over so much sooner."""
        self._ledger.reserve_s = work_s

    @property
    def reserve_s(self) -> float:
        """What is kept so."""
        return self._ledger.reserve_s

    @property
    def is_over(self) -> bool:
        """Whether to end now, with the best so far."""
        return not self.allows(0.0)

    def ends(self, work_s: float = CALL_S) -> bool:
        """Notes a turn of a loop; whether to end now."""
        self.spend(work_s)
        return self.is_over

    def require(self, work_s: float = CALL_S) -> None:
        """Notes a turn of a loop.

        Raises:
            OutOfTimeError: the budget is over.
        """
        if self.ends(work_s):
            raise OutOfTimeError

    @property
    def clock_s(self) -> float:
        """Seconds until the whole ends: what a foreign solver may take that knows nothing but a clock."""
        reserve_s = max(self._reserve_s, self._ledger.reserve_s)
        return max(0.0, self._ledger.limit_s - self.elapsed_s - reserve_s * self._pace)

    @property
    def _pace(self) -> float:
        """Seconds by the clock that a second of work takes; what is not counted makes it larger."""
        work_s = self.work_s
        if work_s < _PACE_AFTER_S:
            return 1.0
        pace = min(_MOST_PACE, self.elapsed_s / work_s)
        return pace if pace > _SLOW else 1.0


_CURRENT: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def under(budget: Budget) -> Iterator[None]:
    """What runs inside is counted by ``budget``, and ends with it (:func:`check_time`)."""
    token = _CURRENT.set(budget)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def made_within(budget: Budget, items: Iterable[Made]) -> Iterator[Made | None]:
    """The items as far as they can be made within ``budget``; then None if some could not."""
    source = iter(items)
    while True:
        try:
            with under(budget):
                item = next(source)
        except StopIteration:
            return
        except OutOfTimeError:
            yield None
            return
        yield item


def part_of_current(limit_s: float) -> Budget:
    """A part of the budget that all this runs under; a whole one if there is none."""
    current = _CURRENT.get()
    if current is None:
        return Budget(limit_s)
    return current if limit_s >= current.limit_s else current.part(limit_s)


def check_time(work_s: float = CALL_S) -> None:
    """To be called in loops that may take long: notes a turn of them.

    Raises:
        OutOfTimeError: the budget that all this runs under is over.
    """
    current = _CURRENT.get()
    if current is not None:
        current.require(work_s)


def note(work_s: float) -> None:
    """Notes work that is done, in the budget that all this runs under."""
    current = _CURRENT.get()
    if current is not None:
        current.spend(work_s)


def stated_s(solver: str, time_limit_s: float) -> float:
    """What ``solver`` may take as a rival of a search of ``time_limit_s``: what its authors state, if they do."""
    stated = (extra.stated_s(solver) for extra in extras(PlannerExtra))
    return next((seconds for seconds in stated if seconds is not None), time_limit_s)
