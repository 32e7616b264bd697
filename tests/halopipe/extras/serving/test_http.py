"""The port and what it reads: answers, their status, limits of bodies, arrays and JSON as numpy and json have them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import pickle
import resource
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
import torch
from starlette.applications import Starlette
from torch import nn

from halopipe.extras.serving import arrays, http
from halopipe.extras.serving.request_sources import Draining
from planner.ir.errors import FormatError, UsageError, WorkerDiedError
from tests.forks import forked
from tests.halopipe.extras.serving.stand_in import StandIn, network, npy

JSON = {"content-type": "application/json"}
ARRAY = {"content-type": "application/x-npy"}
ROWS = np.arange(6.0).reshape(2, 3)
REQUEST = json.dumps({"inputs": ROWS.tolist()}).encode()


async def asked(
    application: Starlette,
    path: str = "/infer",
    method: str = "POST",
    headers: dict[str, str] | None = None,
    body: Sequence[bytes] = (REQUEST,),
    *,
    stalls: bool = False,
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and content; a body comes in parts, and never ends if it ``stalls``."""
    parts = list(body)
    sent = list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        if not parts and stalls:
            await asyncio.sleep(60)
        part = parts.pop(0) if parts else b""
        return {"type": "http.request", "body": part, "more_body": bool(parts) or stalls}

    async def send(message: Any) -> None:
        sent.append(dict(message))

    found = [(name.encode(), value.encode()) for name, value in (JSON if headers is None else headers).items()]
    await application({"type": "http", "path": path, "method": method, "headers": found}, receive, send)
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], told, sent[1]["body"]


def one(serving: StandIn, *, most_bytes: int = 10_000, body_s: float = 20.0, **request: Any) -> tuple[int, Any, bytes]:
    application = http.application(serving, most_bytes, Draining(), body_s)  # type: ignore[arg-type]
    return asyncio.run(asked(application, **request))


def test_json_and_arrays_are_answered_likewise() -> None:
    serving = StandIn(network())
    expected = serving.module(torch.from_numpy(ROWS)).detach().numpy()
    status, headers, content = one(serving, body=(REQUEST[:10], REQUEST[10:]))
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(content) == {"output": expected.tolist()}
    status, headers, content = one(serving, headers=ARRAY, body=(npy(ROWS),))
    assert (status, headers["content-type"]) == (200, "application/x-npy")
    np.testing.assert_array_equal(np.load(io.BytesIO(content), allow_pickle=False), expected)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (404, {"path": "/other"}),
        (405, {"method": "GET"}),
        (405, {"path": "/health"}),
        (415, {"headers": {}}),
        (415, {"headers": {"content-type": "text/plain"}}),
        (415, {"headers": {"content-type": "application/x-pickle"}, "body": (pickle.dumps([1]),)}),
        (413, {"headers": {**JSON, "content-length": "10001"}, "body": ()}),
        (413, {"body": (b" " * 9000, b" " * 9000)}),
        (400, {"body": (b"{",)}),
        (400, {"body": (b"[" * 5000,)}),
        (400, {"body": (b'{"inputs": [[Infinity, 1, 2]]}',)}),
        (400, {"body": (b'{"inputs": [[1e999, 1, 2]]}',)}),
        (400, {"body": (b'{"inputs": [[true, 1, 2]]}',)}),
        (400, {"body": (b'{"inputs": [[' + b"9" * 5000 + b", 1, 2]]}",)}),
        (400, {"headers": ARRAY, "body": (b"no array",)}),
        (400, {"headers": ARRAY, "body": (npy(np.array([{}], dtype=object), allow_pickle=True),)}),
        (400, {"headers": ARRAY, "body": (npy(ROWS.astype(np.complex64)),)}),
        (400, {"headers": ARRAY, "body": (b"PK\3\4" + bytes(200),)}),
        (400, {"headers": ARRAY, "body": (npy(ROWS)[:-1],)}),
        (400, {"headers": ARRAY, "body": (npy(ROWS) * 2,)}),
        (422, {"body": (b'{"other": [[1, 2, 3]]}',)}),
        (422, {"body": (b'{"inputs": [1, 2, 3]}',)}),
    ],
)
def test_what_is_no_request_is_refused(status: int, request_: dict[str, Any]) -> None:
    serving = StandIn(network())
    found, _, content = one(serving, **request_)
    assert found == status
    told = json.loads(content)
    assert told["error"]
    assert status != 400 or told["code"] == "H307"
    assert serving.counts.requests == 0


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    assert one(StandIn(network()), body_s=0.01, body=(b"{",), stalls=True)[0] == 408


