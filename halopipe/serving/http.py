"""Requests over HTTP: a bare ASGI application under uvicorn, on the loopback interface unless another is named.

    POST /infer     {"inputs": [[...]]}     ->  200 {"output": ...}         JSON by the names of the model's tensors
                    an array of numpy.save  ->  200 an array                Content-Type: application/x-npy
    GET  /health                            ->  200, or 503 once a rank has failed or the stream drains
    GET  /metrics                           ->  200 what was asked so far, as JSON

A request that finds no room is answered 503 with Retry-After, and nothing of it is kept.  Bodies have a largest size
(413), one each and another together (503), and must come in time (408).  They are parsed by a thread, one at a time.
Connections that do not bring a whole request in time are closed, the oldest of them as soon as there are too many, so
that whoever sends nothing, or slowly, keeps nobody out.  Nothing that comes over the net is unpickled.  The type of the
content must be said: a page in a browser cannot send these two to a port of the loopback interface without asking
first, which nobody here grants.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import re
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from halopipe.serving import request_sources
from halopipe.serving.request_sources import Draining
from halopipe.serving.serving import Serving
from planner.ir.errors import BusyError, HalopipeError, UsageError

LOOPBACK = "127.0.0.1"
ARRAY, TEXT = "application/x-npy", "application/json"

_HEADERS_S, _BODY_S = 10.0, 30.0
"""In which a request's headers come, and then its body; an answer is read in the time of a body too."""
_MOST_HEADER_BYTES = 2**14
_MOST_BODIES = 4
"""Bodies of the largest size that are held at a time; smaller ones may be more."""
_LOOK_S = 0.1
_DRAIN_S = 60
_MOST_CONNECTIONS = 256
"""Beyond them the one that has been without a whole request for the longest is closed."""

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class RefusedError(Exception):
    """A request that is answered with a status other than 200."""

    def __init__(
        self, status: int, text: str, headers: Mapping[str, str] | None = None, code: str = UsageError.code
    ) -> None:
        super().__init__(text)
        self.status, self.text, self.headers, self.code = status, text, dict(headers or {}), code

    @classmethod
    def of(cls, status: int, error: HalopipeError, headers: Mapping[str, str] | None = None) -> RefusedError:
        """By an error of ours, with its code."""
        return cls(status, "; ".join([error.title, *error.details]), headers, error.code)


