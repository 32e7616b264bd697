"""The metrics of a run as it goes, written by rank 0: what it is told of a step is a record, which a writer keeps.

    metrics.jsonl    a line of JSON a record; so is any other name
    metrics.csv      a row a record, of the columns :data:`COLUMNS`; the others have also ``slow``, while ranks or links
                     are (their factors by name), and ``left_out``, true where no update was made
    tb:FOLDER        events for TensorBoard; a folder that is there, or a name that ends in / without ``tb:`` as well

The loss is made on another rank, which leaves it in the store of the job; rank 0 looks there after each step and writes
the record once it is there, so no step waits for it.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from halopipe.run_spec.options import TENSORBOARD
from halopipe.run_spec.result import Score
from planner.ir.errors import MissingFileError, UsageError
from planner.ir.files import parse_json, write_text
from planner.ir.timeline import Slow

if TYPE_CHECKING:
    from cuda_ops._torch import Store
    from runtime.engine import StepResult

COLUMNS = (
    *("step", "epoch", "loss", "step_s", "samples_per_s", "learning_rate", "gradient_norm"),
    *("eval_loss", "eval_accuracy", "eval_samples", "eval_metrics"),
)
"""Names in records: of a step, then of an evaluation, which has step and epoch, too; metrics of one's own by name."""

_PATIENCE_S = 2.0
"""How long the last losses may take to come."""

_FAILED_S = 0.2
"""The same, where the run failed."""

_LOOK_AGAIN_S = 0.005
_FLUSH_S = 5

_log = logging.getLogger(__name__)

Record = Mapping[str, Any]


class Writer(Protocol):
    """Where records go.

    Raises:
        MissingFileError: it cannot be written.
    """

    def begin(self, first_step: int) -> None:
        """Keep the records of the first ``first_step`` steps; those of steps that are done again go."""
        ...

    def write(self, records: Iterable[Record]) -> None:
        """Add these."""
        ...

    def close(self) -> None:
        """No more will come."""
        ...


def slow_now(slow: Sequence[Slow]) -> dict[str, float]:
    """Of ranks and links, such as ``rank 2`` and ``link 0-1``, the factors of those that have not recovered."""
    newest = {f"rank {one.rank}" if one.peer is None else f"link {one.peer}-{one.rank}": one.factor for one in slow}
    return {name: factor for name, factor in newest.items() if factor != 1.0}


def folder_of(place: str) -> Path | None:
    """The folder that metrics for TensorBoard go into; None: ``place`` is a file, or nothing."""
    path = place.removeprefix(TENSORBOARD)
    return Path(path) if place and (path != place or path.endswith("/") or Path(path).is_dir()) else None


def require_writer(place: str) -> None:
    """Raises :class:`UsageError` where the package that writes there is missing."""
    if place and folder_of(place) is not None and importlib.util.find_spec("tensorboard") is None:
        raise UsageError(
            "metrics for TensorBoard need the package tensorboard, which is not installed",
            [f"{place} is a folder"],
            ["pip install 'halopipe[tensorboard]'", "--metrics metrics.csv", "--metrics metrics.jsonl"],
        )


def writer_of(place: str) -> Writer:
    """What writes there."""
    folder = folder_of(place)
    if folder is not None:
        return _Events(folder)
    return _CsvRows(Path(place)) if Path(place).suffix == ".csv" else _Lines(Path(place))


