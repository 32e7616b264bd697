"""Requests over HTTP: a bare ASGI application under uvicorn, on the loopback interface unless another is named.

    POST /infer     {"inputs": [[...]]}     ->  200 {"output": ...}         JSON by the names of the model's tensors
                    an array of numpy.save  ->  200 an array                Content-Type: application/x-npy
    GET  /health                            ->  200, or 503 once a rank has failed or the stream drains
    GET  /metrics                           ->  200 what was asked so far, as JSON

A request that finds no room is answered 503 with Retry-After, and nothing of it is kept.  Bodies have a largest size
(413) and must come in time (408).  Nothing that comes over the net is unpickled.  The type of the content must be said:
a page in a browser cannot send these two to a port of the loopback interface without asking first, which nobody here
grants.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import uvicorn

from halopipe.serving import feeds
from halopipe.serving.feeds import Draining
from halopipe.serving.serving import Serving
from planner.ir.errors import BusyError, HalopipeError, UsageError

LOOPBACK = "127.0.0.1"
ARRAY, TEXT = "application/x-npy", "application/json"

_BODY_S = 30.0
_LOOK_S = 0.1
_DRAIN_S = 60
_MOST_WAITING = 64
"""Connections beyond those whose requests have room; more are turned away by the server before they are read."""

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class RefusedError(Exception):
    """A request that is answered with a status other than 200."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.headers = status, text, dict(headers or {})


class Application:
    """What a server calls for each request.

    Args:
        most_bytes: of a body.
        body_s: that a body may take to come.
    """

    def __init__(self, serving: Serving, most_bytes: int, draining: Draining, body_s: float = _BODY_S) -> None:
        self._serving, self._most_bytes, self._draining, self._body_s = serving, most_bytes, draining, body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As of ASGI 3."""
        if scope["type"] != "http":
            return
        try:
            content, kind = await self._answered(scope, receive)
            await _respond(send, 200, content, kind)
        except RefusedError as refused:
            text = json.dumps({"error": refused.text}).encode()
            await _respond(send, refused.status, text, TEXT, refused.headers)

    async def _answered(self, scope: Scope, receive: Receive) -> tuple[bytes, str]:
        path, method = scope["path"], scope["method"]
        wanted = {"/infer": "POST", "/health": "GET", "/metrics": "GET"}.get(path)
        if wanted is None:
            raise RefusedError(404, f"there is no {path}: POST /infer, GET /health, GET /metrics")
        if method != wanted:
            raise RefusedError(405, f"{path} takes {wanted}", {"Allow": wanted})
        if path == "/metrics":
            return json.dumps(summary(self._serving)).encode(), TEXT
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
            body = await asyncio.wait_for(self._body(headers, receive), self._body_s)
        except TimeoutError:
            raise RefusedError(408, f"the body did not come in {self._body_s:g} s") from None
        try:
            read = feeds.request_of_json if kind == TEXT else _array
            inputs, targets = read(self._serving, body)
            # In a thread: a rank that is slow to read holds whoever writes to it.
            future = await asyncio.to_thread(self._serving.submit, inputs, targets, block=False)
        except BusyError as error:
            raise RefusedError(503, error.title, {"Retry-After": str(self._retry_after_s())}) from error
        except UsageError as error:
            raise RefusedError(422, "; ".join([error.title, *error.details])) from error
        except HalopipeError as error:
            status = 503 if self._serving.failure is not None else 400
            raise RefusedError(status, "; ".join([error.title, *error.details])) from error
        try:
            output = (await asyncio.wrap_future(future)).output
            return (feeds.json_of(output), TEXT) if kind == TEXT else (_bytes(output), ARRAY)
        except HalopipeError as error:
            raise RefusedError(500, "; ".join([error.title, *error.details])) from error

    async def _body(self, headers: Mapping[str, str], receive: Receive) -> bytes:
        told = headers.get("content-length", "")
        if told.isdecimal() and int(told) > self._most_bytes:
            raise RefusedError(413, f"a body has at most {self._most_bytes} bytes, this one {told}")
        found = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RefusedError(400, "the client has left")
            found += message.get("body", b"")
            if len(found) > self._most_bytes:
                raise RefusedError(413, f"a body has at most {self._most_bytes} bytes")
            if not message.get("more_body", False):
                return bytes(found)

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
    if not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"{address!r} is no address", [], ["--http 8000", "--http 0.0.0.0:8000, for all interfaces"])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, int(port)))
    except (OSError, UnicodeError) as error:  # UnicodeError: a..b
        found.close()
        reason = error.strerror if isinstance(error, OSError) else None
        raise UsageError(f"nobody can listen at {host}:{port}", [reason or str(error)], ["another port"]) from error
    return found


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
        limit_concurrency=serving.room + _MOST_WAITING,
        timeout_graceful_shutdown=_DRAIN_S,
        http="h11",
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
    told = {"content-type": kind, "content-length": str(len(content)), **(headers or {})}
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in told.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": content})


def _array(serving: Serving, body: bytes) -> tuple[Any, Any]:
    return feeds.array_of(serving, io.BytesIO(body))


def _bytes(output: Any) -> bytes:
    found = io.BytesIO()
    np.save(found, feeds.only_array(output), allow_pickle=False)
    return found.getvalue()
