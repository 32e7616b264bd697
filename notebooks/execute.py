"""Executes notebooks again and saves them in place, without what changes from run to run (times, versions).

    python notebooks/execute.py notebooks/*.ipynb

A notebook runs in its own folder; the first cell that fails ends it with its traceback, and the file stays as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

_TIMEOUT_S = 600


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(path.parent)}}
    NotebookClient(notebook, timeout=_TIMEOUT_S, kernel_name="python3", resources=where).execute()
    return _without_noise(notebook)


def main(paths: Sequence[str]) -> int:
    """Executes and saves each of ``paths``."""
    for path in map(Path, paths):
        sys.stderr.write(f"executing {path}\n")
        nbformat.write(execute(path), path)
    return 0


def _without_noise(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    return notebook


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
