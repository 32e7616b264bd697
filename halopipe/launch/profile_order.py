"""What the launcher of ``profile --hosts`` tells each host, as one line of JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from halopipe.version import require_same_release
from planner.ir.codec import plain
from planner.ir.profile import ModelSource, Optimizer


@dataclass(frozen=True, slots=True)
class ProfileRequest:
    """What to measure; as for :func:`halopipe.planning.measure.measure`."""

    source: ModelSource
    optimizer: Optimizer
    sizes: tuple[int, ...] = ()
    allow: tuple[str, ...] = ()
    num_ranks: int = 0
    quick: bool = False
    num_processes: int = 0


@dataclass(frozen=True, slots=True)
class ProfileOrder:
    """What a host is to do.

    Attributes:
        ranks: to start here.
        hosts: what the host of each rank is called, by rank.
        address, port, interface, folder, paths, version: as of :class:`halopipe.launch.agent.Order`.
        parent: process to die with; 0 until the agent knows.
    """

    request: ProfileRequest
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    address: str
    port: int
    interface: str = ""
    folder: str = ""
    paths: tuple[str, ...] = ()
    version: str = ""
    parent: int = 0

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(plain(self))

    @classmethod
    def from_json(cls, text: str) -> ProfileOrder:
        """What :meth:`to_json` spelled.

        Raises:
            StaleFileError: another release of halopipe spelled it.
        """
        record = json.loads(text)
        require_same_release(record["version"])
        request = record.pop("request")
        source, optimizer = request.pop("source"), Optimizer(**request.pop("optimizer"))
        measured = ProfileRequest(ModelSource(**_tuples(source)), optimizer, **_tuples(request))
        return cls(measured, **_tuples(record))

    @classmethod
    def read(cls, path: Path) -> ProfileOrder:
        """The order in a file."""
        return cls.from_json(path.read_text(encoding="utf-8"))

    def by(self, parent: int) -> ProfileOrder:
        """The order as workers of process ``parent`` get it."""
        return replace(self, parent=parent)


def _tuples(record: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
