"""Any layer: gets what it needs of every input, and calls its operator on that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.spatial.empties import empty_like_done
from runtime.spatial.step import Step, gathered


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The operator on what the part reads."""
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    return op(**found)
