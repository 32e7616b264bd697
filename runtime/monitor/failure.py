"""What becomes of ranks: the result or the error that each leaves on the store of its job, whoever started it.

result/RANK     what it found, in parts
error/RANK      what it failed by, as :func:`write_error` spells it
failed          there as soon as one has
"""

from __future__ import annotations

import json
import signal
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planner.ir import errors
from planner.ir.errors import DeadlineError, HalopipeError, TransportError, WorkerDiedError, WorkerError

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from runtime.monitor.activity import StatusStore

FAILED = "failed"

STDERR_LINES = 12
"""Last lines of a dead worker's standard error that are shown."""


def write_error(error: BaseException) -> str:
    """``error`` as JSON; what is not ours becomes a WorkerError with the end of its traceback."""
    typed = error if isinstance(error, HalopipeError) else _foreign(error)
    record = {"type": type(typed).__name__, "title": typed.title, "details": typed.details, "remedies": typed.remedies}
    return json.dumps(record)


def read_error(text: str) -> HalopipeError:
    """The error that :func:`write_error` spelled; a kind that this release does not know is a WorkerError."""
    record = json.loads(text)
    cls = getattr(errors, record["type"], WorkerError)
    is_own = isinstance(cls, type) and issubclass(cls, HalopipeError)
    return (cls if is_own else WorkerError)(record["title"], record["details"], record["remedies"])


@dataclass(frozen=True, slots=True)
class EndedWorker:
    """What is seen of a worker that has ended.

    Attributes:
        code: its exit code; negative: the signal that ended it.
        output: the end of what it wrote to its standard output and error.
    """

    code: int
    output: str = ""


_PART_CHARACTERS = 1 << 20
"""Of one value of a store, which takes 8 MiB: who sets a longer one loses the store."""


def set_text(store: Store | StatusStore, key: str, text: str) -> None:
    """Sets a text of any length, for :func:`text_at`; ``key`` is there once all of it is."""
    starts = range(0, len(text), _PART_CHARACTERS)
    for number, start in enumerate(starts):
        store.set(f"{key}/{number}", text[start : start + _PART_CHARACTERS])
    store.set(key, str(len(starts)))


def text_at(store: Store | StatusStore, key: str) -> str:
    """What :func:`set_text` has set, which may still have to come."""
    return "".join(store.get(f"{key}/{number}").decode() for number in range(int(store.get(key))))


def leave_result(store: Store | StatusStore, rank: int, text: str) -> None:
    """Says what ``rank`` found; some text."""
    set_text(store, f"result/{rank}", text)


def leave_error(store: Store | StatusStore, rank: int, text: str) -> None:
    """Says what ``rank`` failed by."""
    store.set(f"error/{rank}", text)
    store.set(FAILED, "")


def left_by(store: Store | StatusStore, rank: int) -> HalopipeError | str:
    """What a rank has left: its result, its error, or nothing so far."""
    if store.check([f"result/{rank}"]):
        return text_at(store, f"result/{rank}")
    return read_error(store.get(f"error/{rank}").decode()) if store.check([f"error/{rank}"]) else ""


def errors_left(store: Store, ranks: Iterable[int]) -> dict[int, HalopipeError]:
    """What those of ``ranks`` failed by that have."""
    if not store.check([FAILED]):
        return {}
    outcomes = {rank: left_by(store, rank) for rank in ranks}
    return {rank: error for rank, error in outcomes.items() if isinstance(error, HalopipeError)}


def died(title: str, code: int, last: str, stderr: str) -> WorkerDiedError:
    """The error of a process that ended with ``code`` and left neither a result nor an error.

    Args:
        title: which rank, device and stage.
        last: what it did when it was last heard of.
    """
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    lines = [line for line in stderr.splitlines() if line.strip()][-STDERR_LINES:]
    details = [f"last heard of: {last or 'nothing'}", *(f"stderr: {line}" for line in lines)]
    remedies = ["look for the kernel's out-of-memory killer: dmesg | tail"] if code == -signal.SIGKILL else []
    return WorkerDiedError(f"{title} ended {how} without a word", details, remedies)


def cause(failures: Mapping[int, HalopipeError]) -> HalopipeError:
    """Of what several ranks say, what happened first: who waits in vain only tells that somebody else failed."""
    return min(failures.values(), key=blame)


def blame(error: HalopipeError) -> int:
    """0 for an error that needs no other to explain it; more for what others' errors bring about."""
    if isinstance(error, WorkerDiedError):
        return 1
    if isinstance(error, DeadlineError):
        return 2
    return 3 if isinstance(error, TransportError) else 0


def also(error: HalopipeError, lines: Iterable[str]) -> HalopipeError:
    """The same error with more details."""
    return type(error)(error.title, [*error.details, *lines], error.remedies)


def _foreign(error: BaseException) -> WorkerError:
    from cuda_ops.sparse.errors import SparseInputError  # late: networks without clouds have none

    if isinstance(error, SparseInputError):
        return WorkerError(
            f"clouds cannot be used: {error.what}",
            [f"{error.where}: found {error.found}, expected {error.expected}"],
            [error.remedy],
        )
    frames = [line.rstrip() for line in traceback.format_exception(error)[-4:]]
    return WorkerError(f"a worker failed: {type(error).__name__}: {error}", frames)
