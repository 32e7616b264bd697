"""Where requests come from beside a port: files of a folder, and standard input.

    folder    x.npy, x.npz, x.pt, or what a reader takes of it               ->  x.npy.npy, x.npz.npy, x.pt.pt
    json      a line {"inputs": [[...]]} by the names of the model's tensors     ->  a line {"output": ...}
    npy       arrays after one another,  as numpy.save writes them               ->  likewise

Requests are read no faster than they are answered: who writes into the pipe waits, and files are opened when there is
room.  Nothing that is read runs code, and nothing is unpickled.
"""

from __future__ import annotations

import io
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from halopipe.extras.serving import arrays, torch_files
from halopipe.extras.serving.options import STDIN_FORMATS
from halopipe.extras.serving.serving import RequestAnswer, Serving
from planner.ir.errors import CorruptFileError, FactoryError, FormatError, HalopipeError, MissingFileError, UsageError
from planner.ir.files import replaced
from profiler.source.source import find_factory

JSON, NPY = FORMATS = STDIN_FORMATS

SUFFIXES = (".npy", ".npz", ".pt")
_LOOK_S = 0.05
_AGAIN_S = 0.2

Named = Mapping[str, Tensor]
PutAnswer = Callable[[Any], None]


class Draining(threading.Event):
    """Set when no more requests are to be taken, as by SIGTERM; what was taken is still answered."""


def pump(serving: Serving, requests: Iterator[tuple[Any, Any, PutAnswer]], draining: Draining) -> None:
    """Answers requests one after another; each answer is put where its request says, in their order, once it is there.

    Answers that nobody has taken yet are no more than there is room for: who reads them slowly slows the source.

    Raises:
        HalopipeError: what a rank has failed by, or a request that is not what the model takes.
    """
    waiting: queue.Queue[tuple[Future[RequestAnswer], PutAnswer] | None] = queue.Queue(serving.room)
    faults: list[BaseException] = []

    def write() -> None:
        while (one := waiting.get()) is not None:
            try:
                output = one[0].result().output
                if not faults:
                    one[1](output)
            except BaseException as error:  # noqa: BLE001  # raised below, in the thread of who asked
                faults.append(error)

    writer = threading.Thread(target=write, name="answers are written")
    writer.start()
    try:
        for number, (inputs, targets, put) in enumerate(requests, 1):
            try:
                waiting.put((serving.submit(inputs, targets), put))
            except UsageError as error:
                if serving.failure is not None:
                    raise
                raise FormatError(f"request {number}: {error.title}", error.details, error.remedies) from error
            if draining.is_set() or faults:
                break
    finally:
        waiting.put(None)
        writer.join()
    if faults:
        raise faults[0]
    if serving.failure is not None:
        raise serving.failure


def patiently(
    requests: Iterator[tuple[Any, Any, PutAnswer]], serving: Serving, draining: Draining
) -> Iterator[tuple[Any, Any, PutAnswer]]:
    """``requests``, read by a thread, one ahead: until it is drained or a rank fails, however long a read takes."""
    ahead: queue.Queue[Any] = queue.Queue(1)
    over = object()

    def read() -> None:
        try:
            for request in requests:
                ahead.put(request)
        except BaseException as error:  # noqa: BLE001  # raised where the requests are waited for
            ahead.put(error)
        ahead.put(over)

    threading.Thread(target=read, name="requests", daemon=True).start()
    while not draining.is_set() and serving.failure is None:
        try:
            request_read = ahead.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        if request_read is over:
            return
        if isinstance(request_read, BaseException):
            raise request_read
        yield request_read


def of_folder(
    serving: Serving, folder: Path, output: Path, reader: str, draining: Draining, most_bytes: int, *, follow: bool
) -> Iterator[tuple[Any, Any, PutAnswer]]:
    """The files of ``folder``, in the order of their names; answers go to ``output`` under their whole names.

    Args:
        reader: ``pkg.mod:function`` of the user's, which makes a request of a path; empty: arrays and tensors.
        follow: whether to look for further files until it is drained; they are to be renamed there when whole.

    Raises:
        MissingFileError: there is no such folder, or nothing in it.
        UsageError: an answer would take the place of another file.
    """
    if not folder.is_dir():
        raise MissingFileError(f"there is no folder {folder}", [], ["the folder of the files that are to be answered"])
    read = find_factory(reader) if reader else None
    answered: set[str] = set()
    while True:
        new = [name for name in questions(folder, any_file=read is not None) if name not in answered]
        require_free(output, new, any_file=read is not None)
        if not new and not answered and not follow:
            wanted = "any file" if read else ", ".join(SUFFIXES)
            raise MissingFileError(
                f"nothing to answer in {folder}", [f"wanted: {wanted}"], ["--reader FACTORY, for other files"]
            )
        for name in new:
            answered.add(name)
            inputs, targets = _request_of(serving, folder / name, read, most_bytes)
            yield inputs, targets, _writer(output, name, any_file=read is not None)
        if not follow or draining.is_set():
            return
        time.sleep(_AGAIN_S)


