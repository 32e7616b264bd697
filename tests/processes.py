"""Processes of a test: programs that begin with torch loaded, what one does that needs no torch, which are left."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cuda_ops.device import fork_server
from halopipe.launch.processes import LOADS, _environment_here


@dataclass(frozen=True)
class Program:
    """A program that was started; ``process`` ends with its exit code, see :mod:`cuda_ops.device.fork_server`."""

    process: fork_server.Process
    folder: Path

    @classmethod
    def start(cls, path: Path, arguments: Sequence[str] = (), **environment: str) -> Program:
        """Run a Python file in the working directory: a fork, as a new interpreter would load torch for 5 s."""
        folder = path.with_name(f"{path.stem}-{environment.get('RANK', 'alone')}")
        folder.mkdir()
        with (folder / "output").open("wb") as output:
            process = fork_server.start(
                f"{__name__}:_run",
                [str(path), [*arguments], str(folder), environment],
                environment=_environment_here(),
                output=output.fileno(),
                loads=LOADS,
            )
        return cls(process, folder)

    def end(self, timeout_s: float = 120.0) -> tuple[int, str, str]:
        """Its exit code, and what it wrote to its output and error."""
        try:
            code = self.process.wait(timeout_s)
        finally:
            self.process.kill()
        return code, *((self.folder / name).read_text() for name in ("stdout", "stderr"))


def _run(path: str, arguments: Sequence[str], folder: str, environment: dict[str, str]) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        with (Path(folder) / name).open("wb") as file:
            os.dup2(file.fileno(), number)
    os.environ.update(environment)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


def execute(*texts: str) -> None:
    """What a worker of a few lines does, the text of its rank."""
    exec(texts[int(os.environ["RANK"])], {})


def writing_into(folder: Path) -> list[int]:
    """Processes whose standard output is a file in ``folder``, as that of all workers of a job there."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            written = os.readlink(entry / "fd" / "1")
        except OSError:
            continue
        if Path(written).is_relative_to(folder):
            found.append(int(entry.name))
    return found
