"""Freezes what differs from its file, with a reason."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tests.frozen import candidates, face, planning, profiling, running
from tests.frozen.files import freeze, note

KINDS: Mapping[str, Callable[[], Mapping[str, Callable[[], Any]]]] = {
    "face": face.values,
    "running": running.values,
    "profiling": profiling.values,
    "planning": lambda: {name: partial(planning.frozen, name) for name in planning.PROBLEMS},
}

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("kinds", nargs="*", help="face, running, profiling, planning, candidates; all if none is named")
parser.add_argument("--why", required=True, help="why what differs is right")
options = parser.parse_args()
if unknown := {*options.kinds} - {*KINDS, "candidates"}:
    parser.error(f"not frozen here: {', '.join(sorted(unknown))}")
for kind in options.kinds or [*KINDS, "candidates"]:
    if kind == "candidates":
        changed = candidates.freeze()
        note(kind, options.why, changed)
    else:
        changed = freeze(kind, KINDS[kind](), options.why)
    sys.stdout.write(f"{kind}: {len(changed)} changed\n")
