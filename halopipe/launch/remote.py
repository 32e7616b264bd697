"""The ranks of one host, seen from the launcher: a command that starts its agent, and what the agent says."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

from halopipe.launch.agent import MARK
from halopipe.launch.processes import Ended
from planner.ir.errors import WorkerDiedError
from runtime.monitor.failure import write_error

_LEAVING_S = 5.0
"""How long an agent may take to end its ranks before its connection is cut."""

_SHOWN_LINES, _SHOWN_BYTES = 8, 16 * 1024

_log = logging.getLogger(__name__)


class Order(Protocol):
    """What a host is to do: :class:`halopipe.launch.agent.Order`, or another agent's."""

    @property
    def ranks(self) -> tuple[int, ...]: ...

    def to_json(self) -> str:
        """As one line."""
        ...


class RemoteWorkers:
    """The ranks that one agent starts.

    Args:
        host: for errors.
        command: that starts the agent there, its standard input and output connected to ours.
    """

    def __init__(self, host: str, command: Sequence[str], order: Order) -> None:
        self._host, self._command, self._order = host, list(command), order
        self._ended: dict[int, Ended] = {}
        self._failed = ""
        self._ordered = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed by end()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that this host runs."""
        return self._order.ranks

    def start(self) -> None:
        """Start the agent; a host that cannot be reached is found by :meth:`ended`."""
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,  # Ctrl-C is for the launcher, which then ends them all
            )
        except OSError as error:
            self._failed = self._nothing_started([str(error)])
            return
        self._thread = threading.Thread(
            target=self._listen, args=(self._process,), name=f"host {self._host}", daemon=True
        )
        self._thread.start()

    def ended(self) -> Mapping[int, Ended]:
        """Those that have ended by now; all of them where the agent has."""
        found = dict(self._ended)
        if self._agent_has_ended() and not found and not self._failed:
            how = f"{shlex.join(self._command)} ended with exit code {self._code}"
            self._failed = self._nothing_started([how, *(f"stderr: {line}" for line in self._last_lines())])
        if self._agent_has_ended() or self._failed:
            last = Ended(self._code, output="\n".join(self._last_lines()), error=self._failed)
            found = dict.fromkeys(self.ranks, last) | found
        return found

    def end(self) -> None:
        """Have the agent end its ranks, by closing its standard input; cut it off if it does not answer."""
        process = self._process
        if process is not None and process.stdin is not None:
            try:
                if self._ordered.is_set():
                    process.stdin.close()
                    process.wait(_LEAVING_S)
            except (OSError, subprocess.TimeoutExpired):
                _log.debug("the agent on %s does not leave", self._host)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if self._thread is not None:
            self._thread.join(_LEAVING_S)
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):  # the order was not given yet, and now nobody reads it
                process.stdin.close()
        self._errors.close()

    @property
    def _code(self) -> int:
        code = self._process.poll() if self._process is not None else None
        return 1 if code is None else code

    def _agent_has_ended(self) -> bool:
        """Whether it is gone and everything that it said has been heard."""
        over = self._thread is not None and not self._thread.is_alive()
        return over and self._process is not None and self._process.poll() is not None

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Give the order, then note what the agent says until it ends."""
        if process.stdin is None or process.stdout is None:
            raise ValueError("the agent was started without pipes")
        with contextlib.suppress(OSError):  # it ended before it read all: its exit code tells
            process.stdin.write(self._order.to_json().encode() + b"\n")
            process.stdin.flush()
        self._ordered.set()
        with process.stdout:
            for line in process.stdout:
                text = line.decode(errors="replace")
                if text.startswith(MARK):
                    self._note(json.loads(text.removeprefix(MARK)))

    def _note(self, event: dict[str, Any]) -> None:
        if "failed" in event:
            self._failed = str(event["failed"])
            return
        rank = int(str(event.pop("rank")))
        self._ended[rank] = Ended(**event)

    def _nothing_started(self, details: Sequence[str]) -> str:
        remedies = ["try by hand to run a command there in the same way", "see --launcher"]
        return write_error(WorkerDiedError(f"no rank could be started on {self._host}", details, remedies))

    def _last_lines(self) -> list[str]:
        size = os.fstat(self._errors.fileno()).st_size
        # pread: the agent writes where the file's offset is, which is shared with it
        text = os.pread(self._errors.fileno(), _SHOWN_BYTES, max(0, size - _SHOWN_BYTES)).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-_SHOWN_LINES:]
