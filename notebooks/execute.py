"""Executes notebooks again and saves them in place, without what changes from run to run (times, versions).

    python notebooks/execute.py notebooks/*.ipynb

A notebook runs in its own folder; the first cell that fails ends it with its traceback, and the file stays as it was.
Its metadata then says of which data its outputs are (``collected.read_by``); a test compares.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat

from halopipe.extras.figures import notebook as notebooks

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
    from collected import read_by  # beside this file, where Python looks if it is run as a program

    for path in map(Path, paths):
        sys.stderr.write(f"executing {path}\n")
        notebook = execute(path)
        if data := read_by(path.stem):
            notebook.metadata["halopipe"] = {"data": data}
        nbformat.write(notebook, path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
