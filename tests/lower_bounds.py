"""The lower bounds of ``pyproject.toml`` as constraints for pip, one a line; what ``make test-oldest`` installs.

python tests/lower_bounds.py > build/constraints-oldest.txt
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
BOUNDED = re.compile(r"(?P<name>[\w.-]+)(\[[\w, -]+\])?>=(?P<bound>\d[\w.]*)(\s*;.*)?")


def lower_bounds(toml: str) -> dict[str, str]:
    """Each package that the project or an extra asks for, with its oldest release; the project itself is left out.

    Raises:
        ValueError: a requirement has no lower bound, or two requirements of a package differ in theirs.
    """
    project = tomllib.loads(toml)["project"]
    bounds: dict[str, str] = {}
    for requirement in sum(project["optional-dependencies"].values(), project["dependencies"]):
        if re.match(rf"{project['name']}\b", requirement):
            continue
        parts = BOUNDED.fullmatch(requirement)
        if parts is None or bounds.setdefault(parts["name"], parts["bound"]) != parts["bound"]:
            raise ValueError(f"{requirement!r} in {PROJECT.name}: a package has one lower bound, as in 'numpy>=2.0'")
    return bounds


if __name__ == "__main__":
    sys.stdout.writelines(f"{name}=={bound}\n" for name, bound in lower_bounds(PROJECT.read_text("utf-8")).items())
