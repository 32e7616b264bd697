"""Requests over HTTP: Starlette under uvicorn, on the loopback interface unless another is named.

    POST /infer     {"inputs": [[...]]}     ->  200 {"output": ...}         JSON by the names of the model's tensors
                    an array of numpy.save  ->  200 an array                Content-Type: application/x-npy
    GET  /health                            ->  200, or 503 once a rank has failed or the stream drains
    GET  /metrics                           ->  200 what was asked so far, as JSON

A request that finds no room is answered 503 with Retry-After, and nothing of it is kept.  Headers have a largest size
(431), and bodies (413), which must come in time (408) and are parsed by a thread, one at a time.  Bodies have a largest
size together, too: where one finds no room, those that have been on their way for the longest are given up (503).
Connections that do not bring a whole request in time are closed, the oldest of them as soon as there are too many.  So
whoever sends nothing, or slowly, keeps nobody out.  Nothing that comes over the net is unpickled.  The type of the
content must be said: a page in a browser cannot send these two to a port of the loopback interface without asking
first, which nobody here grants.  Nor can a page whose own name leads to this address ask (DNS rebinding): a request
that names another host than those it is served under is refused (421).
"""

from __future__ import annotations

import asyncio
import io
import ipaddress
import math
import os
import re
import resource
import socket
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from halopipe.extras.serving import request_sources
from halopipe.extras.serving.request_sources import Draining
from halopipe.extras.serving.serving import Serving
from halopipe.terminal.console import visible
from planner.ir.errors import BusyError, HalopipeError, UsageError

LOOPBACK = "127.0.0.1"
ARRAY = "application/x-npy"
TEXT = "application/json"

_HEADERS_S = 10.0
_BODY_S = 30.0
"""In which a request's headers come, and then its body; an answer is read in the time of a body too."""
_MOST_HEADER_BYTES = 2**14
_MOST_BODIES = 4
"""Bodies of the largest size that are held at a time; smaller ones may be more."""
_DRAIN_S = 60
_MOST_CONNECTIONS = 256
_LEAST_CONNECTIONS = 8
"""Beyond the most the one that has been without a whole request for the longest is closed."""
_ACCEPTED_AT_ONCE = 16
_OTHER_FILES = 24
"""Connections that come before one too many is closed; files beside connections that this process may yet open."""
_BACKLOG = 2048
"""Connections that wait to be accepted."""


class RefusedError(HTTPException):
    """A request that is answered with a status other than 200."""

    def __init__(
        self, status: int, text: str, headers: Mapping[str, str] | None = None, code: str = UsageError.code
    ) -> None:
        super().__init__(status, text, headers)
        self.code = code

    @classmethod
    def of(cls, status: int, error: HalopipeError, headers: Mapping[str, str] | None = None) -> RefusedError:
        """By an error of ours, with its code."""
        return cls(status, "; ".join([error.title, *error.details]), headers, error.code)


def application(
    serving: Serving, most_bytes: int, draining: Draining, body_s: float = _BODY_S, names: Collection[str] = ()
) -> Starlette:
    """What a server calls for each request.

    Args:
        most_bytes: of a body.
        body_s: that a body may take to come.
        names: of the server, in small letters, beside ``localhost`` and addresses.
    """
    answers = _Answers(serving, most_bytes, draining, body_s)
    routes = [
        Route("/infer", answers.infer, methods=["POST"]),
        Route("/health", answers.health),
        Route("/metrics", answers.metrics),
    ]
    for route in routes:
        (route.methods or set()).discard("HEAD")
    starlette = Starlette(
        routes=routes,
        exception_handlers={HTTPException: cast("Any", _refused)},
        middleware=[Middleware(_Admission, frozenset(["localhost", *names]))],
    )
    starlette.router.redirect_slashes = False
    return starlette


