"""Where requests come from beside a port: files of a folder, and standard input.

    folder    NAME.npy, NAME.npz, NAME.pt, or what a reader takes of it        ->  NAME.npy, .npz or .pt elsewhere
    json      a line {"inputs": [[...]]} by the names of the model's tensors     ->  a line {"output": ...}
    npy       arrays behind one another, as numpy.save writes them               ->  likewise

Requests are read no faster than they are answered: who writes into the pipe waits, and files are opened when there is
room.  Nothing that is read runs code: arrays without pickles, tensors by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from halopipe.run_spec.options import STDIN_FORMATS
from halopipe.serving.serving import Answer, Serving
from planner.ir.errors import CorruptFileError, FormatError, HalopipeError, MissingFileError, UsageError
from planner.ir.files import replaced
from profiler.source.source import find_factory

JSON, NPY = FORMATS = STDIN_FORMATS

SUFFIXES = (".npy", ".npz", ".pt")
_LOOK_S = 0.05
_AGAIN_S = 0.2

Named = Mapping[str, Tensor]
Put = Callable[[Any], None]


class Draining(threading.Event):
    """Set when no more requests are to be taken, as by SIGTERM; what was taken is still answered."""


def pump(serving: Serving, requests: Iterator[tuple[Any, Any, Put]], draining: Draining) -> None:
    """Answers requests one after another; each answer is put where its request says, in their order, once it is there.

    Answers that nobody has taken yet are no more than there is room for: who reads them slowly slows the source.

    Raises:
        HalopipeError: what a rank has failed by, or a request that is not what the model takes.
    """
    waiting: queue.Queue[tuple[Future[Answer], Put] | None] = queue.Queue(serving.room)
    faults: list[Exception] = []

    def write() -> None:
        while (one := waiting.get()) is not None:
            try:
                output = one[0].result().output
                if not faults:
                    one[1](output)
            except Exception as error:  # noqa: BLE001  # raised below, in the thread of who asked
                faults.append(error)

    writer = threading.Thread(target=write, name="answers are written")
    writer.start()
    try:
        for inputs, targets, put in requests:
            waiting.put((serving.submit(inputs, targets), put))
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
    requests: Iterator[tuple[Any, Any, Put]], serving: Serving, draining: Draining
) -> Iterator[tuple[Any, Any, Put]]:
    """``requests``, read by a thread, one ahead: until it is drained or a rank fails, however long a read takes."""
    ahead: queue.Queue[Any] = queue.Queue(1)
    over = object()

    def read() -> None:
        try:
            for request in requests:
                ahead.put(request)
        except Exception as error:  # noqa: BLE001  # raised where the requests are waited for
            ahead.put(error)
        ahead.put(over)

    threading.Thread(target=read, name="requests", daemon=True).start()
    while not draining.is_set() and serving.failure is None:
        try:
            found = ahead.get(timeout=_LOOK_S)
        except queue.Empty:
            continue
        if found is over:
            return
        if isinstance(found, Exception):
            raise found
        yield found


def of_folder(
    serving: Serving, folder: Path, output: Path, reader: str, draining: Draining, *, follow: bool
) -> Iterator[tuple[Any, Any, Put]]:
    """The files of ``folder``, in the order of their names; answers go to ``output`` under the same names.

    Args:
        reader: ``pkg.mod:function`` of the user's, which makes a request of a path; empty: arrays and tensors.
        follow: whether to look for further files until it is drained; they are to be renamed there when whole.

    Raises:
        MissingFileError: there is no such folder, or nothing in it.
    """
    if not folder.is_dir():
        raise MissingFileError(f"there is no folder {folder}", [], ["the folder of the files that are to be answered"])
    output.mkdir(parents=True, exist_ok=True)
    read = find_factory(reader) if reader else None
    seen: set[str] = set()
    while True:
        names = sorted(each.name for each in folder.iterdir() if each.is_file() and not each.name.startswith("."))
        new = [name for name in names if name not in seen and (read is not None or Path(name).suffix in SUFFIXES)]
        if not new and not seen and not follow:
            wanted = "any file" if read else ", ".join(SUFFIXES)
            raise MissingFileError(
                f"nothing to answer in {folder}", [f"wanted: {wanted}"], ["--reader for other files"]
            )
        for name in new:
            seen.add(name)
            inputs, targets = _request_of(serving, folder / name, read)
            yield inputs, targets, _writer(output / name, as_tensors=read is not None or name.endswith(".pt"))
        if not follow or draining.is_set():
            return
        time.sleep(_AGAIN_S)


def of_lines(serving: Serving, lines: IO[bytes], answers: IO[bytes], most_bytes: int) -> Iterator[tuple[Any, Any, Put]]:
    """A request of each line of JSON.

    Args:
        most_bytes: of a line.

    Raises:
        FormatError: a line is no such request, or too long.
    """

    def put(output: Any) -> None:
        answers.write(json_of(output) + b"\n")
        answers.flush()

    number = 0
    while line := lines.readline(most_bytes + 1):
        number += 1
        if len(line) > most_bytes:
            raise FormatError(f"line {number} is too long", [f"at most {most_bytes} bytes"], ["--max-request SIZE"])
        if line.strip():
            try:
                inputs, targets = request_of_json(serving, line)
            except HalopipeError as error:
                raise FormatError(f"line {number}: {error.title}", error.details, error.remedies) from error
            yield inputs, targets, put


def of_arrays(serving: Serving, arrays: IO[bytes], answers: IO[bytes]) -> Iterator[tuple[Any, Any, Put]]:
    """A request of each array of a stream of them.

    Raises:
        FormatError: something else comes.
    """

    def put(output: Any) -> None:
        np.save(answers, _only(output), allow_pickle=False)
        answers.flush()

    number = 0
    while True:
        try:
            found = np.load(arrays, allow_pickle=False)
        except EOFError:
            return
        except (ValueError, OSError) as error:
            raise FormatError(f"array {number} cannot be read", str(error).splitlines()[:1], ["numpy.save"]) from error
        number += 1
        yield *serving.request({serving.input_names[0]: torch.from_numpy(found)}), put


def request_of_json(serving: Serving, text: bytes) -> tuple[Any, Any]:
    """Inputs and targets of ``{"name": nested lists, ...}``.

    Raises:
        FormatError: it is none.
    """
    try:
        found = json.loads(text, parse_constant=_refused)
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}, and no object")
        tensors = {name: _tensor(value) for name, value in found.items()}
    except (ValueError, TypeError, RecursionError) as error:
        names = ", ".join(serving.input_names)
        raise FormatError(
            "this is no request", str(error).splitlines()[:1], [f"an object of nested lists: {names}"]
        ) from error
    return serving.request(tensors)


def json_of(output: Any) -> bytes:
    """``{"output": nested lists}``, in the output's own form.

    Raises:
        FormatError: it has NaN or infinity, which JSON has not.
    """
    try:
        return json.dumps({"output": _lists(output)}, allow_nan=False, separators=(",", ":")).encode()
    except ValueError as error:
        raise FormatError(
            "an answer cannot be written as JSON",
            ["it has NaN or infinity"],
            ["--stdin npy, files of arrays, or Content-Type: application/x-npy"],
        ) from error


def array_of(serving: Serving, data: IO[bytes]) -> tuple[Any, Any]:
    """Inputs that one array is.

    Raises:
        FormatError: it is no array.
    """
    try:
        found = np.load(data, allow_pickle=False)
        if not isinstance(found, np.ndarray):
            raise ValueError("several arrays")
        return serving.request({serving.input_names[0]: torch.from_numpy(found)})
    except (ValueError, OSError, EOFError, TypeError) as error:
        raise FormatError("this is no array", str(error).splitlines()[:1], ["numpy.save(FILE, array)"]) from error


def only_array(output: Any) -> np.ndarray[Any, Any]:
    """The array of an output of one tensor; raises as :func:`of_arrays`."""
    return _only(output)


def _refused(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _tensor(value: Any) -> Tensor:
    array = np.array(value)
    if array.dtype.kind not in "bif":
        raise ValueError("numbers in nested lists of equal lengths are wanted")
    return torch.from_numpy(array)


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
    found: np.ndarray[Any, Any] = (plain.float() if plain.dtype is torch.bfloat16 else plain).numpy()
    return found


def _request_of(serving: Serving, path: Path, read: Callable[..., Any] | None) -> tuple[Any, Any]:
    if read is not None:
        found = read(path)
        return found if isinstance(found, tuple) and len(found) == 2 and serving.learns else (found, None)
    try:
        if path.suffix == ".pt":
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            tensors = dict(loaded) if isinstance(loaded, Mapping) else {serving.input_names[0]: loaded}
        else:
            arrays = np.load(path, allow_pickle=False)
            named = dict(arrays) if path.suffix == ".npz" else {serving.input_names[0]: arrays}
            tensors = {name: torch.from_numpy(array) for name, array in named.items()}
    except Exception as error:  # noqa: BLE001  # a file that somebody made may raise anything
        raise CorruptFileError(
            f"{path} cannot be read", str(error).splitlines()[:1], ["numpy.save, torch.save"]
        ) from None
    odd = [name for name, each in tensors.items() if not isinstance(each, Tensor)]
    if odd:
        raise CorruptFileError(
            f"{path} holds something else than tensors", [f"{odd[0]} is none"], ["torch.save(tensor)"]
        )
    return serving.request(tensors)


def _writer(path: Path, *, as_tensors: bool) -> Put:
    def put(output: Any) -> None:
        if as_tensors:
            with replaced(path.with_suffix(".pt")) as stream:
                torch.save(output, stream)
        elif isinstance(output, Tensor):
            with replaced(path.with_suffix(".npy")) as stream:
                np.save(stream, _array(output), allow_pickle=False)
        else:
            named = dict(_flat(output, ""))
            with replaced(path.with_suffix(".npz")) as stream:
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


def require_one(chosen: Mapping[str, object]) -> None:
    """Raises :class:`UsageError` unless one place that requests come from is named."""
    named = [name for name, value in chosen.items() if value]
    if len(named) != 1:
        raise UsageError(
            "serve needs one place that requests come from",
            [f"named: {', '.join(named) or 'none'}"],
            ["--from FOLDER --to FOLDER", "--stdin json, or --stdin npy", "--http 8000"],
        )
