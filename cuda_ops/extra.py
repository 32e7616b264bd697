"""All that extras may add to the operators (:mod:`planner.ir.extras` says how)."""

from __future__ import annotations

from types import MappingProxyType
from typing import ClassVar

from planner.ir.extras import Extra, ImportPaths


class OperatorsExtra(Extra):
    """What an extra may add to the operators."""

    sparse_kernels: ClassVar[ImportPaths] = MappingProxyType({})
    """Other implementations of the sparse operators, by the name that ``HALOPIPE_SPARSE`` takes.

    Each is a function that gives a namespace of operators by name, or None where their library is not installed.
    """
