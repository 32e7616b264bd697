"""Convolution: halos are exchanged while what is held is convolved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.spatial.convolution.layer import convolve
from runtime.spatial.step import Step


def run(step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """The outputs that this rank does."""
    return convolve(step, op, arguments, transposed=False)
