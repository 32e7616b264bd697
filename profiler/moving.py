"""What the kinds that move data need to know of an operator: padding, slices, interpolation, views and permutations.

Rules as in ``profiler.attributes``.
"""

from __future__ import annotations

from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from profiler.attributes import Arguments, Attributes, rank_of
from profiler.naming import operation
from profiler.operators import PERMUTATIONS


def pad(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Rows before and after, by dim; the operator names them from the last dim on."""
    name = operation(node)
    mode = "reflect" if "reflection" in name else "replicate" if "replication" in name else arguments.get("mode")
    numbers = [int(number) for number in (arguments["pad"] if "pad" in arguments else arguments["padding"])]
    pairs = list(zip(numbers[::2], numbers[1::2], strict=True))[::-1]
    rest = ((0, 0),) * (rank_of(node) - len(pairs))
    before, after = zip(*rest, *pairs, strict=True)
    return {"before": before, "after": after, "mode": mode or "constant"}


def part(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Where a slice, or one element, of a dim begins; None where that varies or ends at more than one tensor."""
    source = arguments["self"].meta["val"]
    at = int(arguments["dim"]) % source.ndim
    drops = operation(node) == "select"
    start = arguments["index"] if drops else arguments.get("start") or 0
    if not isinstance(start, int) or (start < 0 and not isinstance(source.shape[at], int)):
        return None
    start = min(max(start + source.shape[at], 0) if start < 0 else start, _known(source.shape[at], start))
    return {"dim": at, "starts": (start,), "step": int(arguments.get("step", 1)), "drops": drops}


def parts(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Where each part of a divided dim begins."""
    source = arguments["self"].meta["val"]
    at = int(arguments["dim"]) % source.ndim
    drops = operation(node) == "unbind"
    lengths = [1 if drops else each.shape[at] for each in node.meta["val"]]
    if not lengths or not all(isinstance(length, int) for length in lengths):
        return None
    return {"dim": at, "starts": tuple(accumulate(lengths[:-1], initial=0)), "step": 1, "drops": drops}


def upsample(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """How it interpolates, and the factors where these were given and not sizes."""
    name = operation(node)
    mode = "nearest-exact" if "exact" in name else "nearest" if "nearest" in name else "linear"
    space = int(name[-2])
    found: Attributes = {
        "mode": "cubic" if "cubic" in name else mode,
        "align_corners": bool(arguments.get("align_corners", False)),
        "space": space,
    }
    factors = arguments.get("scale_factors") or [arguments.get(f"scales{end}") for end in ("_d", "_h", "_w")[-space:]]
    if space == 1 and "scales" in arguments:
        factors = [arguments["scales"]]
    if all(factor is not None for factor in factors):
        ratios = [float(factor).as_integer_ratio() for factor in factors]
        found["factor_numerators"], found["factor_denominators"] = (tuple(each) for each in zip(*ratios, strict=True))
    elif any(factor is not None for factor in factors):
        return None
    return found


def reshape(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Which dim of the input each dim of the output is, as far as that holds for every number of samples."""
    source = next((each.meta["val"] for each in arguments.values() if isinstance(each, fx.Node)), None)
    others = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)]
    if not isinstance(source, Tensor) or not isinstance(node.meta["val"], Tensor) or len(others) != 1:
        return {}
    if operation(node) in PERMUTATIONS:
        kept = _moved(node, source.ndim)
    else:
        kept = _expanded(source, node.meta["val"]) if operation(node) == "expand" else _viewed(source, node.meta["val"])
    return {"kept": kept} if any(place >= 0 for place in kept) else {}


def _moved(node: fx.Node, rank: int) -> tuple[int, ...]:
    """Of a permutation, which is tried on a tensor whose extents are all different."""
    extents = torch.empty(tuple(range(2, rank + 2)), device="meta")
    return tuple(size - 2 for size in node.target(extents, *node.args[1:], **node.kwargs).shape)


def _expanded(source: Tensor, result: Tensor) -> tuple[int, ...]:
    new = result.ndim - source.ndim
    same = (_is_same(a, b) for a, b in zip(source.shape, result.shape[new:], strict=True))
    return (*(-1,) * new, *(place if alike else -1 for place, alike in enumerate(same)))


def _viewed(source: Tensor, result: Tensor) -> tuple[int, ...]:
    """A dim is left alone by a view if it is as long as before and as many elements lie between its neighbours."""
    places = {}
    for place, size in enumerate(source.shape):
        places.setdefault((str(size), _inner(source, place)), place)
    found = []
    for place, size in enumerate(result.shape):
        found.append(places.pop((str(size), _inner(result, place)), -1))
    return tuple(found)


def _inner(value: Tensor, place: int) -> str:
    """How many elements lie inside one of a dim, as an expression of the sizes that vary."""
    return str(prod(value.shape[place + 1 :]))


def _is_same(a: Any, b: Any) -> bool:
    return str(a) == str(b)


def _known(size: Any, otherwise: int) -> int:
    return size if isinstance(size, int) else otherwise