def questions(folder: Path, *, any_file: bool) -> list[str]:
    """The names of the files of ``folder`` that are requests, in their order."""
    names = sorted(each.name for each in folder.iterdir() if each.is_file() and not each.name.startswith("."))
    return [name for name in names if any_file or Path(name).suffix in SUFFIXES]


def require_free(output: Path, names: Iterable[str], *, any_file: bool) -> None:
    """Raises :class:`UsageError` where the answer to one of ``names`` would take the place of a file in ``output``."""
    there = [path for name in names for path in _answers(output, name, any_file=any_file) if path.exists()]
    if there:
        raise UsageError(
            "answers would replace files", [f"{path} is there already" for path in there[:3]], ["--to an empty folder"]
        )


def of_lines(
    serving: Serving, lines: IO[bytes], answers: IO[bytes], most_bytes: int
) -> Iterator[tuple[Any, Any, PutAnswer]]:
    """A request of each line of JSON.

    Args:
        most_bytes: of a line.

    Raises:
        FormatError: a line is no such request, or too long.
    """

    def put(output: Any) -> None:
        _write(answers, json_of(output) + b"\n")

    number = 0
    while line := lines.readline(most_bytes + 1):
        number += 1
        if len(line) > most_bytes:
            raise FormatError(f"line {number} is too long", [f"at most {most_bytes} bytes"], ["--max-request SIZE"])
        if line.strip():
            try:
                inputs, targets = request_of_json(serving, line, most_bytes)
            except HalopipeError as error:
                raise FormatError(f"line {number}: {error.title}", error.details, error.remedies) from error
            yield inputs, targets, put


def of_arrays(
    serving: Serving, stream: IO[bytes], answers: IO[bytes], most_bytes: int
) -> Iterator[tuple[Any, Any, PutAnswer]]:
    """A request of each array of a stream of them, such as a pipe; each of at most ``most_bytes``.

    Raises:
        FormatError: something else comes.
    """

    def put(output: Any) -> None:
        _write(answers, array_bytes(output))  # numpy.save asks for the place in the file, which a pipe has not

    number = 0
    while True:
        try:
            array = _array_in(serving, stream, most_bytes)
            if array is None:
                return
            request = serving.request({serving.input_names[0]: array})
        except HalopipeError as error:
            raise FormatError(f"array {number}: {error.title}", error.details, error.remedies) from error
        number += 1
        yield *request, put


def request_of_json(serving: Serving, text: bytes, most_bytes: int) -> tuple[Any, Any]:
    """Inputs and targets of ``{"name": nested lists, ...}``, whose tensors take at most ``most_bytes``.

    Raises:
        FormatError: it is none, or holds what cannot be kept.
        UsageError: a name is not known, or an input is missing.
    """
    return serving.request(arrays.tensors_of_json(text, serving.dtypes, most_bytes))


def json_of(output: Any) -> bytes:
    """``{"output": nested lists}``, in the output's own form.

    Raises:
        FormatError: it has NaN, infinity or complex numbers, which JSON has not.
    """
    try:
        return json.dumps({"output": _lists(output)}, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, TypeError) as error:
        fault = "it has NaN or infinity" if isinstance(error, ValueError) else str(error)
        raise FormatError(
            "an answer cannot be written as JSON",
            [fault],
            ["--stdin npy, files of arrays, or Content-Type: application/x-npy"],
        ) from error


def array_of(serving: Serving, content: bytes, most_bytes: int) -> tuple[Any, Any]:
    """Inputs that one array is, of at most ``most_bytes``.

    Raises:
        FormatError: it is no array, or holds what cannot be kept.
        UsageError: the model takes more inputs than one.
    """
    data = io.BytesIO(content)
    array = _array_in(serving, data, most_bytes)
    if array is None or data.read(1):
        raise FormatError("this is no array", ["nothing is there" if array is None else "more follows behind it"])
    return serving.request({serving.input_names[0]: array})


def array_bytes(output: Any) -> bytes:
    """An output of one tensor, as numpy.save writes it.

    Raises:
        FormatError: it is something else.
    """
    stream = io.BytesIO()
    np.save(stream, _only(output), allow_pickle=False)
    return stream.getvalue()


def _write(answers: IO[bytes], data: bytes) -> None:
    try:
        answers.write(data)
        answers.flush()
    except OSError as error:
        raise MissingFileError(
            "an answer cannot be written to standard output", [error.strerror or str(error)], ["a reader that stays"]
        ) from None


def _array_in(serving: Serving, data: IO[bytes], most_bytes: int) -> Tensor | None:
    name = serving.input_names[0]
    return arrays.read_npy(data, name, serving.dtypes[name], most_bytes)


