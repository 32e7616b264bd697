"""What goes wrong in the hands of a user of sparse tensors.

SparseInputError(ValueError)              coordinates, features or maps that do not fit together or in their range
SparseImplementationError(RuntimeError)   an implementation that was asked for by name cannot be had here
"""

from __future__ import annotations


class SparseInputError(ValueError):
    """Coordinates, features or maps that do not fit.

    Attributes:
        what: is wrong, in a few words.
        where: the operator or function that was called.
        actual: the number (or shape, or dtype) that was met.
        expected: the one that it disagrees with.
        remedy: what to do about it.
    """

    def __init__(self, what: str, *, where: str, actual: object, expected: object, remedy: str) -> None:
        super().__init__(f"{where}: {what}: found {actual}, expected {expected}; {remedy}")
        self.what = what
        self.where = where
        self.found = actual
        self.expected = expected
        self.remedy = remedy


class SparseImplementationError(RuntimeError):
    """The implementation that HALOPIPE_SPARSE names cannot be had for this device."""