@dataclass(frozen=True)
class _Admission:
    """Refuses, by its headers alone, what is too large or meant for another server."""

    app: ASGIApp
    names: frozenset[str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        target: ASGIApp = self.app
        try:
            _require_small_headers(scope)
            self._require_own_name(Headers(scope=scope).get("host", ""))
        except RefusedError as error:
            target = await _refused(Request(scope), error)
        await target(scope, receive, send)

    def _require_own_name(self, host: str) -> None:
        """An address is nobody's name; none at all comes from no browser."""
        name = re.sub(r":[0-9]*\Z", "", host).strip("[]").removesuffix(".").lower()
        if name and name not in self.names and not _is_address(name):
            names = ", ".join(sorted(self.names))
            raise RefusedError(421, f"no server of the name {name[:100]} is here, but {names}; more: serve --names")


def _require_small_headers(scope: Scope) -> None:
    num_bytes = len(scope.get("raw_path") or b"") + len(scope.get("query_string", b""))
    num_bytes += sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
    if num_bytes > _MOST_HEADER_BYTES:
        raise RefusedError(431, f"headers have at most {_MOST_HEADER_BYTES} bytes, these {num_bytes}")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@dataclass(eq=False, slots=True)
class _Body:
    """What is here of a request's body.

    Attributes:
        limit: ends the wait for more.
        is_whole: whether all of it is here; else it may be given up.
        is_given_up: whether others needed its room.
    """

    limit: asyncio.Timeout
    content: io.BytesIO = field(default_factory=io.BytesIO)
    is_whole: bool = False
    is_given_up: bool = False

    def give_up(self) -> None:
        self.content = io.BytesIO()
        self.is_given_up = True
        self.limit.reschedule(0.0)


class _Answers:
    def __init__(self, serving: Serving, most_bytes: int, draining: Draining, body_s: float) -> None:
        self._serving = serving
        self._most_bytes = most_bytes
        self._draining = draining
        self._body_s = body_s
        self._bodies: list[_Body] = []  # the oldest first
        self._parses = asyncio.Semaphore(1)
        # Beside those that write to ranks, which may be slow to read, one is left to parse and one to look.
        self._threads = ThreadPoolExecutor(serving.room + 2, "requests")

    async def metrics(self, _: Request) -> Response:
        counts = await self._beside(lambda: self._serving.counts.summary)
        return JSONResponse({**counts, "waiting": self._serving.num_waiting})

    async def health(self, _: Request) -> Response:
        if self._serving.failure is not None or self._draining.is_set():
            raise RefusedError(503, "no requests are taken any more")
        return JSONResponse({"status": "ok"})

    async def infer(self, request: Request) -> Response:
        await self.health(request)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind not in (ARRAY, TEXT):
            raise RefusedError(415, f"Content-Type is {kind or 'missing'}: {TEXT} or {ARRAY}")
        read, write = (
            (request_sources.request_of_json, request_sources.json_of)
            if kind == TEXT
            else (request_sources.array_of, request_sources.array_bytes)
        )
        try:
            future = await self._beside(partial(self._serving.submit, block=False), *await self._read(request, read))
        except BusyError as error:
            raise RefusedError.of(503, error, {"Retry-After": str(self._retry_after_s())}) from error
        except UsageError as error:
            raise RefusedError.of(422, error) from error
        except HalopipeError as error:
            raise RefusedError.of(503 if self._serving.failure is not None else 400, error) from error
        try:
            return Response(await self._beside(write, (await asyncio.wrap_future(future)).output), media_type=kind)
        except HalopipeError as error:
            raise RefusedError.of(503 if self._serving.failure is not None else 500, error) from error
        except asyncio.CancelledError:  # the server has waited for long enough
            raise RefusedError(503, "the server ended before there was an answer") from None

    async def _beside(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What ``work`` gives, done by a thread: others are answered meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def _read(self, request: Request, read: Callable[..., tuple[Any, Any]]) -> tuple[Any, Any]:
        """What the body asks, of which nothing is kept.

        The body and the bytes that are held grow by what comes: there are no parts beside their sum.
        """
        length = request.headers.get("content-length", "")
        if length.isdecimal() and (len(length) > len(str(self._most_bytes)) or int(length) > self._most_bytes):
            raise RefusedError(413, f"a body has at most {self._most_bytes} bytes, this one {length[:20]}")
        body = _Body(asyncio.timeout(self._body_s))
        self._bodies.append(body)
        try:
            async with body.limit:
                async for part in request.stream():
                    self._make_room(body, len(part))
                    body.content.write(part)
            body.is_whole = True
            async with self._parses:
                content = body.content.getvalue()
                asked: tuple[Any, Any] = await self._beside(read, self._serving, content, self._most_bytes)
            return asked
        except TimeoutError:
            if body.is_given_up:
                raise _too_many_bodies() from None
            raise RefusedError(408, f"the body did not come in {self._body_s:g} s") from None
        except ClientDisconnect:
            raise RefusedError(400, "the client has left") from None
        finally:
            self._bodies.remove(body)

    def _make_room(self, body: _Body, num_bytes: int) -> None:
        """Raises :class:`RefusedError` unless ``num_bytes`` more may come, for which older bodies may be given up."""
        if body.content.tell() + num_bytes > self._most_bytes:
            raise RefusedError(413, f"a body has at most {self._most_bytes} bytes")
        most_bytes = _MOST_BODIES * self._most_bytes
        while not body.is_given_up and sum(each.content.tell() for each in self._bodies) + num_bytes > most_bytes:
            next(each for each in self._bodies if not each.is_whole and not each.is_given_up).give_up()
        if body.is_given_up:
            raise _too_many_bodies()

    def _retry_after_s(self) -> int:
        """Whole seconds in which what is on its way is answered, at the pace so far."""
        counts = self._serving.counts
        pace_s = (counts.last_s - counts.first_s) / counts.requests if counts.requests else 1.0
        return max(1, math.ceil(self._serving.num_waiting * pace_s))


def _too_many_bodies() -> RefusedError:
    return RefusedError(503, "too many large requests at a time", {"Retry-After": "1"}, BusyError.code)


async def _refused(request: Request, error: HTTPException) -> Response:
    """What is said of a request that is none; the router's own errors know no path."""
    path = request.scope["path"]
    text = error.detail
    code = UsageError.code
    if isinstance(error, RefusedError):
        code = error.code
    elif error.status_code == 404:
        text = f"there is no {path}: POST /infer, GET /health, GET /metrics"
    elif error.headers:
        text = f"{path} takes {error.headers['Allow']}"
    return JSONResponse({"error": visible(text), "code": code}, error.status_code, error.headers)


def opened(address: str) -> socket.socket:
    """A socket that listens at ``[HOST:]PORT``; without a host on the loopback interface, port 0 is any that is free.

    Raises:
        UsageError: it is no address, or somebody else listens there.
    """
    host, port = _parts(address)
    if re.fullmatch("[0-9]{1,5}", port) is None or int(port) > 65535:
        address = address if len(address) < 100 else f"{address[:50]}..."
        raise UsageError(f"{address!r} is no address", [], ["--http 8000", "--http 0.0.0.0:8000, for all interfaces"])
    try:
        socket.getaddrinfo(host, port)
        # it listens at once: who reads so may connect, and no other service takes the port
        if ":" not in host:
            return socket.create_server((host, int(port)))
        both = socket.has_dualstack_ipv6()  # then [::] is all interfaces of both kinds
        return socket.create_server((host, int(port)), family=socket.AF_INET6, dualstack_ipv6=both)
    except (OSError, ValueError, TypeError) as error:  # the last two: a name that none can have
        why = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise UsageError(
            f"nobody can listen at {host[:100]!a}:{port}", [why], ["another port", "an address of this host"]
        ) from error


def names_of(address: str, more: Collection[str]) -> frozenset[str]:
    """The names that clients may call the server at ``[HOST:]PORT`` by: its host's, and ``more``."""
    return frozenset(name.lower().removesuffix(".") for name in (_parts(address)[0], socket.gethostname(), *more))


def _parts(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    return host.strip("[]") or LOOPBACK, port


def most_connections() -> int:
    """Connections that may be open at a time, by how many files this process may yet open.

    Raises:
        UsageError: they are too few.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    # Those that come at once, those that are closed for them, and what others here open: each has files of its own.
    needed = len(os.listdir("/dev/fd")) + 2 * _ACCEPTED_AT_ONCE + _OTHER_FILES
    if limit - needed < _LEAST_CONNECTIONS:
        fault = f"a limit of {limit}; {needed + _LEAST_CONNECTIONS} are needed"
        raise UsageError("too few files may be open for a port", [fault], ["ulimit -n 1024"])
    return min(_MOST_CONNECTIONS, limit - needed)


class _Connection(H11Protocol):
    """A connection that is closed where no whole request comes in time, or no answer is read.

    Args:
        most: connections that may be open at a time.
    """

    _lapse: asyncio.TimerHandle | None = None
    _since_s = 0.0

    def __init__(self, most: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._most = most

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self._most:
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


def listen(
    serving: Serving, door: socket.socket, most_bytes: int, draining: Draining, names: Collection[str] = ()
) -> None:
    """Answers until it is told to drain, by SIGTERM or ``draining``; then what was taken, and no more.

    Args:
        names: of :func:`names_of`.

    Raises:
        HalopipeError: what a rank has failed by.
        UsageError: too few files may be open.
    """
    config = uvicorn.Config(
        application(serving, most_bytes, draining, names=names),
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_S,
        h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
        http=cast("Any", partial(_Connection, most_connections())),
        backlog=_ACCEPTED_AT_ONCE,  # what the loop accepts before it looks at any of them
        ws="none",
    )
    _DrainingServer(config, lambda: serving.failure is not None or draining.is_set()).run([door])
    if serving.failure is not None:
        raise serving.failure


class _DrainingServer(uvicorn.Server):
    """Ends in good order once ``is_over`` says so, which it is asked ten times a second."""

    def __init__(self, config: uvicorn.Config, is_over: Callable[[], bool]) -> None:
        super().__init__(config)
        self._is_over = is_over

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for door in sockets or ():
            door.listen(_BACKLOG)  # more may wait than are accepted at once

    async def on_tick(self, counter: int) -> bool:
        return self._is_over() or await super().on_tick(counter)
