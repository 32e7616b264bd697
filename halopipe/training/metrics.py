"""The metrics of a run as it goes: a file of JSON, a line a step, written by rank 0.

The loss is made on another rank, which leaves it in the store of the job; rank 0 looks there after each step and writes
the line once it is there, so no step waits for it.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from halopipe.run_spec.result import Score
from planner.ir.errors import MissingFileError
from planner.ir.files import write_text
from runtime.engine import StepResult

if TYPE_CHECKING:
    from cuda_ops._torch import Store

_PATIENCE_S = 2.0
"""How long the last losses may take to come."""

_FAILED_S = 0.2
"""The same, where the run failed."""

_LOOK_AGAIN_S = 0.005

_log = logging.getLogger(__name__)


class Metrics:
    """What one rank does for the file; the ranks that neither write it nor know the loss do nothing.

    Args:
        path: of the file; empty for none.
        store: of the job.
        teller: the rank whose loss is written.
        first_step: steps done before: the file is continued after their lines, or begun anew if there are none.

    Raises:
        MissingFileError: the file cannot be written.
    """

    def __init__(self, path: str, store: Store, rank: int, teller: int, first_step: int) -> None:
        self._path, self._store = Path(path), store
        self._writes = bool(path) and rank == 0
        self._tells = bool(path) and rank == teller
        self._waiting: deque[dict[str, Any]] = deque()
        if self._writes:
            self._begin(first_step)

    def step(self, number: int, epoch: int, rows: int, result: StepResult) -> None:
        """Note a step; ``number`` counts from 1."""
        if self._tells:
            told = {"loss": result.loss, "learning_rate": _rate(result.learning_rates)}
            self._store.set(_key(number), json.dumps(told))
        if self._writes:
            line = {
                "step": number,
                "epoch": epoch,
                "loss": None,
                "step_s": result.step_s,
                "samples_per_s": rows / result.step_s if result.step_s else None,
                "learning_rate": _rate(result.learning_rates),
                "gradient_norm": result.gradient_norm,
            }
            self._waiting.append(line)
            self._settle(0.0)

    def score(self, epoch: int, score: Score) -> None:
        """Note an evaluation, after the lines of the steps before it."""
        if self._writes:
            self._settle(_PATIENCE_S)
            line = {"eval_loss": score.loss, "eval_accuracy": score.accuracy, "eval_samples": score.num_samples}
            self._append([{"step": score.step, "epoch": epoch, **line}])

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is left, also where a loss will never come."""
        if not self._writes:
            return
        try:
            self._settle(_PATIENCE_S if error is None else _FAILED_S)
            self._append(self._waiting)
        except (MissingFileError, RuntimeError) as failure:
            if error is None:
                raise
            _log.warning("the last metrics are lost: %s", failure)

    def _begin(self, first_step: int) -> None:
        """Keep the lines of the steps before; those of steps that are done again go."""
        kept = [line for line in self._lines() if _step_of(line) <= first_step] if first_step else []
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, "".join(f"{line}\n" for line in kept))
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def _lines(self) -> list[str]:
        try:
            return self._path.read_text("utf-8").splitlines()
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise MissingFileError(f"cannot read {self._path}", [str(error)]) from error

    def _settle(self, patience_s: float) -> None:
        """Write the lines whose losses are known by now, or come within ``patience_s``."""
        end_s = time.monotonic() + patience_s
        done = []
        while self._waiting:
            told = self._told(self._waiting[0]["step"])
            if told is not None:
                line = self._waiting.popleft()
                done.append(line | {name: value for name, value in told.items() if line[name] is None})
            elif time.monotonic() >= end_s:
                break
            else:
                time.sleep(_LOOK_AGAIN_S)
        self._append(done)

    def _told(self, number: int) -> Mapping[str, Any] | None:
        key = _key(number)
        if not self._store.check([key]):
            return None
        told: Mapping[str, Any] = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return told

    def _append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(f"{json.dumps({key: _plain(value) for key, value in line.items()})}\n" for line in lines)
        if not text:
            return
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise _unwritable(self._path, error) from error


def _rate(rates: tuple[float, ...]) -> float | list[float] | None:
    """One number where all groups have the same."""
    found = list(dict.fromkeys(rates))
    return (found[0] if len(found) == 1 else found) if found else None


def _plain(value: Any) -> Any:
    """JSON knows no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf  # half a line, of a crash


def _unwritable(path: Path, error: OSError) -> MissingFileError:
    return MissingFileError(f"cannot write the metrics to {path}", [error.strerror or str(error)])


def _key(number: int) -> str:
    return f"metrics/{number}"