class Application:
    """What a server calls for each request.

    Args:
        most_bytes: of a body.
        body_s: that a body may take to come.
    """

    def __init__(self, serving: Serving, most_bytes: int, draining: Draining, body_s: float = _BODY_S) -> None:
        self._serving, self._most_bytes, self._draining, self._body_s = serving, most_bytes, draining, body_s
        self._held_bytes = 0
        self._parses = asyncio.Semaphore(1)
        # Beside those that write to ranks, which may be slow to read, one is left to parse and one to look.
        self._threads = ThreadPoolExecutor(serving.room + 2, "requests")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As of ASGI 3."""
        if scope["type"] != "http":
            return
        try:
            content, kind = await self._answered(scope, receive)
            await _respond(send, 200, content, kind)
        except RefusedError as refused:
            text = json.dumps({"error": refused.text, "code": refused.code}).encode()
            await _respond(send, refused.status, text, TEXT, refused.headers)

    async def _answered(self, scope: Scope, receive: Receive) -> tuple[bytes, str]:
        path, method = scope["path"], scope["method"]
        wanted = {"/infer": "POST", "/health": "GET", "/metrics": "GET"}.get(path)
        if wanted is None:
            raise RefusedError(404, f"there is no {path}: POST /infer, GET /health, GET /metrics")
        if method != wanted:
            raise RefusedError(405, f"{path} takes {wanted}", {"Allow": wanted})
        if path == "/metrics":
            return json.dumps(await self._beside(summary, self._serving)).encode(), TEXT
        if self._serving.failure is not None or self._draining.is_set():
            raise RefusedError(503, "no requests are taken any more")
        if path == "/health":
            return b'{"status":"ok"}', TEXT
        return await self._infer(scope, receive)

    async def _infer(self, scope: Scope, receive: Receive) -> tuple[bytes, str]:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (ARRAY, TEXT):
            raise RefusedError(415, f"Content-Type is {kind or 'missing'}: {TEXT} or {ARRAY}")
        try:
            asked = await self._request(headers, receive, request_sources.request_of_json if kind == TEXT else _array)
            future = await self._beside(partial(self._serving.submit, block=False), *asked)
            del asked
        except BusyError as error:
            raise RefusedError.of(503, error, {"Retry-After": str(self._retry_after_s())}) from error
        except UsageError as error:
            raise RefusedError.of(422, error) from error
        except HalopipeError as error:
            raise RefusedError.of(503 if self._serving.failure is not None else 400, error) from error
        try:
            output = (await asyncio.wrap_future(future)).output
            return await self._beside(
                request_sources.json_of if kind == TEXT else request_sources.array_bytes, output
            ), kind
        except HalopipeError as error:
            raise RefusedError.of(503 if self._serving.failure is not None else 500, error) from error
        except asyncio.CancelledError:  # the server has waited for long enough
            raise RefusedError(503, "the server ended before there was an answer") from None

    async def _beside(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What ``work`` gives, done by a thread: others are answered meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _request(
        self, headers: Mapping[str, str], receive: Receive, read: Callable[..., tuple[Any, Any]]
    ) -> tuple[Any, Any]:
        """What the body asks, of which nothing is kept."""
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > len(str(self._most_bytes)) or int(length) > self._most_bytes):
            raise RefusedError(413, f"a body has at most {self._most_bytes} bytes, this one {length[:20]}")
        body = io.BytesIO()
        try:
            try:
                await asyncio.wait_for(self._fill(body, receive), self._body_s)
            except TimeoutError:
                raise RefusedError(408, f"the body did not come in {self._body_s:g} s") from None
            async with self._parses:
                asked: tuple[Any, Any] = await self._beside(read, self._serving, body.getvalue(), self._most_bytes)
            return asked
        finally:
            self._held_bytes -= body.tell()

    async def _fill(self, body: io.BytesIO, receive: Receive) -> None:
        """``body`` and the bytes that are held grow by what comes: there are no parts beside their sum."""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RefusedError(400, "the client has left")
            part = message.get("body", b"")
            if body.tell() + len(part) > self._most_bytes:
                raise RefusedError(413, f"a body has at most {self._most_bytes} bytes")
            if self._held_bytes + len(part) > _MOST_BODIES * self._most_bytes:
                raise RefusedError(503, "too many large requests at a time", {"Retry-After": "1"}, BusyError.code)
            self._held_bytes += body.write(part)
            if not message.get("more_body", False):
                return

    def _retry_after_s(self) -> int:
        """Whole seconds in which what is on its way is answered, at the pace so far."""
        counts = self._serving.counts
        pace_s = (counts.last_s - counts.first_s) / counts.requests if counts.requests else 1.0
        return max(1, math.ceil(self._serving.num_waiting * pace_s))


def summary(serving: Serving) -> dict[str, float | int]:
    """What was asked so far, for people and programs."""
    counts = serving.counts
    return {
        "requests": counts.requests,
        "samples": counts.samples,
        "refused": counts.refused,
        "waiting": serving.num_waiting,
        "samples_per_s": counts.samples_per_s,
        "latency_p10_s": counts.latency_s(0.1),
        "latency_p50_s": counts.latency_s(0.5),
        "latency_p90_s": counts.latency_s(0.9),
    }


def opened(address: str) -> socket.socket:
    """A socket that listens at ``[HOST:]PORT``; without a host on the loopback interface, port 0 is any that is free.

    Raises:
        UsageError: it is no address, or somebody else listens there.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or LOOPBACK
    if re.fullmatch("[0-9]{1,5}", port) is None or int(port) > 65535:
        address = address if len(address) < 100 else f"{address[:50]}..."
        raise UsageError(f"{address!r} is no address", [], ["--http 8000", "--http 0.0.0.0:8000, for all interfaces"])
    door = None
    try:
        door = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((host, int(port)))
        door.listen()  # at once: who reads that somebody listens may connect, and no other service takes the port
    except (OSError, ValueError, TypeError) as error:  # the last two: a name that none can have
        if door is not None:
            door.close()
        raise UsageError(
            f"nobody can listen at {host[:100]!a}:{port}",
            [getattr(error, "strerror", None) or str(error)],
            ["another port", "an address of this host"],
        ) from error
    return door


class _Connection(H11Protocol):
    """A connection that is closed where no whole request comes in time, or no answer is read."""

    _lapse: asyncio.TimerHandle | None = None
    _since_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > _MOST_CONNECTIONS:
            late = [each for each in self.connections if isinstance(each, _Connection) and each.is_incomplete]
            first = min(late, key=lambda each: each._since_s)  # there is one: this
            self.connections.discard(first)  # at once: others come before it hears of its end
            first.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._wait()
        super().on_response_complete()

    @property
    def is_incomplete(self) -> bool:
        """Whether no request is here that came whole and waits for its answer."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def pause_writing(self) -> None:
        self._stop()
        self._lapse = self.loop.call_later(_BODY_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._wait()
        super().resume_writing()

    def _wait(self) -> None:
        self._stop()
        self._since_s = self.loop.time()
        self._lapse = self.loop.call_later(_HEADERS_S, self._late)

    def _late(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()

    def _stop(self) -> None:
        if self._lapse is not None:
            self._lapse.cancel()


def listen(serving: Serving, door: socket.socket, most_bytes: int, draining: Draining) -> None:
    """Answers until it is told to drain, by SIGTERM or ``draining``; then what was taken, and no more.

    Raises:
        HalopipeError: what a rank has failed by.
    """
    application = Application(serving, most_bytes, draining)
    config = uvicorn.Config(
        application,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_S,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        http=_Connection,
        ws="none",
    )
    server = uvicorn.Server(config)

    async def serve() -> None:
        watching = asyncio.create_task(watch())
        await server.serve([door])
        watching.cancel()

    async def watch() -> None:
        while serving.failure is None and not draining.is_set():
            await asyncio.sleep(_LOOK_S)
        server.should_exit = True

    asyncio.run(serve())
    if serving.failure is not None:
        raise serving.failure


async def _respond(
    send: Send, status: int, content: bytes, kind: str, headers: Mapping[str, str] | None = None
) -> None:
    all_headers = {"content-type": kind, "content-length": str(len(content)), **(headers or {})}
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": content})


def _array(serving: Serving, body: bytes, most_bytes: int) -> tuple[Any, Any]:
    return request_sources.array_of(serving, io.BytesIO(body), most_bytes)
