"""A service under attack: ``halopipe serve --http`` beside idle, leaving and hostile clients.

    idle       80 connections that send nothing, or the beginning of a request, held all the while
    slow       5 bodies of the largest size, all but the last byte of each, held as well
    leaving    150 clients that ask and do not wait for the answer
    hostile    2,000 requests that are none: lies about sizes, archives, text for numbers, other dtypes, broken HTTP
    large      bodies of the largest size, one by one; what the server's memory grows by, over the body's size

After each of them right clients ask, and their answers are compared with the module.  ``/health`` is asked on new
connections throughout; its largest time is wall time, and says little on a machine that does something else.
"""

from __future__ import annotations

import http.client
import io
import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import Row, at_least, at_most, run
from benchmarks.seeds.jobs import folder_of, halopipe

_IDLE = 80
_SLOW = 5
_LEAVING = 150
_HOSTILE = 2000
_ASKED = 5
_ROWS = 16
_WIDTH = 8
_BODY_BYTES = 16 * 2**20
_MOST_GROWTH = 3.0
_HEALTH_MS = 200.0
_JSON = "application/json"
_NPY = "application/x-npy"

MODEL = f"""
import torch
from torch import nn


def model(input_shape=({_ROWS}, {_WIDTH})):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear({_WIDTH}, {_WIDTH}), nn.Tanh())
    return network.eval(), (torch.randn(*input_shape), torch.randn(*input_shape)), nn.functional.mse_loss
"""


