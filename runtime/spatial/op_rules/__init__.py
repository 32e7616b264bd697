"""Local forms: one module a layer kind, which runs a layer's operator on this rank's part.

The registry is the folder's listing; names are those of ``planner.layers``.  A module has

    run(step, op, arguments) -> result

    step        the layer on this rank (:class:`runtime.spatial.step.Step`)
    op          ``op(**arguments)`` calls the operator
    arguments   by the names of the operator's schema, defaults filled in.  A tensor that is a value of the graph covers
                what this rank holds of it; parameters and buffers are this rank's part; integers that depend on the
                number of samples are those of the part that this rank does.

and gives what covers ``step.done``.  It stays connected to its inputs in autograd also where that is empty, since
exchanges must run backward on all ranks, in the same order.  Kinds without a module read all that they need and call
their operator on it (``_default``).  By what they ask of a rank:

    the same part of everything         pointwise, reshape, slice, concat, embedding
    a halo, or a window                 conv, transposed_conv, pool, adaptive_pool, upsample, pad
    sums over the ranks                 batch_norm, layer_norm, global_pool, linear, loss
    all along a dim, or nothing divided attention, softmax, lstm, opaque
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, Protocol, cast

from runtime.spatial.step import Step

__all__ = ["Form", "form"]


class Form(Protocol):
    """What a module in this folder provides."""

    def run(self, step: Step, op: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The layer's result on this rank."""


@functools.cache
def form(kind: str) -> Form:
    """The module for layers of ``kind``."""
    names = {info.name for info in pkgutil.iter_modules(__path__)}
    return cast(Form, importlib.import_module(f"{__name__}.{kind if kind in names else '_default'}"))
