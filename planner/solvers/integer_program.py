"""Integer programs as blocks of rows, solved by HiGHS: the one over spans, and those of published planners.

minimise T    subject to    lower <= sum over names of block @ variables <= upper,    variables from 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import block_array, csr_array

Array = NDArray[np.float64]

OPTIMAL, TIME_LIMIT, INFEASIBLE = "optimal", "time limit", "infeasible"


@dataclass(frozen=True, slots=True, eq=False)
class Minimum:
    """What HiGHS found.

    Attributes:
        status: ``optimal`` only if HiGHS proved it; ``infeasible`` only if it proved that.
        bound: no solution is below; infinite if there is none.
        variables: by name; empty if no solution was found.
    """

    status: str
    bound: float
    variables: Mapping[str, Array]


@dataclass(slots=True, eq=False)
class IntegerProgram:
    """A program to which rows can be added also when it has been solved.

    Attributes:
        widths: how many variables there are, by name; the first one is ``T``.
        binary: names of those that are 0 or 1.
        parts: names of those from 0 to 1.
    """

    widths: Mapping[str, int]
    binary: tuple[str, ...]
    parts: tuple[str, ...] = ()
    _highs: highspy.Highs = field(init=False, repr=False)
    _blocks: list[list[csr_array]] = field(init=False, default_factory=list, repr=False)
    _limits: list[tuple[Array, Array]] = field(init=False, default_factory=list, repr=False)

    def __post_init__(self) -> None:
        columns, counts = highspy.HighsLp(), list(self.widths.values())
        total = columns.num_col_ = sum(counts)
        kinds = {True: highspy.HighsVarType.kInteger, False: highspy.HighsVarType.kContinuous}
        most = [1.0 if name in (*self.binary, *self.parts) else np.inf for name in self.widths]
        columns.col_cost_, columns.col_lower_, columns.col_upper_ = (
            np.eye(1, total)[0],
            np.zeros(total),
            np.repeat(most, counts),
        )
        columns.integrality_ = [kinds[name in self.binary] for name, width in self.widths.items() for _ in range(width)]
        columns.a_matrix_.start_ = np.zeros(total + 1, dtype=np.int32)
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]  # of highspy's making
        self._highs.silent()
        for option, setting in (("threads", 1), ("mip_rel_gap", 0.0), ("mip_abs_gap", 1e-9)):
            self._highs.setOptionValue(option, setting)
        self._highs.passModel(columns)

    def add(self, lower: float | Array, upper: float | Array, **blocks: Array | csr_array) -> None:
        """Rows more, as many as each block has."""
        count = next(iter(blocks.values())).shape[0]
        self._blocks.append([csr_array(blocks.get(name, (count, width))) for name, width in self.widths.items()])
        self._limits.append((np.broadcast_to(lower, count), np.broadcast_to(upper, count)))

    def minimise(self, most: float, time_limit_s: float) -> Minimum:
        """The least T, of at most ``most``, as far as HiGHS gets in that time."""
        highs = self._highs
        if self._blocks:
            matrix = block_array(self._blocks, format="csr")
            lower, upper = map(np.concatenate, zip(*self._limits, strict=True))
            starts, places = matrix.indptr[:-1].astype(np.int32), matrix.indices.astype(np.int32)
            highs.addRows(len(lower), lower, upper, matrix.nnz, starts, places, matrix.data)
            self._blocks.clear()
            self._limits.clear()
        highs.clearSolver()
        highs.changeColBounds(0, 0.0, most)
        highs.setOptionValue("time_limit", highs.getRunTime() + max(time_limit_s, 1e-3))  # of all runs
        highs.run()
        status, information = highs.getModelStatus(), highs.getInfo()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return Minimum(INFEASIBLE, float("inf"), {})
        bound = float(information.mip_dual_bound)
        variables: dict[str, Array] = {}
        if information.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            ends = np.cumsum(list(self.widths.values()))
            variables = dict(zip(self.widths, np.split(np.array(highs.getSolution().col_value), ends), strict=False))
        proved = status == highspy.HighsModelStatus.kOptimal and variables
        return Minimum(OPTIMAL if proved else TIME_LIMIT, max(0.0, bound) if np.isfinite(bound) else 0.0, variables)