def measure(quick: bool) -> list[Row]:
    """All of it against one server; ``--quick`` has a tenth of the hostile requests and smaller bodies."""
    return list(_rows(_HOSTILE // 10 if quick else _HOSTILE, _BODY_BYTES // 4 if quick else _BODY_BYTES))


def _rows(hostile: int, body_bytes: int) -> Iterator[Row]:
    with folder_of(MODEL) as folder:
        halopipe(folder, "profile", "model.py:model", "--quick")
        halopipe(folder, "plan", "profile.json", "--objective", "latency", "--schedule", "forward", "-o", "plan.json")
        with served(folder, body_bytes) as (port, process), _Health(port) as health, ExitStack() as held:
            for number in range(_IDLE):
                held.enter_context(_sent(port, (b"", b"POST /infer HTT")[number % 2]))
            yield at_least(f"right answers beside {_IDLE} idle connections", _right(folder, port), "of 5", _ASKED)
            with ExitStack() as slow:
                for _ in range(_SLOW):
                    slow.enter_context(_sent(port, _raw(_JSON, b" " * body_bytes)[:-1]))
                yield at_least(f"right answers beside {_SLOW} slow bodies", _right(folder, port), "of 5", _ASKED)
            for _ in range(_LEAVING):
                _sent(port, _raw(_JSON, json.dumps({"inputs": _numbers(0).tolist()}).encode())).close()
            yield at_least(f"right answers after {_LEAVING} clients that left", _right(folder, port), "of 5", _ASKED)
            statuses = [_asked(port, text) for text in _hostile(hostile)]
            yield at_least(f"right answers after {hostile} hostile requests", _right(folder, port), "of 5", _ASKED)
            wrong = sum(not 400 <= status < 500 for status in statuses)
            yield at_most("hostile requests not refused as such (4xx)", wrong, "", 0)
            worst = max(_growth(port, process.pid, kind, body) for kind, body in large(body_bytes))
            yield at_most("memory that a body takes, at most", worst, "of its bytes", _MOST_GROWTH)
            yield at_least("right answers after all", _right(folder, port), "of 5", _ASKED)
        yield Row("/health, asked", len(health.seconds), "")
        yield at_most("/health, not answered by 200", health.failed, "", 0)
        yield at_most("/health, slowest", 1e3 * max(health.seconds), "ms", _HEALTH_MS)


@contextmanager
def served(folder: Path, body_bytes: int) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """The plan in ``folder``, served; its port."""
    command = [sys.executable, "-m", "halopipe", "serve", "plan.json", "--http", "0", "--mode", "eval"]
    command += ["--max-request", str(body_bytes)]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr or ())
        address = next(line for line in lines if "listening at" in line)
        threading.Thread(target=list, args=(lines,), daemon=True).start()
        yield int(address.rpartition(":")[2].partition("/")[0]), process
    finally:
        process.terminate()
        process.wait(90)


class _Health:
    """``/health``, asked again and again by a thread while its body runs."""

    def __init__(self, port: int) -> None:
        self.seconds: list[float] = []
        self.failed = 0
        self._port = port
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> _Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._is_over.wait(0.02):
            began_s = time.perf_counter()
            self.failed += _asked(self._port, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") != 200
            self.seconds.append(time.perf_counter() - began_s)


def _numbers(seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(size=(_ROWS, _WIDTH)).astype(np.float32)


def _right(folder: Path, port: int) -> int:
    """Of some requests, those whose answers are the module's."""
    import torch  # late, as for all that is served

    from profiler.source.source import find_factory

    module = find_factory(f"{folder}/model.py:model")()[0]
    right = 0
    for seed in range(_ASKED):
        with torch.no_grad():
            expected = module(torch.from_numpy(_numbers(seed))).numpy()
        found = _output(port, json.dumps({"inputs": _numbers(seed).tolist()}))
        right += found is not None and np.allclose(found, expected, rtol=1e-5, atol=1e-6)
    return right


def _output(port: int, text: str) -> list[Any] | None:
    """What is answered to a client that comes again when it is told so; None: nothing in half a minute."""
    ends_s = time.monotonic() + 30
    while time.monotonic() < ends_s:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        with closing(link), suppress(OSError, ValueError):
            link.request("POST", "/infer", text, {"Content-Type": _JSON})
            answer = link.getresponse()
            told = json.loads(answer.read())
            if answer.status == http.HTTPStatus.OK:
                return list(told["output"])
        time.sleep(0.1)
    return None


def _sent(port: int, text: bytes) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=60)
    found.sendall(text)
    return found


def _asked(port: int, text: bytes) -> int:
    """The status of the answer; 0: there was none."""
    try:
        with _sent(port, text) as link:
            return int(link.recv(4096).split(b" ", 2)[1])
    except (OSError, IndexError, ValueError):
        return 0


def _raw(kind: str, body: bytes) -> bytes:
    head = f"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _array(array: np.ndarray[Any, Any]) -> bytes:
    found = io.BytesIO()
    np.save(found, array)
    return found.getvalue()


def _header(shape: str) -> bytes:
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text


def _archive() -> bytes:
    found = io.BytesIO()
    np.savez_compressed(found, inputs=np.zeros((1000, 1000)))
    return found.getvalue()


def _hostile(count: int) -> Sequence[bytes]:
    """Texts that are no requests, of every kind by turns."""
    fixed = random.Random(0)
    ones = np.ones((_ROWS, _WIDTH))
    kinds = [
        _raw(_NPY, _archive()),
        _raw(_NPY, _header("(10000000000000,)")),
        _raw(_NPY, _header("(-1, 8)")),
        _raw(_NPY, _array(ones.astype(np.complex64))),
        _raw(_NPY, _array(ones * 1e300)),
        _raw(_NPY, _array(np.array([["a"] * _WIDTH]))),
        _raw(_NPY, _array(ones.astype(np.float32))[:-3]),
        _raw(_NPY, fixed.randbytes(500)),
        _raw(_JSON, b'{"inputs": [[1e999]]}'),
        _raw(_JSON, b'{"inputs": [[1, true]]}'),
        _raw(_JSON, b'{"inputs": [[1], [1, 2]]}'),
        _raw(_JSON, b'{"inputs": ' + b"[" * 5000),
        _raw(_JSON, b'{"inputs": [' + b"9" * 5000 + b"]}"),
        _raw(_JSON, fixed.randbytes(500)),
        _raw(_JSON, b'{"\\ud800": [1]}'),
        _raw("text/plain", b"{}"),
        _raw(_JSON, b"{}").replace(b"localhost", b"rebound.example"),
        _raw(_JSON, b"{}").replace(b"\r\n", b"\r\nX-Large: " + b"a" * 20_000 + b"\r\n", 1),
        b"POST /infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        fixed.randbytes(50) + b"\r\n\r\n",
    ]
    return [kinds[number % len(kinds)] for number in range(count)]


def large(body_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Bodies of the largest size, none of which is a request: text, empty lists, numbers of one digit, and of many."""
    for part in (b'"aaaa"', b"[]", b"0", b"0.12345678901234567", b"true", b"[0]"):
        room = body_bytes - 100
        yield _JSON, b'{"inputs": [' + (part + b",") * (room // (len(part) + 1)) + part + b"]}"
    yield _NPY, _array(np.zeros(body_bytes // 4 - 100, np.float32))
    yield _NPY, _array(np.zeros(body_bytes - 200, np.uint8))


def _growth(port: int, pid: int, kind: str, body: bytes) -> float:
    """What the server's resident memory grows by while it looks at a body, over the body's size."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the largest so far is what is there now
    before = _resident(pid, "VmRSS")
    _asked(port, _raw(kind, body))
    return (_resident(pid, "VmHWM") - before) / len(body)


def _resident(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


if __name__ == "__main__":
    raise SystemExit(run("A service under attack (loopback; memory of the server's process)", measure))
