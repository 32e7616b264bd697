"""What the launcher of ``profile --hosts`` starts on each host.

It starts that host's ranks (:mod:`halopipe.launch.agent`).
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from halopipe.launch.agent import environment_of, interface_to, report, serve, watch
from halopipe.launch.processes import Member, Processes
from halopipe.launch.profile_order import ProfileOrder
from planner.ir.files import write_text

ORDER = "order.json"


def main() -> int:
    """Do what the order says until all ranks have ended, or the launcher is gone."""
    return serve(_follow)


def _follow(line: str, folder: Path, gone: threading.Event) -> None:
    order = ProfileOrder.from_json(line)
    if Path(order.folder).is_dir():
        os.chdir(order.folder)
    path = folder / ORDER
    write_text(path, order.by(os.getpid()).to_json())
    start = (sys.executable, "-P", "-m", "halopipe.launch.profile_worker", str(path))
    members = [Member(rank, (*start, str(rank))) for rank in order.ranks]
    environment = environment_of(order.paths, interface_to(order.address, order.interface))
    watch(Processes(members, folder, environment), gone, report)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a thread still waits for the launcher
