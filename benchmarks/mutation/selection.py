"""Which files of tests judge a mutant, the likeliest and quickest first.

First those named after its module (``tests/planner/check/test_memory.py`` or ``tests/planner/test_check_memory.py`` for
``planner/check/memory.py``), then those that import it, or of a package above it the function or class that is changed,
those of the mirrored folder or named after it, any that enter its function, and at last the other tests of its package,
the nearest folders first; of equals those that have the name of the function or class in them.  What enters a function
a record says: made once for a commit, kept outside the tree, since it takes longer than the suite itself.  A file that
is recorded and does not enter the function is left out.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.mutation.mutants import Mutant
from benchmarks.mutation.recording import FOLDER, ROOT

SITECUSTOMIZE = """
try:
    from benchmarks.mutation.recording import watch_process
except ImportError:  # a process that does not see this tree
    pass
else:
    watch_process()
"""


@dataclass(frozen=True, slots=True)
class Record:
    """What a run of the suite entered.

    Attributes:
        seconds: by file of tests.
        functions: by file of tests, named ``planner/ir/box.py::Box.size``.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    functions: dict[str, list[str]] = field(default_factory=dict)

    def enters(self, file: str, mutant: Mutant) -> bool:
        """Whether a file of tests runs what is changed; the top of a module is run by whoever runs any of it."""
        if mutant.function:
            return mutant.function in self.functions.get(file, ())
        return any(name.startswith(f"{mutant.path}::") for name in self.functions.get(file, ()))


def files_for(mutant: Mutant, files: dict[str, str], record: Record) -> list[str]:
    """The files of tests for a mutant, out of all with their texts."""
    source = Path(mutant.path)
    folder, name = f"tests/{source.parent.as_posix()}/", source.stem.strip("_")
    module = source.with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
    package, _, last = module.rpartition(".")
    imported = re.compile(
        rf"\b{re.escape(module)}\b|from {re.escape(package)} import [^\n]*\b{last}\b" if package else re.escape(module)
    )
    function = mutant.function.partition("::")[2].partition(".")[0]
    word = function.strip("_")
    mentions = re.compile(rf"\b_?{word}\b", re.IGNORECASE) if word else re.compile(r"(?!)")
    above = "|".join(re.escape(".".join(source.parts[:depth])) for depth in range(1, len(source.parts)))
    handed_on = re.compile(rf"from (?:{above}) import (?:\([^)]*|[^\n]*)\b{function}\b") if function else mentions
    of_folder = f"tests/{source.parent.parent.as_posix()}/test_{source.parent.name}"
    named = (f"{folder}test_{name}", f"{of_folder}_{name}")
    ranks: dict[str, tuple[int, int]] = {}
    for file, text in files.items():
        apart = -len(os.path.commonpath([file, folder]))
        if file.startswith(named):
            ranks[file] = 0, 0
        elif file in record.functions and not record.enters(file, mutant):
            continue
        elif imported.search(text) or handed_on.search(text):
            ranks[file] = 1, 0 if file.startswith("tests/" + mutant.path.partition("/")[0]) else 1
        elif file.rpartition("/")[0] + "/" == folder or file.startswith(of_folder):
            ranks[file] = 2, 0
        elif record.enters(file, mutant):
            ranks[file] = 3, 0
        elif file.startswith("tests/" + mutant.path.partition("/")[0]):
            ranks[file] = 4, apart
    return sorted(
        ranks,
        key=lambda file: (ranks[file], not mentions.search(files[file]), record.seconds.get(file, 0.0), file),
    )


def files_of_tests(tree: Path) -> dict[str, str]:
    """The text of every file of tests by its path."""
    paths = sorted((tree / "tests").rglob("test_*.py"))
    return {path.relative_to(tree).as_posix(): path.read_text("utf-8") for path in paths}


def cache_file(home: Path) -> Path:
    """Where the record of the commit that is checked out belongs."""
    command = ["git", "-C", str(home), "rev-parse", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "halopipe" / "mutation" / f"{commit}.json"


def load_record(path: Path) -> Record:
    """A record, an empty one if there is none."""
    return Record(**json.loads(path.read_text("utf-8"))) if path.exists() else Record()


def with_noted_seconds(record: Record, tree: Path) -> Record:
    """The record, and of files that it does not know the seconds that ``make test`` has noted of long ones."""
    path = tree / "tests" / "long_files.json"
    noted = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return dataclasses.replace(record, seconds={**noted, **record.seconds})


def save_record(record: Record, path: Path) -> None:
    """Write a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(record)), encoding="utf-8")


def record_tests(tree: Path, tests: Sequence[str], before: Sequence[str] = ()) -> Record:
    """Run some tests of a tree and note what each file of them enters; ``before`` is put before the command."""
    with tempfile.TemporaryDirectory(prefix="halopipe-record-") as name:
        lines, start = Path(name) / "lines", Path(name) / "start"
        lines.mkdir()
        start.mkdir()
        (start / "sitecustomize.py").write_text(SITECUSTOMIZE)
        path = os.pathsep.join(map(str, (start, tree, Path(__file__).parents[2])))
        environment = {**os.environ, FOLDER: str(lines), ROOT: str(tree), "PYTHONPATH": path}
        command = [*before, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += ["-p", "benchmarks.mutation.recording", *tests]
        subprocess.run(command, cwd=tree, env=environment, check=False, stdout=sys.stderr)
        return _read(lines)


def joined(one: Record, other: Record) -> Record:
    """Both; of a file that is in both, the latter."""
    return Record({**one.seconds, **other.seconds}, {**one.functions, **other.functions})


def _read(folder: Path) -> Record:
    seconds: dict[str, float] = {}
    functions: dict[str, set[str]] = {}
    for path in folder.glob("*.jsonl"):
        for line in path.read_text("utf-8").splitlines():
            entry = json.loads(line)
            file = entry["file"]
            functions.setdefault(file, set()).update(entry["functions"])
            seconds[file] = seconds.get(file, 0.0) + entry["seconds"]
    return Record(seconds, {file: sorted(names) for file, names in sorted(functions.items())})
