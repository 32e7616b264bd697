"""Operators of our own, ``torch.ops.halopipe``, written in Python: each is one node of a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("halopipe", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's has no types
_define: Callable[[str], object] = _LIBRARY.define
_implement: Callable[[str, Callable[..., Any], str], object] = _LIBRARY.impl


def define_operator(schema: str, shaped: Callable[..., Any], run: Callable[..., Any] | None = None) -> None:
    """Define an operator.

    Args:
        schema: as torch writes it, ``name(Tensor input) -> Tensor``.
        shaped: its results for tensors without data.
        run: its results, with the derivatives of what it calls; None: it stands in graphs and is never run.
    """
    _define(schema)
    name = schema.partition("(")[0]
    if run is not None:
        for key in ("Autograd", "CompositeExplicitAutograd"):
            _implement(name, run, key)
    torch.library.register_fake(f"halopipe::{name}", shaped, lib=_LIBRARY)
