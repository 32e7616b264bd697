"""What is wrong with a user's clouds, told as an error of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cuda_ops.sparse.errors import SparseInputError
from planner.ir.errors import StageFailedError


@contextmanager
def telling(microbatch: int) -> Iterator[None]:
    """Raises :class:`StageFailedError` for clouds of a micro-batch that cannot be used."""
    try:
        yield
    except SparseInputError as error:
        raise StageFailedError(
            f"clouds of micro-batch {microbatch}: {error.what}",
            [f"{error.where}: found {error.found}, expected {error.expected}"],
            [error.remedy],
        ) from error