def test_what_finds_no_room_is_told_when_to_come_again() -> None:
    serving = StandIn(network(), room=2, held=True)
    application = http.application(serving, 10_000, Draining())  # type: ignore[arg-type]

    async def crowd() -> list[tuple[int, dict[str, str], bytes]]:
        tasks = [asyncio.create_task(asked(application)) for _ in range(6)]
        while sum(task.done() for task in tasks) < 4:
            await asyncio.sleep(0.001)
        serving.go.set()
        return list(await asyncio.gather(*tasks))

    found = asyncio.run(crowd())
    assert sorted(status for status, _, _ in found) == [200] * 2 + [503] * 4
    assert all(int(headers["retry-after"]) >= 1 for status, headers, _ in found if status == 503)
    assert serving.most_waiting == 2


def test_a_lost_rank_is_told_and_health_says_so() -> None:
    serving = StandIn(network(), held=True)
    assert one(serving, path="/health", method="GET")[0] == 200
    serving.fail(WorkerDiedError("rank 1 died"))
    assert one(serving)[0] == one(serving, path="/health", method="GET")[0] == 503
    assert one(serving, path="/metrics", method="GET")[0] == 200


class Times(nn.Module):
    def __init__(self, factor: complex) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


@pytest.mark.parametrize(("factor", "said"), [(float("inf"), "NaN or infinity"), (1j, "complex")])
def test_answers_that_json_has_not_are_no_answers(factor: complex, said: str) -> None:
    status, _, content = one(StandIn(Times(factor)))
    assert (status, said in json.loads(content)["error"]) == (500, True)
    assert one(StandIn(Times(factor)), headers=ARRAY, body=(npy(ROWS),))[0] == 200


def test_nobody_else_is_listened_to_unless_it_is_asked_for() -> None:
    with http.opened("0") as door:
        assert door.getsockname()[0] == "127.0.0.1"
        socket.create_connection(door.getsockname(), timeout=20).close()  # who is told of the port may come at once
        with pytest.raises(UsageError, match="nobody can listen"):
            http.opened(str(door.getsockname()[1]))


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host has no IPv6, or that apart from IPv4")
def test_all_interfaces_are_those_of_both_kinds() -> None:
    with http.opened("[::]:0") as door:
        port = door.getsockname()[1]
        for address in ("::1", "127.0.0.1"):
            with socket.create_connection((address, port), timeout=20) as client:
                assert client.getpeername()[:2] == (address, port)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "localhost:",
        "99999",
        "-1",
        "1" * 5000,
        "a..b:80",
        "x" * 100 + ":80",
        "a\0b:80",
        "1.2.3.4:80",
        "\u0661:\u00b2",
    ],
)
def test_an_address_that_nobody_has_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        http.opened(text)


@contextlib.contextmanager
def port_of(serving: StandIn, most_bytes: int = 2**20, names: frozenset[str] = frozenset()) -> Iterator[int]:
    draining = Draining()
    door = http.opened("0")
    thread = threading.Thread(target=http.listen, args=(serving, door, most_bytes, draining, names))
    thread.start()
    try:
        yield door.getsockname()[1]
    finally:
        draining.set()
        thread.join(20)
    assert not thread.is_alive()


def answer(port: int, body: bytes = REQUEST, headers: dict[str, str] = JSON) -> tuple[int, Any]:
    link = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        link.request("POST", "/infer", body, headers)
        found = link.getresponse()
        return found.status, json.loads(found.read())
    finally:
        link.close()


def connected(port: int, text: bytes = b"") -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=20)
    found.sendall(text)
    return found


def is_closed(link: socket.socket) -> bool:
    link.settimeout(0)
    try:
        return not link.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


SLOW = b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"


def test_connections_that_send_nothing_or_little_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_MOST_CONNECTIONS", 20)
    serving = StandIn(network())
    with port_of(serving) as port, contextlib.ExitStack() as held:
        links = [held.enter_context(connected(port, (b"", b"POST /inf", SLOW)[number % 3])) for number in range(60)]
        for _ in range(3):
            assert answer(port)[0] == 200
        assert sum(map(is_closed, links)) >= 40


def test_bodies_that_come_slowly_keep_nobody_out() -> None:
    slow = SLOW.replace(b"99", b"100000") + b" " * 99_999
    with port_of(StandIn(network()), 100_000) as port, contextlib.ExitStack() as held:
        for _ in range(2):
            links = [held.enter_context(connected(port, slow)) for _ in range(5)]
            assert b"503" in links[0].recv(1000)  # the oldest gives its room to the last
            assert answer(port)[0] == 200
            assert answer(port, REQUEST + b" " * (100_000 - len(REQUEST)))[0] == 200
            assert b"503" in links[1].recv(1000)


