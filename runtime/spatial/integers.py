"""Integers of a captured graph that follow from the number of samples and other sizes, for one layer's own rows.

In a divided stage layers may have different numbers of samples on one rank, so no integer holds for all of them: each
layer's are worked out from its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx


def depends(value: Any) -> bool:
    """Whether an argument is, or holds, an integer that the graph computes."""
    found: list[bool] = []
    fx.map_arg(value, lambda node: found.append(_is_integer(node)) or node)
    return any(found)


def evaluate(value: Any, sizes: Mapping[str, int]) -> Any:
    """``value`` with numbers in place of the nodes that compute them.

    Args:
        sizes: by placeholder, the number of samples included.
    """
    known: dict[fx.Node, Any] = {}

    def number(node: fx.Node) -> Any:
        if node not in known:
            if node.op == "placeholder":
                known[node] = sizes[str(node.target)]
            else:
                function: Any = node.target
                known[node] = function(*fx.map_arg(node.args, number), **fx.map_arg(node.kwargs, number))
        return known[node]

    return fx.map_arg(value, number)


def _is_integer(node: fx.Node) -> bool:
    if node.op == "placeholder" and "val" not in node.meta:
        return True  # the number of samples, or another size that varies
    value = node.meta.get("val")
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)
