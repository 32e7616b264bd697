"""Constants that are made beside a tensor, ``x.new_ones(3, 3)``, take its dtype and device and read nothing of it.

They become ``ones(3, 3)``, so that nobody has to send ``x`` for them.  Those as long as there are samples stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from profiler.naming import operation

_aten = torch.ops.aten
_MAKERS = {"ones": _aten.ones.default, "zeros": _aten.zeros.default, "full": _aten.full.default}


def detach_constants(graph: fx.Graph) -> None:
    """Rewrites ``new_*`` and ``*_like`` of fixed shapes."""
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(node.meta.get("val"), Tensor):
            continue
        maker = _MAKERS.get(operation(node).removeprefix("new_").removesuffix("_like"))
        shape = tuple(node.meta["val"].shape)
        if maker is None or not node.args or not isinstance(node.args[0], fx.Node) or not _is_fixed(shape):
            continue
        value = node.meta["val"]
        with graph.inserting_before(node):
            made = graph.call_function(
                maker, (list(shape), *_fill(node)), {"dtype": value.dtype, "device": value.device}
            )
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _is_fixed(shape: tuple[Any, ...]) -> bool:
    return all(isinstance(size, int) for size in shape)


def _fill(node: fx.Node) -> tuple[Any, ...]:
    """What ``full`` is full of."""
    names = [argument.name for argument in node.target._schema.arguments]
    if "fill_value" not in names:
        return ()
    place = names.index("fill_value")
    return (node.args[place] if place < len(node.args) else node.kwargs["fill_value"],)
