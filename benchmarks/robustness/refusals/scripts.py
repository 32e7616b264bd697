"""Calls from Python: remedies name arguments in place of options."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.robustness.refusals import folders
from benchmarks.robustness.refusals.command_lines import PYTHON
from benchmarks.robustness.refusals.following import Refusal


def rows() -> Iterator[Refusal]:
    """All that calls of ``hp`` refuse."""
    call = "hp.plan(hp.load('profile.json'), confidence=2)"
    yield Refusal(call, (PYTHON, f"import halopipe as hp\n{call}"))
    call, elsewhere = "hp.execute(hp.load('plan.json'))", {"torchrun": "another program starts it"}
    script = f"import halopipe as hp\n{call}"
    yield Refusal(call, (PYTHON, script), prepare=folders.trains, elsewhere=elsewhere, is_dear=True)
