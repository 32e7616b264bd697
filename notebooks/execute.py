"""Executes notebooks again and saves them in place, without what changes from run to run (times, versions).

    python notebooks/execute.py notebooks/*.ipynb

A notebook runs in its own folder; the first cell that fails ends it with its traceback, and the file stays as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat

from halopipe.reports import notebook as notebooks

_TIMEOUT_S = 600


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs.

    Raises:
        WorkerError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    notebooks.run(notebook, path.parent, _TIMEOUT_S)
    return notebook


def main(paths: Sequence[str]) -> int:
    """Executes and saves each of ``paths``."""
    for path in map(Path, paths):
        sys.stderr.write(f"executing {path}\n")
        nbformat.write(execute(path), path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
