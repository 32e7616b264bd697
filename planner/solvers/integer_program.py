"""Integer programs, solved by HiGHS: the one over spans and those of published planners as blocks of rows, and others.

minimise T       subject to    lower <= sum over names of block @ variables <= upper,    variables from 0
minimise cost @ x    subject to    lower <= matrix @ x <= upper,    least <= x <= most    (``minimum``)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

import highspy
import numpy as np
from numpy.typing import NDArray
from scipy.sparse import block_array, csr_array

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]

OPTIMAL = "optimal"
TIME_LIMIT = "time limit"
INFEASIBLE = "infeasible"
_NO_SOLUTION = (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)


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
        counts = list(self.widths.values())
        total = sum(counts)
        most = np.repeat([1.0 if name in (*self.binary, *self.parts) else inf for name in self.widths], counts)
        whole = np.repeat([name in self.binary for name in self.widths], counts)
        self._highs = _loaded(np.eye(1, total)[0], np.zeros(total), most, whole)
        self._highs.setOptionValue("mip_rel_gap", 0.0)
        self._highs.setOptionValue("mip_abs_gap", 1e-9)

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
            _add_rows(highs, matrix, lower, upper)
            self._blocks.clear()
            self._limits.clear()
        highs.clearSolver()
        highs.changeColBounds(0, 0.0, most)
        highs.setOptionValue("time_limit", highs.getRunTime() + max(time_limit_s, 1e-3))  # of all runs
        highs.run()
        status = highs.getModelStatus()
        information = highs.getInfo()
        if status in _NO_SOLUTION:
            return Minimum(INFEASIBLE, inf, {})
        bound = float(information.mip_dual_bound)
        variables: dict[str, Array] = {}
        if information.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible:
            ends = np.cumsum(list(self.widths.values()))
            variables = dict(zip(self.widths, np.split(np.array(highs.getSolution().col_value), ends), strict=False))
        proved = status == highspy.HighsModelStatus.kOptimal and variables
        return Minimum(OPTIMAL if proved else TIME_LIMIT, max(0.0, bound) if np.isfinite(bound) else 0.0, variables)


def minimum(
    columns: tuple[Array, Array, Array, Flags], rows: tuple[csr_array, Array, Array], **options: float
) -> tuple[str, float, Array, int]:
    """The least ``cost @ x``, as far as HiGHS gets under its own ``options``.

    Args:
        columns: of each variable its cost, its least and its largest value, and whether it is whole.
        rows: coefficients, and of each row its lower and its upper limit.

    Returns:
        ``optimal``, ``time limit`` or ``infeasible``; the bound, minus infinity if none is known; the variables, empty
        if no solution was found; nodes of the tree.
    """
    highs = _loaded(*columns)
    _add_rows(highs, *rows)
    for name, setting in options.items():
        highs.setOptionValue(name, setting)
    highs.run()
    status = highs.getModelStatus()
    information = highs.getInfo()
    nodes = max(0, int(information.mip_node_count))
    if status in _NO_SOLUTION:
        return INFEASIBLE, inf, np.zeros(0), nodes
    is_found = information.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    variables = np.array(highs.getSolution().col_value) if is_found else np.zeros(0)
    proved = OPTIMAL if status == highspy.HighsModelStatus.kOptimal else TIME_LIMIT
    return proved, float(information.mip_dual_bound), variables, nodes


def _loaded(cost: Array, least: Array, most: Array, whole: Flags) -> highspy.Highs:
    """HiGHS with these variables and no rows; it writes nothing, and takes one thread."""
    columns = highspy.HighsLp()
    columns.num_col_ = len(cost)
    columns.col_cost_ = cost
    columns.col_lower_ = least
    columns.col_upper_ = most
    kinds = {True: highspy.HighsVarType.kInteger, False: highspy.HighsVarType.kContinuous}
    columns.integrality_ = [kinds[is_whole] for is_whole in whole.tolist()]
    columns.a_matrix_.start_ = np.zeros(len(cost) + 1, dtype=np.int32)
    highs = highspy.Highs()  # type: ignore[no-untyped-call]  # of highspy's making
    highs.silent()
    highs.setOptionValue("threads", 1)
    highs.passModel(columns)
    return highs


def _add_rows(highs: highspy.Highs, matrix: csr_array, lower: Array, upper: Array) -> None:
    starts = matrix.indptr[:-1].astype(np.int32)
    places = matrix.indices.astype(np.int32)
    highs.addRows(len(lower), lower, upper, matrix.nnz, starts, places, matrix.data)
