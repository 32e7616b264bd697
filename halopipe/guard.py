"""Finds a file of the user's that hides one of halopipe's top-level packages.

`planner`, `profiler` and `runtime` are ordinary words, and `python -m halopipe` puts the working directory first on the
path: somebody's own `profiler.py` there would be imported in place of ours, and fail far away from its cause. This
module imports nothing of halopipe's, since that may be what is hidden.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

__all__ = ["ShadowedPackageError", "check_not_shadowed", "check_on_import"]

_PACKAGES = ("cuda_ops", "planner", "profiler", "runtime")


class ShadowedPackageError(ImportError):
    """Another file would be, or was, imported in place of one of halopipe's packages.

    `name` is the package, `path` the offending file; the command line ends with `exit_code`.
    """

    code = "H203"
    exit_code = 2

    def __init__(self, name: str, path: Path, ours: Path) -> None:
        super().__init__(
            f"error[{self.code}] {path} hides halopipe's package '{name}' ({ours})\n"
            f"  rename {path.name}, or start Python from another directory (or with -P) so that it is not found first",
            name=name,
            path=str(path),
        )


def check_not_shadowed(search_path: Sequence[str] | None = None) -> None:
    """Raise `ShadowedPackageError` for the first of our packages that is not the one beside halopipe's own folder.

    Nothing is imported. A module that is already loaded counts as found; otherwise `search_path` is walked, by default
    `sys.path`. A package that is not found at all is left to the import statement to report.
    """
    home = Path(__file__).resolve().parent.parent
    for name in _PACKAGES:
        location = _location(name, search_path)
        if location is not None and location.resolve() not in (home / name, home / name / "__init__.py"):
            raise ShadowedPackageError(name, location, home / name)


def check_on_import() -> None:
    """What ``import halopipe`` begins with: raises in a program, ends the command line with words and exit code.

    Raises:
        ShadowedPackageError: a file of the user's hides one of our packages.
    """
    try:
        check_not_shadowed()
    except ShadowedPackageError as error:
        if Path(sys.argv[0] if sys.argv else "").name not in ("halopipe", "-m"):  # -m: the module is being found
            raise
        sys.stderr.write(f"{error}\n")
        raise SystemExit(error.exit_code) from None


def _location(name: str, search_path: Sequence[str] | None) -> Path | None:
    """The file of `import name`; a package's `__init__.py`, or its folder where it has none."""
    module = sys.modules.get(name) if search_path is None else None
    spec = module.__spec__ if module is not None else PathFinder.find_spec(name, search_path)
    if spec is None:
        return None
    if spec.origin is not None:
        return Path(spec.origin)
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0]) if folders else None
