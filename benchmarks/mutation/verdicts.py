"""How a mutant is judged: its change is made in a copy of the tree, and the tests are run there until one fails.

A test that fails, cannot be imported or takes too long *kills* the mutant.  What the short suite (a few cases of every
test) leaves alive is tried with every case of the same files.  A kill counts only if the test that killed passes in the
unchanged copy; what runs out of time counts neither as killed nor as alive.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutation.mutants import Mutant

SHORT, LIVES, ALL, ALIVE = "short suite", "lives in the short suite", "all cases", "alive"
UNDECIDED, UNTESTED = "undecided", "no test"
OUT_OF_TIME = "session-timeout"  # what pytest-timeout says
TEST_LIMIT_S = 120
LEFT_OUT = (".git", ".venv", ".hypothesis", "__pycache__", "build", "shared", ".*_cache", "*.egg-info")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant.

    Attributes:
        mutant: in words.
        package: that it belongs to.
        outcome: by what it was killed, or ``alive``, ``undecided``, ``no test``; between the two, ``lives in ...``.
        by: the test that killed it.
        files: of tests that were run.
        seconds: that they took.
    """

    mutant: str
    package: str
    outcome: str
    by: str
    files: tuple[str, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Tree:
    """A copy of the tree, to be spoilt.

    Attributes:
        before: put before each run of pytest, such as ``nice -n 10``.
        limit_s: of one run; 0 for any time.
    """

    root: Path
    before: tuple[str, ...] = ()
    limit_s: float = 600.0

    def judge(
        self, mutant: Mutant, files: Sequence[str], before: Verdict | None = None, *, every_case: bool = False
    ) -> Verdict:
        """Run a few cases of the tests, of those named first alone since most mutants end there; or every case.

        Args:
            before: the verdict of other files, to which this is added.
        """
        start_s = time.monotonic()
        outcome, by = (ALIVE if every_case else LIVES) if files else UNTESTED, ""
        with self.changed(mutant):
            for some in (files,) if every_case else (files[:2], files[2:]):
                by = self.failing(some, every_case=every_case) if some else ""
                if by:
                    outcome = UNDECIDED if by == OUT_OF_TIME else ALL if every_case else SHORT
                    break
        seconds, tried = round(time.monotonic() - start_s, 1), dict.fromkeys(files)
        if before is not None:
            seconds, tried = round(before.seconds + seconds, 1), dict.fromkeys((*before.files, *files))
        return Verdict(str(mutant), mutant.path.partition("/")[0], outcome, by, tuple(tried), seconds)

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """The tree with a mutant in it."""
        path = self.root / mutant.path
        source, times = path.read_bytes(), path.stat()
        path.write_bytes(mutant.applied(source))
        os.utime(
            path, (times.st_atime, times.st_mtime + 10)
        )  # else a compiled file of the same size and second is taken
        try:
            yield
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def failing(self, tests: Sequence[str], *, every_case: bool = False) -> str:
        """The first test that fails, or why there is none but not all pass; empty if all pass.

        Raises:
            FileNotFoundError: of a file of tests that is not there, which says nothing of a mutant.
        """
        for test in tests:
            if not (self.root / test.partition("::")[0]).exists():
                raise FileNotFoundError(test)
        command = [*self.before, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no"]
        command += [f"--timeout={TEST_LIMIT_S}", *([f"--session-timeout={self.limit_s:g}"] if self.limit_s else [])]
        command += [*(["--all-cases"] if every_case else []), *tests]
        environment = {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            command, cwd=self.root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
        try:
            told, _ = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):  # ranks that a killed test left behind
                os.killpg(process.pid, signal.SIGKILL)
        if process.returncode in (0, 5):  # 5: every test of these files is left out
            return ""
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", told, re.MULTILINE)
        if failed:
            return failed[1]
        return OUT_OF_TIME if OUT_OF_TIME in told else f"exit code {process.returncode}"


@contextlib.contextmanager
def copy_of(home: Path) -> Iterator[Path]:
    """A copy of a tree, compiled, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="halopipe-mutation-") as name:
        root = Path(name) / "tree"
        shutil.copytree(home, root, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        subprocess.run([sys.executable, "-m", "compileall", "-q", str(root)], check=False, stdout=subprocess.DEVNULL)
        yield root
