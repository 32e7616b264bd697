"""Requests from files and standard input: answered in order, read no faster than that, nothing unpickled."""

from __future__ import annotations

import io
import json
import os
import pickle
import threading
import time
import tracemalloc
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from halopipe.extras.serving import request_sources
from halopipe.extras.serving.command import require_fitting
from halopipe.extras.serving.options import ServeOptions
from planner.ir.errors import (
    CorruptFileError,
    FormatError,
    HalopipeError,
    MissingFileError,
    UsageError,
    WorkerDiedError,
)
from tests.halopipe.extras.serving.stand_in import StandIn, network, npy


class Named(nn.Module):
    """Its output is a mapping."""

    def forward(self, x: Tensor) -> dict[str, object]:
        return {"twice": 2 * x, "parts": (x + 1, x - 1)}


def rows(number: int, count: int = 2) -> np.ndarray:
    return np.random.default_rng(number).normal(size=(count, 3))


def of_folder(
    serving: StandIn, given: Path, to: Path, reader: str = "", draining: Any = None, *, most_bytes: int = 10_000
) -> Iterator[Any]:
    """The requests of a folder's files, no more than there are."""
    draining = draining or request_sources.Draining()
    return request_sources.of_folder(serving, given, to, reader, draining, most_bytes, follow=False)  # type: ignore[arg-type]


def pumped(serving: StandIn, requests: object) -> None:
    request_sources.pump(serving, requests, request_sources.Draining())  # type: ignore[arg-type]


def test_lines_of_json_are_answered_in_order() -> None:
    serving = StandIn(network())
    answers = io.BytesIO()
    lines = b"".join(json.dumps({"inputs": rows(n).tolist()}).encode() + b"\n" for n in range(7)) + b"\n"
    pumped(serving, request_sources.of_lines(serving, io.BytesIO(lines), answers, 10_000))  # type: ignore[arg-type]
    found = [json.loads(line)["output"] for line in answers.getvalue().splitlines()]
    expected = [serving.module(torch.from_numpy(rows(n))).tolist() for n in range(7)]
    assert found == expected


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("line", "text"),
    [
        (b"[1, 2]", "an object is wanted"),
        (b'{"inputs": [[1, NaN, 3]]}', "'NaN', which is no number of JSON"),
        (b'{"inputs": [[1, 1e999, 3]]}', "inputs holds a number beyond those of float64"),
        (b'{"inputs": [[1, true, 3]]}', "inputs holds bool, the model takes float64"),
        (b'{"inputs": [[1, 2, 3]], "inputs": [[4, 5, 6]]}', "inputs is there twice"),
        (b'{"inputs": [[1, 2], 3]}', "lists of equal lengths"),
        (b'{"inputs": [1[,2]]}', "beside a bracket"),
        (b'{"inputs": [[1, 2, 3],]}', "lists of equal lengths"),
        (b'{"inputs": [[]]}', "an empty list"),
        (b'{"inputs": [[1, 2, 3]]} x', "does not end there"),
        (b'{"inputs": [1, 2, 3]}', "inputs has shape (3,)"),
        (b'{"inputs": [[1, 2], [3]]}', "lists of equal lengths"),
        (b'{"inputs": "abc"}', "numbers in nested lists"),
        (b'{"images": [[1, 2, 3]]}', "not known: images"),
        (b'{"inputs": [[1, 2, 3]' + b" " * 300 + b"]}", "at most 200 bytes"),
        (b"[" * 150, "this is no request"),
    ],
)
def test_a_line_that_is_no_request_ends_the_stream_with_its_number(line: bytes, text: str) -> None:
    serving = StandIn(network())
    answers = io.BytesIO()
    lines = b'{"inputs": [[1, 2, 3]]}\n' + line + b"\n"
    with pytest.raises(FormatError, match=r"(line|request) 2") as told:
        pumped(serving, request_sources.of_lines(serving, io.BytesIO(lines), answers, 200))  # type: ignore[arg-type]
    assert text in str(told.value)
    assert len(answers.getvalue().splitlines()) == 1  # what came before is answered