class Metrics:
    """What one rank does for the records; the ranks that neither write them nor know the loss do nothing.

    Args:
        place: of the records; empty for none.
        store: of the job.
        teller: the rank whose loss is written.
        first_step: steps done before: what is there is continued after them, or begun anew if there are none.

    Raises:
        MissingFileError: the file cannot be written.
    """

    def __init__(self, place: str, store: Store, rank: int, teller: int, first_step: int) -> None:
        self._store = store
        self._writer = writer_of(place) if place and rank == 0 else None
        self._tells = bool(place) and rank == teller
        self._waiting: deque[dict[str, Any]] = deque()
        if self._writer is not None:
            self._writer.begin(first_step)

    def step(self, number: int, epoch: int, rows: int, result: StepResult, slow: Sequence[Slow] = ()) -> None:
        """Note a step; ``number`` counts from 1.

        Args:
            slow: ranks and links that were found to be slow so far.
        """
        if self._tells:
            record = {"loss": result.loss, "learning_rate": _rate(result.learning_rates)}
            self._store.set(_key(number), json.dumps(record))
        if self._writer is not None:
            line: dict[str, Any] = {
                "step": number,
                "epoch": epoch,
                "loss": None,
                "step_s": result.step_s,
                "samples_per_s": rows / result.step_s if result.step_s else None,
                "learning_rate": _rate(result.learning_rates),
                "gradient_norm": result.gradient_norm,
            }
            if result.left_out:
                line["left_out"] = True
            if now := slow_now(slow):
                line["slow"] = now
            self._waiting.append(line)
            self._settle(self._writer, 0.0)

    def score(self, epoch: int, score: Score) -> None:
        """Note an evaluation, after the lines of the steps before it."""
        if self._writer is not None:
            self._settle(self._writer, _PATIENCE_S)
            evaluated = {"eval_loss": score.loss, "eval_accuracy": score.accuracy, "eval_samples": score.num_samples}
            own = {"eval_metrics": dict(score.metrics)} if score.metrics else {}
            self._writer.write([{"step": score.step, "epoch": epoch, **evaluated, **own}])

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is left, also where a loss will never come."""
        if self._writer is None:
            return
        try:
            self._settle(self._writer, _PATIENCE_S if error is None else _FAILED_S)
            self._writer.write(self._waiting)
            self._writer.close()
        except (MissingFileError, RuntimeError) as failure:
            if error is None:
                raise
            _log.warning("the last metrics are lost: %s", failure)

    def _settle(self, writer: Writer, patience_s: float) -> None:
        """Write the records whose losses are known by now, or come within ``patience_s``."""
        end_s = time.monotonic() + patience_s
        done = []
        while self._waiting:
            record = self._record_of(self._waiting[0]["step"])
            if record is not None:
                line = self._waiting.popleft()
                done.append(line | {name: value for name, value in record.items() if line[name] is None})
            elif time.monotonic() >= end_s:
                break
            else:
                time.sleep(_LOOK_AGAIN_S)
        writer.write(done)

    def _record_of(self, number: int) -> Record | None:
        key = _key(number)
        if not self._store.check([key]):
            return None
        record: Record = json.loads(self._store.get(key))
        self._store.delete_key(key)
        return record


class _Lines:
    """A line of JSON a record."""

    header = ""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, first_step: int) -> None:
        kept = [line for line in self._kept() if self.step_of(line) <= first_step] if first_step else []
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._path, self.header + "".join(f"{line}\n" for line in kept))
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def write(self, records: Iterable[Record]) -> None:
        text = "".join(map(self.line, records))
        if not text:
            return
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def close(self) -> None:
        pass

    def line(self, record: Record) -> str:
        return f"{json.dumps(_finite(record))}\n"

    def step_of(self, line: str) -> float:
        """Half a line, of a crash, has none."""
        try:
            return float(parse_json(line)["step"])
        except (ValueError, LookupError, TypeError, OverflowError):
            return math.inf

    def _kept(self) -> list[str]:
        try:
            return self._path.read_text("utf-8").splitlines()
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            raise MissingFileError(f"cannot read {self._path}", [str(error)], [_ANOTHER]) from error


class _CsvRows(_Lines):
    """A row a record, under a row of names; the rates of several groups, and one's own metrics, stand in one cell."""

    header = f"{','.join(COLUMNS)}\n"

    def line(self, record: Record) -> str:
        row = io.StringIO()
        cells = (record.get(name) for name in COLUMNS)
        csv.writer(row, lineterminator="\n").writerow(map(_cell, cells))
        return row.getvalue()

    def step_of(self, line: str) -> float:
        cells = next(csv.reader([line]), [])
        return int(cells[0]) if len(cells) == len(COLUMNS) and cells[0].isdecimal() else math.inf


class _Events:
    """Scalars ``train/loss``, ``eval/loss``, ... for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._events: Any = SummaryWriter(str(self._folder), purge_step=first_step + 1, flush_secs=_FLUSH_S)
        except OSError as error:
            raise _unwritable(self._folder, error) from error

    def write(self, records: Iterable[Record]) -> None:
        for record in records:
            for name, value in record.items():
                if value is None or name in ("step", "epoch", "eval_samples"):
                    continue
                if isinstance(value, dict):
                    group = name if name == "slow" else "eval"
                    parts = [(f"{group}/{own}", part) for own, part in value.items()]
                else:
                    tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
                    several = enumerate(value) if isinstance(value, list) else [("", value)]
                    parts = [(f"{tag}/{number}".rstrip("/"), part) for number, part in several]
                for tag, part in parts:
                    self._events.add_scalar(tag, part, record["step"])

    def close(self) -> None:
        self._events.close()


_ANOTHER = "--metrics another name"


def _finite(value: Any) -> Any:
    """JSON knows no infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: Any) -> Any:
    if isinstance(value, Mapping):
        value = [f"{name}={each}" for name, each in value.items()]
    return " ".join(map(str, value)) if isinstance(value, list) else value


def _rate(rates: tuple[float, ...]) -> float | list[float] | None:
    """One number where all groups have the same."""
    distinct = list(dict.fromkeys(rates))
    return (distinct[0] if len(distinct) == 1 else distinct) if distinct else None


def _unwritable(path: Path, error: OSError) -> MissingFileError:
    return MissingFileError(f"cannot write the metrics to {path}", [error.strerror or str(error)], [_ANOTHER])


def _key(number: int) -> str:
    return f"metrics/{number}"