def test_as_many_connections_are_kept_as_files_may_be_open() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def crowd(_: int) -> list[int]:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        with contextlib.ExitStack() as held:
            for _ in range(150):
                held.enter_context(connected(port))
            return [answer(port)[0] for _ in range(5)]

    few = len(os.listdir("/dev/fd")) + 80
    serving = StandIn(network())
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
        with port_of(serving) as port:
            assert forked(1, crowd) == [[200] * 5]
        resource.setrlimit(resource.RLIMIT_NOFILE, (few - 50, limits[1]))
        with pytest.raises(UsageError, match="too few files may be open"):
            http.most_connections()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:{port}", 200),
        ("localhost:9000", 200),
        ("LOCALHOST.", 200),
        ("[::1]:{port}", 200),
        ("10.0.0.1", 200),
        ("models.example:443", 200),
        ("rebound.example:{port}", 421),
        ("127.0.0.1.rebound.example", 421),
        ("localhost:80:rebound.example", 421),
    ],
)
def test_a_page_that_has_its_own_name_lead_here_is_not_answered(host: str, status: int) -> None:
    with port_of(StandIn(network()), names=http.names_of("0", ["Models.Example"])) as port:
        assert answer(port, headers={**JSON, "Host": host.format(port=port)})[0] == status


def test_headers_are_no_larger_than_is_said_however_they_come() -> None:
    with port_of(StandIn(network())) as port:
        assert answer(port, headers={**JSON, "X-Large": "a" * 15_000})[0] == 200
        assert answer(port, headers={**JSON, "X-Large": "a" * 20_000})[0] == 431
        with connected(port, b"GET /health?" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n") as link:
            assert b"431" in link.recv(1000)


@pytest.mark.every_case
@pytest.mark.parametrize("name", ["\\ud800", "\\u0000", "\\u202e", "\\ud800\\udc00"])
def test_names_that_no_text_has_are_told_by_their_escapes(name: str) -> None:
    with port_of(StandIn(network())) as port:
        status, told = answer(port, f'{{"{name}": [1]}}'.encode())
    assert status == 422
    assert name in told["error"] or name.startswith("\\ud800\\udc00")


def test_others_are_answered_while_a_body_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsing = threading.Event()
    go = threading.Event()
    late = list[bool]()

    def slow(*_: object) -> Any:
        parsing.set()
        late.append(not go.wait(5))
        raise FormatError("this is no request")

    monkeypatch.setattr(http.request_sources, "request_of_json", slow)
    with port_of(StandIn(network())) as port, connected(port, SLOW + b" " * 99) as link:
        assert parsing.wait(20)
        with connected(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as health:
            assert b"200 OK" in health.recv(1000)
        assert not late
        go.set()
        assert b"400" in link.recv(1000)


def test_headers_that_do_not_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_HEADERS_S", 0.05)
    with port_of(StandIn(network())) as port:
        for text in (
            b"",
            b"GET /hea",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            SLOW.replace(b"json", b"xml"),
        ):
            with connected(port, text) as link:
                while link.recv(1000):
                    pass
        with connected(port, b"GET /" + b"a" * 50_000) as link:
            assert b"400" in link.recv(1000)
            while link.recv(1000):
                pass


def test_whoever_waits_when_the_server_ends_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_DRAIN_S", 0.2)
    serving = StandIn(network(), held=True)
    found = list[tuple[int, Any]]()
    with port_of(serving) as port:
        asks = threading.Thread(target=lambda: found.append(answer(port)))
        asks.start()
        while not serving.num_waiting:
            time.sleep(1e-3)
    asks.join(20)
    serving.go.set()
    assert [status for status, _ in found] == [503]
    assert "ended before" in found[0][1]["error"]


MOST = 2**24


def read(data: bytes, wanted: torch.dtype, most: int = MOST) -> torch.Tensor:
    found = arrays.read_npy(io.BytesIO(data), "x", wanted, most)
    assert found is not None
    return found


@pytest.mark.parametrize("shape", [(), (1,), (3, 1), (7, 5, 3), (400, 100)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bool])
@pytest.mark.parametrize("indent", [None, 1])
def test_numbers_of_json_are_those_that_json_reads(
    shape: tuple[int, ...], dtype: torch.dtype, indent: int | None
) -> None:
    numbers = np.random.default_rng(0).normal(size=shape) * 100
    expected = torch.from_numpy(np.array(numbers > 0 if dtype == torch.bool else numbers)).to(dtype)
    text = json.dumps({"x": expected.tolist(), "y": [1]}, indent=indent).encode()
    found = arrays.tensors_of_json(text, {"x": dtype, "y": torch.int64}, MOST)
    assert found["x"].dtype == dtype
    assert torch.equal(found["x"], expected)
    assert found["y"].tolist() == [1]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("came", "wanted"),
    [
        (np.ones(2, np.complex64), torch.float32),
        (np.ones(2), torch.int64),
        (np.ones(2, bool), torch.float32),
        (np.ones(2, np.int64), torch.bool),
        (np.array([2**63], np.uint64), torch.int64),
        (np.array([300]), torch.uint8),
        (np.array([-1]), torch.uint64),
        (np.array([2**24 + 1]), torch.float32),
        (np.array([1e300]), torch.float32),
        (np.array([1e300 + 0j]), torch.complex64),
        (np.array(["a"]), torch.float32),
        (np.zeros(1, [("a", "f4")]), torch.float32),
        (np.zeros(1, "M8[s]"), torch.int64),
        (np.zeros(1, np.longdouble), torch.float64),
    ],
)
def test_what_cannot_be_kept_is_refused_with_both_dtypes(came: np.ndarray, wanted: torch.dtype) -> None:
    with pytest.raises(FormatError, match=r"^.*x is ") as told:
        read(npy(came), wanted)
    assert str(came.dtype) in str(told.value)


@pytest.mark.parametrize(
    ("came", "wanted"),
    [
        (np.array([1.1, np.inf, np.nan]), torch.float32),
        (np.array([1, 2], np.uint8), torch.float32),
        (np.array([5], np.uint64), torch.int64),
        (np.array([1.5], np.float32), torch.complex64),
        (np.array([1.5], ">f4"), torch.float64),
    ],
)
def test_what_can_be_kept_is(came: np.ndarray, wanted: torch.dtype) -> None:
    found = read(npy(came), wanted)
    expected = torch.from_numpy(came.astype(came.dtype.newbyteorder("="))).to(wanted)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def header(text: bytes) -> bytes:
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text


@pytest.mark.every_case
@pytest.mark.parametrize(
    "data",
    [
        b"PK\3\4" + bytes(100),
        b"\x93NUMPY",
        b"\x93NUMPY\3\0" + bytes(100),
        header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,)}\n"),
        header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000000000, 0)}\n")[:-5],
        header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000000000000, 0)}\n"),
        header(b"{'descr': '<f8', 'fortran_order': True, 'shape': (9000000000000000000, 9000000000000000000, 0)}\n"),
        b"\x93NUMPY\2\0" + b"\xff" * 4,
        b"\x93NUMPY\2\0\x10",
        header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}\n"),
        header(b"{'descr': '<f8', 'fortran_order': False, 'shape': (True, 2.5)}\n"),
        header(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n"),
        header(b"{'descr': ('<f8', (1000000,)), 'fortran_order': False, 'shape': (1,)}\n"),
        header(b"{'descr': '|S1000000000', 'fortran_order': False, 'shape': (1,)}\n"),
        header(b"(" * 5000),
        header(b"-" * 9000 + b"1"),
        header(b"\xff" * 100),
        header(b"{'shape"),
        header(b"  x\n y"),
        npy(np.ones(9))[:-1],
        npy(np.array([{}], dtype=object), allow_pickle=True),
    ],
)
def test_arrays_that_lie_about_themselves_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        read(data, torch.float64)