def test_arrays_behind_one_another_are_answered_by_arrays_from_a_file_or_a_pipe() -> None:
    asked = b"".join(npy(np.asfortranarray(rows(number).astype(">f8"))) for number in range(5))
    end, begin = os.pipe()
    with os.fdopen(begin, "wb") as asks:
        asks.write(asked)
    with os.fdopen(end, "rb") as pipe:
        for given in (io.BytesIO(asked), pipe):
            serving = StandIn(network())
            answers = io.BytesIO()
            pumped(serving, request_sources.of_arrays(serving, given, answers, 10_000))  # type: ignore[arg-type]
            answers.seek(0)
            for number in range(5):
                expected = serving.module(torch.from_numpy(np.asfortranarray(rows(number)))).detach().numpy()
                np.testing.assert_array_equal(np.load(answers), expected)


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.pt", "wide.pt"])
def test_a_file_takes_no_more_than_a_request_may(tmp_path: Path, name: str) -> None:
    serving = StandIn(network())
    given = tmp_path / "given"
    given.mkdir()
    if name == "x.npy":
        np.save(given / name, rows(0, 50))
    elif name == "x.npz":
        np.savez_compressed(given / name, inputs=np.zeros((50, 3)))  # a small file of large tensors
    else:
        torch.save(torch.zeros(1, 3).expand(50, 3) if name == "wide.pt" else torch.zeros(50, 3), given / name)
    few, many = (of_folder(serving, given, tmp_path / "answers", most_bytes=most) for most in (1199, 4000))
    with pytest.raises(FormatError, match=f"{name}: .*too large"):
        next(few)
    assert next(many)[0][0].shape == (50, 3)


@pytest.mark.parametrize("name", ["header.npz", "header.npy", "members.npz", "packed.npz", "unknown.npz"])
def test_a_file_that_is_small_and_says_that_it_is_large_takes_no_more(tmp_path: Path, name: str) -> None:
    serving = StandIn(network())
    given = tmp_path / "given"
    given.mkdir()
    large_header = b"\x93NUMPY\2\0" + (2**26).to_bytes(4, "little") + b" " * (2**26 if name == "header.npz" else 1000)
    if name.endswith(".npy"):
        (given / name).write_bytes(large_header)
    else:
        numbers = npy(np.zeros((2**23, 1)) if name == "packed.npz" else np.zeros((2, 3)))
        method = zipfile.ZIP_BZIP2 if name == "packed.npz" else zipfile.ZIP_DEFLATED
        with zipfile.ZipFile(given / name, "w", method) as archive:
            for number in range(2000 if name in ("members.npz", "unknown.npz") else 1):
                member = f"other{number}.npy" if name == "unknown.npz" else "inputs.npy"
                with warnings.catch_warnings(action="ignore"):  # the same name again
                    archive.writestr(member, large_header if name == "header.npz" else numbers)
    tracemalloc.start()
    try:
        with pytest.raises(FormatError, match=name):
            next(of_folder(serving, given, tmp_path / "answers", most_bytes=2**19))
        assert tracemalloc.get_traced_memory()[1] < 2**22
        assert not (tmp_path / "answers").exists()
    finally:
        tracemalloc.stop()


def test_pickles_are_refused(tmp_path: Path) -> None:
    serving = StandIn(network())
    given = npy(np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(FormatError, match="array 0"):
        pumped(serving, request_sources.of_arrays(serving, io.BytesIO(given), io.BytesIO(), 10_000))  # type: ignore[arg-type]
    with pytest.raises(FormatError, match="inputs is object"):
        request_sources.array_of(serving, given, 10_000)  # type: ignore[arg-type]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.pt").write_bytes(pickle.dumps(Path("x")))
    with pytest.raises(CorruptFileError, match=r"a\.pt"):
        pumped(
            serving,
            of_folder(serving, tmp_path / "in", tmp_path / "out"),
        )


def test_files_are_answered_under_their_names(tmp_path: Path) -> None:
    serving = StandIn(Named())
    given = tmp_path / "in"
    output = tmp_path / "out"
    given.mkdir()
    np.save(given / "a.npy", rows(0))
    np.savez(given / "b.npz", inputs=rows(1))
    torch.save({"inputs": torch.from_numpy(rows(2))}, given / "c.pt")
    (given / "notes.txt").write_text("not looked at")
    pumped(serving, of_folder(serving, given, output))
    assert sorted(each.name for each in output.iterdir()) == ["a.npy.npz", "b.npz.npz", "c.pt.pt"]
    with np.load(output / "b.npz.npz") as found:
        np.testing.assert_array_equal(found["parts.1"], rows(1) - 1)
    torch.testing.assert_close(torch.load(output / "c.pt.pt")["twice"], 2 * torch.from_numpy(rows(2)))
    with pytest.raises(MissingFileError, match="nothing to answer"):
        pumped(
            serving,
            of_folder(serving, output / "..", output),
        )


def read_text(path: Path) -> Tensor:
    return torch.tensor([[float(word) for word in path.read_text().split()]], dtype=torch.float64)


def test_other_files_are_read_by_a_function_of_the_users(tmp_path: Path) -> None:
    serving = StandIn(network())
    given = tmp_path / "in"
    given.mkdir()
    (given / "a.txt").write_text("1 2 3")
    reader = f"{__name__}:read_text"
    pumped(
        serving,
        of_folder(serving, given, tmp_path / "out", reader),
    )
    expected = serving.module(torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float64))
    torch.testing.assert_close(torch.load(tmp_path / "out" / "a.txt.pt"), expected.detach())


