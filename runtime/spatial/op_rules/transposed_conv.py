"""Transposed convolution: as a convolution, with what inputs reach in place of what outputs read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.spatial.convolution.layer import convolve
from runtime.spatial.step import Step


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The outputs that this rank does."""
    return convolve(step, op, arguments, transposed=True)
