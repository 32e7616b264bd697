"""The house as a command walks through it: modules of which a function really runs, and the types made on the way.

Both are read from a trace (``sys.setprofile``, put into every process by a ``sitecustomize`` on the path).  The body of
a module or of a class runs as soon as somebody imports it, and counts as nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.house.measures import PACKAGES

HOME = Path(__file__).parents[2]

WATCH = """
import atexit, os, sys, threading

OURS, OUT = tuple(os.environ["HOUSE_OURS"].split(os.pathsep)), os.environ["HOUSE_OUT"]
IS_FUNCTION = 1  # CO_OPTIMIZED, which bodies of modules and classes lack
entered, made, watched = set(), set(), {}


def note(frame, event, _):
    if event != "call":
        return
    code = frame.f_code
    if code not in watched:
        of_ours = code.co_filename.startswith(OURS) and code.co_flags & IS_FUNCTION and code.co_name[0] != "<"
        watched[code] = "module" if of_ours else "", code.co_name == "__init__"
    is_ours, makes = watched[code]
    if is_ours:
        entered.add(code.co_filename)
    if makes and (of := type(frame.f_locals.get(code.co_varnames[0]))).__module__.split(".")[0] in PACKAGES:
        made.add(f"{of.__module__}.{of.__qualname__}")


def tell():
    sys.setprofile(None)
    loaded = [name for name, module in list(sys.modules.items())
              if (getattr(module, "__file__", None) or "").startswith(OURS)]
    kind = "worker" if "halopipe.launch.worker" in sys.modules else "other"
    with open(os.path.join(OUT, f"{os.getpid()}.{kind}"), "w") as file:
        for word, names in {"loaded": loaded, "entered": entered, "made": made}.items():
            file.writelines(f"{word} {name}\\n" for name in names)


def leave(code, leave=os._exit):  # a worker does not wait for threads that hang
    tell()
    leave(code)


atexit.register(tell)
os._exit = leave
threading.setprofile(note)
sys.setprofile(note)
"""


@dataclass(frozen=True, slots=True)
class Walk:
    """What a command went through.

    Attributes:
        entered: files of ours of which a function ran, in any process.
        made: types of ours of which an object was made, in any process.
        loaded: how many modules of ours each worker loaded.
    """

    entered: frozenset[str]
    made: frozenset[str]
    loaded: tuple[int, ...]


def watch(folder: Path) -> None:
    """Put the trace into ``folder``, from where :func:`walk` starts commands."""
    (folder / "sitecustomize.py").write_text(WATCH.replace("PACKAGES", repr(PACKAGES)))


def walk(folder: Path, *arguments: str, text: str | None = None) -> Walk:
    """``halopipe`` with ``arguments`` in ``folder``, traced; ``text`` is its standard input."""
    with tempfile.TemporaryDirectory() as out:
        ours = os.pathsep.join(f"{HOME / top}{os.sep}" for top in PACKAGES)  # not HOME: an environment may lie in it
        environment = {"HOUSE_OURS": ours, "HOUSE_OUT": out, "PYTHONPATH": f"{folder}:{HOME}"}
        halopipe(folder, environment, *arguments, text=text)
        lines = {path: path.read_text().splitlines() for path in Path(out).iterdir()}
    workers = [each for path, each in lines.items() if path.suffix == ".worker"]
    joined = [line.partition(" ") for each in lines.values() for line in each]
    return Walk(
        frozenset(name for word, _, name in joined if word == "entered"),
        frozenset(name for word, _, name in joined if word == "made"),
        tuple(sum(line.startswith("loaded ") for line in each) for each in workers) or (0,),
    )


def halopipe(folder: Path, environment: Mapping[str, str], *arguments: str, text: str | None = None) -> None:
    """``halopipe`` with ``arguments`` in ``folder``; what it says goes to standard error."""
    command = [sys.executable, "-m", "halopipe", *arguments]
    of_all = {**os.environ, "PYTHONPATH": str(HOME), **environment}
    subprocess.run(command, cwd=folder, env=of_all, check=True, stdout=sys.stderr, input=text, text=True)