def test_a_source_is_read_no_faster_than_it_is_answered() -> None:
    serving = StandIn(network(), room=3, held=True)
    read = list[int]()
    draining = request_sources.Draining()

    def requests() -> object:
        for number in range(50):
            read.append(number)
            yield torch.from_numpy(rows(number)), None, lambda output: None

    pump = threading.Thread(target=request_sources.pump, args=(serving, requests(), draining))
    pump.start()
    while len(read) < 4:
        time.sleep(1e-3)
    assert len(read) == 4  # it waits for the first answer
    assert serving.most_waiting == 3
    serving.go.set()
    pump.join(20)
    assert len(read) == 50
    assert serving.most_waiting <= serving.room


def test_a_stream_that_drains_answers_what_was_taken() -> None:
    serving = StandIn(network())
    draining = request_sources.Draining()
    taken = list[int]()

    def requests() -> object:
        for number in range(100):
            if number == 5:
                draining.set()
            yield torch.from_numpy(rows(number)), None, lambda output, number=number: taken.append(number)

    request_sources.pump(serving, request_sources.patiently(requests(), serving, draining), draining)  # type: ignore[arg-type]
    assert taken == list(range(len(taken)))
    assert len(taken) == serving.counts.requests < 10


def test_a_read_that_never_ends_does_not_keep_a_stream_that_drains_or_has_failed() -> None:
    never = threading.Event()

    def requests() -> object:
        yield torch.from_numpy(rows(0)), None, lambda output: None
        never.wait()

    for lost in (False, True):
        serving = StandIn(network())
        draining = request_sources.Draining()
        found = request_sources.patiently(requests(), serving, draining)  # type: ignore[arg-type]
        next(found)
        if lost:
            serving.failure = WorkerDiedError("rank 1 died")  # type: ignore[assignment]
        else:
            draining.set()
        assert list(found) == []
    never.set()


def test_an_answer_is_put_when_it_is_there_though_no_other_request_comes() -> None:
    serving = StandIn(network())
    is_put = threading.Event()

    def requests() -> object:
        yield torch.from_numpy(rows(0)), None, lambda output: is_put.set()
        assert is_put.wait(20)

    pumped(serving, requests())


def test_what_a_rank_failed_by_ends_the_pump() -> None:
    serving = StandIn(network(), held=True)

    def requests() -> object:
        yield torch.from_numpy(rows(0)), None, lambda output: None
        serving.fail(WorkerDiedError("rank 1 died"))

    with pytest.raises(HalopipeError, match="rank 1 died"):
        pumped(serving, requests())


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "one place that requests come from"),
        ({"stdin": "json", "http": "8000"}, "named: --stdin, --http"),
        ({"source": Path("a")}, "needs a folder for the answers"),
        ({"source": Path("a"), "to": Path("a")}, "answers would replace requests"),
        ({"stdin": "xml"}, "brings no 'xml'"),
        ({"stdin": "json", "follow": True}, "--follow goes with --from"),
        ({"stdin": "json", "optimizer": "SGD"}, "--optimizer goes with --learn"),
    ],
)
def test_one_source_is_named_with_what_belongs_to_it(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError) as told:
        require_fitting(ServeOptions(**fields))
    assert text in str(told.value)


def test_files_of_one_stem_have_answers_of_their_own_and_none_replaces_a_file(tmp_path: Path) -> None:
    serving = StandIn(network())
    given = tmp_path / "in"
    output = tmp_path / "out"
    given.mkdir()
    np.save(given / "x.npy", rows(0))
    np.savez(given / "x.npz", inputs=rows(1))
    torch.save(torch.from_numpy(rows(2)), given / "x.pt")
    pumped(serving, of_folder(serving, given, output))
    assert sorted(each.name for each in output.iterdir()) == ["x.npy.npy", "x.npz.npy", "x.pt.pt"]
    expected = serving.module(torch.from_numpy(rows(1))).detach().numpy()
    np.testing.assert_array_equal(np.load(output / "x.npz.npy"), expected)
    with pytest.raises(UsageError, match="answers would replace files"):
        request_sources.require_free(output, request_sources.questions(given, any_file=False), any_file=False)
    with pytest.raises(UsageError, match="answers would replace files"):
        pumped(
            serving,
            of_folder(serving, given, output),
        )


def read_exit(path: Path) -> Tensor:
    raise SystemExit(path.name) if path.suffix == ".end" else ZeroDivisionError("no")


@pytest.mark.parametrize(("name", "error"), [("a.end", SystemExit), ("a.txt", HalopipeError)])
def test_a_reader_that_fails_in_any_way_is_not_waited_for(tmp_path: Path, name: str, error: type) -> None:
    serving = StandIn(network())
    draining = request_sources.Draining()
    (tmp_path / name).write_text("")
    found = of_folder(serving, tmp_path, tmp_path / "out", f"{__name__}:read_exit", draining)
    with pytest.raises(error, match=name):
        list(request_sources.patiently(found, serving, draining))
