"""Softmax: whole along its dim, of which the part is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.spatial.empties import empty_like_done
from runtime.spatial.step import Step, gathered, within


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The operator on whole rows."""
    found = gathered(step, arguments)
    if step.is_empty:
        return empty_like_done(step, found)
    return within(op(**found), step.exchange(0).wanted, step.done)
