"""The core without an extra: its folders and their tests are deleted in a copy of the tree, and the core's tests run.

    python -m benchmarks.without [--extra NAME ...] [--tests PATH ...] [--json] [--quick]

An extra is a folder ``PACKAGE/extras/NAME`` in one package or in several (``token_slices`` is in ``planner`` and in
``runtime``).  Extras that import it go with it.  By default each extra is taken out in turn, and the tests of the
planner, of the command line and of how plans are made and run are tried (six cases of each, as ``make test`` does);
``--tests`` names others.  ``--quick`` takes six of them, imports every module that is left, and runs no test.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.house.measures import PACKAGES
from benchmarks.report import Row, at_most, run
from tests.test_architecture import imports, parsed

HOME = Path(__file__).resolve().parents[1]
TESTS = ("tests/planner", "tests/halopipe/cli", "tests/halopipe/planning", "tests/runtime/pipeline")
NUM_QUICK = 6

IMPORT_ALL = """
import importlib, pathlib, sys
for package in sys.argv[1:]:
    for path in sorted(pathlib.Path(package).rglob("*.py")):
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        if not name.endswith("__main__") and "_gpu" not in name and ".gpu" not in name:
            importlib.import_module(name)
"""


def extras(home: Path = HOME) -> dict[str, list[Path]]:
    """The folders of each extra, by name, relative to ``home``."""
    folders: dict[str, list[Path]] = {}
    for package in PACKAGES:
        for init in sorted((home / package / "extras").glob("*/__init__.py")):
            folders.setdefault(init.parent.name, []).append(init.parent.relative_to(home))
    return folders


def closure(name: str, home: Path = HOME) -> list[str]:
    """The extra and all that import it, directly or by others, sorted."""
    folders = extras(home)
    imported = {each: _imported(home, paths) for each, paths in folders.items()}
    gone = {name}
    while more := {each for each in folders.keys() - gone if any(_needs(imported[each], folders[one]) for one in gone)}:
        gone |= more
    return sorted(gone)


def _imported(home: Path, folders: Sequence[Path]) -> set[str]:
    texts = (path.read_text("utf-8") for folder in folders for path in (home / folder).rglob("*.py"))
    return {f"{module}.{name}" for text in texts for module, name, *_ in imports("", parsed(text))}


def _needs(imported: set[str], folders: Sequence[Path]) -> bool:
    modules = tuple(".".join(folder.parts) for folder in folders)
    return any(name.startswith(f"{module}.") for name in imported for module in modules)


@contextlib.contextmanager
def tree_without(names: Sequence[str]) -> Iterator[Path]:
    """A copy of all tracked files but those of the extras ``names`` and of their tests, gone afterwards."""
    folders = extras()
    left_out = [path for name in names for path in folders[name]]
    left_out += [Path("tests") / path for path in left_out]
    listed = subprocess.run(["git", "ls-files"], cwd=HOME, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="halopipe-tree-") as folder:
        for file in map(Path, listed.splitlines()):
            if (HOME / file).is_file() and not any(file.is_relative_to(path) for path in left_out):
                copied = Path(folder) / file
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(HOME / file, copied)
        yield Path(folder)


def called(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Python, called in a copy of the tree, which alone it imports from."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def measure(quick: bool, extra: Sequence[str], tests: Sequence[str]) -> list[Row]:
    """A row for each extra: whether a test fails, or a module is not imported, without it and what needs it."""
    rows = []
    for name in extra or list(extras())[: NUM_QUICK if quick else None]:
        gone = closure(name)
        with tree_without(gone) as folder:
            if quick:
                result = called(folder, "-c", IMPORT_ALL, *PACKAGES)
            else:
                kept = [path for path in tests if (folder / path).exists()]
                result = called(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *kept)
        sys.stderr.write(f"without {', '.join(gone)}: {(result.stdout or result.stderr).strip().splitlines()[-1:]}\n")
        rows.append(at_most(f"calls that fail without {name}", float(result.returncode != 0), "", 0))
    return rows


OWN: Mapping[str, Mapping[str, Any]] = {
    "--extra": {"nargs": "+", "choices": list(extras()), "default": [], "help": "which are taken out; default: each"},
    "--tests": {"nargs": "+", "default": TESTS, "metavar": "PATH", "help": "which tests of the core are run"},
}


main = partial(run, "The core without an extra", measure, own=OWN)

if __name__ == "__main__":
    raise SystemExit(main())