BYTES = 2**20


@pytest.mark.every_case
@pytest.mark.parametrize(
    "value",
    [
        b"[" + b'"a",' * (BYTES // 4) + b'"' + b"a" * 1000 + b'"]',
        b"[" + b"[]," * (BYTES // 3) + b"[]]",
        b"[" * BYTES,
        b"[" + b"0," * (BYTES // 2) + b"0]",
        b"[" + b"1" * BYTES + b"]",
        b"[" + b"[0]," * (BYTES // 4) + b"[0,0]]",
        b"[" + b"1e999," * (BYTES // 6) + b"0]",
        b"[" + b"12345678901234567890," * (BYTES // 21) + b"0]",
        b" " * BYTES,
        b"[" + b"true," * (BYTES // 5) + b"true]",
        b"[" + b"null," * (BYTES // 5) + b"null]",
        b'{"a":' * (BYTES // 5),
    ],
)
def test_a_body_that_is_refused_takes_no_more_than_three_times_its_bytes(value: bytes) -> None:
    text = b'{"x": ' + value + b"}"
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            arrays.tensors_of_json(text, {"x": torch.int32}, BYTES)
        assert tracemalloc.get_traced_memory()[1] < 2 * len(text)  # beside the text itself
    finally:
        tracemalloc.stop()