def _lists(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output.tolist()
    if isinstance(output, Mapping):
        return {str(name): _lists(value) for name, value in output.items()}
    if isinstance(output, (tuple, list)):
        return [_lists(value) for value in output]
    return output


def _only(output: Any) -> np.ndarray[Any, Any]:
    if not isinstance(output, Tensor):
        raise FormatError(
            "an array holds one tensor",
            [f"the module's output is a {type(output).__name__}"],
            ["--stdin json, files of .pt, or Content-Type: application/json"],
        )
    return _array(output)


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    plain = tensor.detach().cpu()
    array: np.ndarray[Any, Any] = (plain.float() if plain.dtype is torch.bfloat16 else plain).numpy()
    return array


def _request_of(serving: Serving, path: Path, read: Callable[..., Any] | None, most_bytes: int) -> tuple[Any, Any]:
    if read is not None:
        try:
            content = read(path)
        except HalopipeError:
            raise
        except Exception as error:  # the user's own may raise anything
            raise FactoryError(
                f"the reader fails at {path}", [f"{type(error).__name__}: {error}"], ["mend the function of --reader"]
            ) from error
        return content if isinstance(content, tuple) and len(content) == 2 and serving.learns else (content, None)
    try:
        _require_small(path.stat().st_size, most_bytes)
        tensors = _tensors_of_file(serving, path, most_bytes)
    except HalopipeError as error:
        raise FormatError(f"{path}: {error.title}", error.details, error.remedies) from error
    except Exception as error:  # noqa: BLE001  # a file that somebody made may raise anything
        raise CorruptFileError(
            f"{path} cannot be read", str(error).splitlines()[:1], ["numpy.save, torch.save"]
        ) from None
    try:
        return serving.request(tensors)
    except UsageError as error:
        raise FormatError(f"{path}: {error.title}", error.details, error.remedies) from error


def _tensors_of_file(serving: Serving, path: Path, most_bytes: int) -> dict[str, Tensor]:
    """Of a file, by name."""
    first_name = serving.input_names[0]
    if path.suffix == ".pt":
        return torch_files.read_tensors(path, first_name, most_bytes)
    if path.suffix == ".npz":
        return arrays.read_npz(path, serving.dtypes, most_bytes)
    with path.open("rb") as stream:
        tensor = _array_in(serving, stream, most_bytes)
    return {} if tensor is None else {first_name: tensor}


def _require_small(num_bytes: int, most_bytes: int) -> None:
    if num_bytes > most_bytes:
        raise FormatError("it is too large", [f"{num_bytes} bytes, at most {most_bytes}"], ["--max-request SIZE"])


def _answers(output: Path, name: str, *, any_file: bool) -> tuple[Path, ...]:
    """Where the answer to the file ``name`` may lie: its whole name, and what kind of file the answer is."""
    if any_file or name.endswith(".pt"):
        return (output / f"{name}.pt",)
    return output / f"{name}.npy", output / f"{name}.npz"


def _writer(output: Path, name: str, *, any_file: bool) -> PutAnswer:
    places = _answers(output, name, any_file=any_file)

    def put(answer: Any) -> None:
        output.mkdir(parents=True, exist_ok=True)
        require_free(output, [name], any_file=any_file)  # somebody else's, made meanwhile
        if len(places) == 1:
            with replaced(places[0]) as stream:
                torch.save(answer, stream)
        elif isinstance(answer, Tensor):
            with replaced(places[0]) as stream:
                np.save(stream, _array(answer), allow_pickle=False)
        else:
            named = dict(_flat(answer, ""))
            with replaced(places[1]) as stream:
                np.savez(stream, allow_pickle=False, **named)

    return put


def _flat(output: Any, name: str) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The arrays of an output by the path that leads to them: ``scores``, ``0.state``."""
    if isinstance(output, Tensor):
        yield name or "output", _array(output)
    elif isinstance(output, (Mapping, tuple, list)):
        children = output.items() if isinstance(output, Mapping) else enumerate(output)
        for key, child in children:
            yield from _flat(child, f"{name}.{key}" if name else str(key))


def require_one(chosen: Mapping[str, object], with_folder: Mapping[str, object]) -> None:
    """Raises :class:`UsageError` unless one place that requests come from is named.

    Args:
        with_folder: by option, what goes with ``--from`` alone.
    """
    named = [name for name, value in chosen.items() if value]
    if len(named) != 1:
        ways = ["--from FOLDER --to FOLDER", "--stdin json, or --stdin npy", "--http 8000"] if not named else []
        for kept in named:
            of_folder = [name for name, value in with_folder.items() if value and kept != "--from"]
            gone = " and ".join([*(name for name in named if name != kept), *of_folder])
            needs_to = kept == "--from" and not with_folder["--to"]
            if needs_to:
                ways.append(f"--from {chosen[kept]} --to FOLDER in place of {gone}")
            else:
                ways.append(f"leave {gone} out")
        raise UsageError(
            "serve needs one place that requests come from", [f"named: {', '.join(named) or 'none'}"], ways
        )
