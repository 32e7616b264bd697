"""Which kind of layer an operator is, and what its kind needs to know: from ``aten`` to ``planner.layers``.

:class:`Rules` hold what a user knows about operators of his own.

What a layer kind needs to know of an operator: its attributes, from the arguments of a traced call.

A rule takes the call and its arguments by the names of the schema; it answers None where it finds the operator in a
form that its kind does not cover.

What the kinds that move data need to know of an operator: padding, slices, interpolation, views and permutations.

Rules as in ``profiler.capture.kinds``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from cuda_ops._torch import OpOverload, schema_of
from cuda_ops.calls import arguments_of
from cuda_ops.operator_table import EXPANDED, PARTS, PERMUTED, operator_row
from planner.ir.errors import UnknownNameError
from planner.ir.graph import MIXES_SAMPLES, Attribute
from planner.layers import kind as layer_kind
from profiler.capture.operators import function_called, nodes_in, operation, overload_of

Arguments = Mapping[str, Any]
Attributes = dict[str, Attribute]
_MEAN = 1  # of torch's ways to reduce a loss

Rule = Callable[[fx.Node, Arguments], Attributes | None]


def rank_of(value: Any) -> int:
    """Number of dims of a traced tensor; -1 for what is none."""
    return value.meta["val"].ndim if isinstance(value.meta["val"], Tensor) else -1


def embedding(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Gradients that are divided by how often an entry is asked for need all samples."""
    return {MIXES_SAMPLES: True} if arguments.get("scale_grad_by_freq") else {}


def nothing(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Its kind asks for nothing."""
    return {}


def attention(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Whether query t sees keys up to t alone."""
    return {"causal": True} if arguments.get("is_causal") is True else {}


def terms_of_sum(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """How many times the second term of a sum counts, unless it is once."""
    if str(node.target) != "aten.add.Tensor" or arguments["alpha"] == 1:
        return {}
    return {"alpha": float(arguments["alpha"])}


def conv(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The window; of an odd margin the odd one is at the end, where windows say by themselves how far they reach.

    None of complex numbers: the kernels of parts have none.
    """
    if arguments["weight"].meta["val"].is_complex():
        return None
    kernel = tuple(int(size) for size in arguments["weight"].meta["val"].shape[2:])
    space = len(kernel)
    dilation = _each(arguments["dilation"], space)
    padding = arguments["padding"]
    if isinstance(padding, str):
        margins = [rate * (size - 1) if padding == "same" else 0 for rate, size in zip(dilation, kernel, strict=True)]
        padding = [margin // 2 for margin in margins]
    return {
        "kernel": kernel,
        "stride": _each(arguments["stride"], space),
        "padding": _each(padding, space),
        "dilation": dilation,
        "groups": int(arguments["groups"]),
    }


def transposed_conv(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The window of its adjoint."""
    space = arguments["weight"].meta["val"].ndim - 2
    window = conv(node, arguments)
    return window and {**window, "output_padding": _each(arguments["output_padding"], space)}


def pool(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The window."""
    space = _space(node)
    kernel = _each(arguments["kernel_size"], space)
    return {
        "kernel": kernel,
        "stride": _each(arguments.get("stride") or kernel, space),
        "padding": _each(arguments["padding"], space),
        "dilation": _each(arguments.get("dilation", 1), space),
        "ceil_mode": bool(arguments["ceil_mode"]),
    }


def adaptive_pool(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The size of the output."""
    space = _space(node)
    sizes = node.meta["val"].shape[-space:] if rank_of(node) > 0 else ()
    if any(isinstance(size, torch.SymInt) for size in sizes):
        return None
    return {"output_size": tuple(int(size) for size in sizes)} if sizes else {}


def global_pool(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Nothing, where an average leaves one number a channel, ``[sample, channel, *space]`` being its input."""
    rank = rank_of(arguments["self"])
    if operation(node) == "mean":
        dims = arguments.get("dim") or ()
        is_whole = 3 <= rank <= 5 and {int(dim) % rank for dim in dims} == set(range(2, rank))
    else:
        sizes = arguments["output_size"]
        is_whole = rank == _space(node) + 2 and all(isinstance(size, int) and size == 1 for size in sizes)
    return {} if is_whole else None


def reduction(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The dims that are reduced; None where these are all."""
    rank = rank_of(arguments["self"])
    named = arguments.get("dim")
    dims = (named,) if isinstance(named, int) else tuple(named or ())
    if not dims or not all(isinstance(place, int) for place in dims):
        return None
    return {"dims": tuple(sorted(place % rank for place in dims)), "keeps": bool(arguments.get("keepdim", False))}


def batch_norm(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Whether it normalises by the batch."""
    return {"training": bool(arguments["training"])}


def normalised(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The dims that a norm is over, and groups of channels; not running statistics, which are over samples."""
    rank = rank_of(node)
    if "normalized_shape" in arguments:
        return {"dims": tuple(range(rank - len(arguments["normalized_shape"]), rank))}
    if "num_groups" in arguments:
        return {"dims": tuple(range(1, rank)), "groups": int(arguments["num_groups"]), "by_channel": True}
    return {"dims": tuple(range(2, rank)), "by_channel": True} if arguments["running_mean"] is None else None


def dim(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """The one dim that it is about."""
    return {"dim": int(arguments["dim"]) % rank_of(node)}


def recurrence(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Layers and directions."""
    names = ("bidirectional", "batch_first")
    return {**{name: bool(arguments[name]) for name in names}, "num_layers": int(arguments["num_layers"])}


def loss(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """What a number is a mean over."""
    reduction = arguments.get("reduction", _MEAN)
    if rank_of(node) or not reduction or arguments.get("dim"):
        return None
    terms = operator_row(node.target).terms
    return {"terms": terms} if terms and reduction == _MEAN else {}


def _space(node: fx.Node) -> int:
    """Dims of space, which the operator's name ends with: ``avg_pool2d``."""
    return int(operation(node).split("pool")[1][0])


def _each(value: Any, space: int) -> tuple[int, ...]:
    """One number a dim of space, as the operator reads it: a single number stands for all."""
    numbers: tuple[Any, ...] = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    return tuple(int(number) for number in (numbers * space if len(numbers) == 1 else numbers))


def pad(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Rows before and after, by dim; the operator names them from the last dim on."""
    name = operation(node)
    mode = "reflect" if "reflection" in name else "replicate" if "replication" in name else arguments.get("mode")
    numbers = [int(number) for number in (arguments["pad"] if "pad" in arguments else arguments["padding"])]
    pairs = list(zip(numbers[::2], numbers[1::2], strict=True))[::-1]
    rest = ((0, 0),) * (rank_of(node) - len(pairs))
    before, after = zip(*rest, *pairs, strict=True)
    return {"before": before, "after": after, "mode": mode or "constant"}


def parts(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Where a slice, one element or each part of a dim begins; None where that varies or ends at several tensors."""
    source = arguments["self"].meta["val"]
    at = int(arguments["dim"]) % source.ndim
    drops = operation(node) in ("select", "unbind")
    extent = source.shape[at]
    starts: tuple[Any, ...]
    if operator_row(node.target).elements == PARTS:
        lengths = [1 if drops else each.shape[at] for each in node.meta["val"]]
        if not lengths or not all(isinstance(length, int) for length in lengths):
            return None
        starts = tuple(accumulate(lengths[:-1], initial=0))
    else:
        start = arguments["index"] if drops else arguments.get("start") or 0
        if not isinstance(start, int) or (start < 0 and not isinstance(extent, int)):
            return None
        first = max(start + extent, 0) if start < 0 else start
        starts = (min(first, extent) if isinstance(extent, int) else first,)
    return {"dim": at, "starts": starts, "step": int(arguments.get("step", 1)), "drops": drops}


def upsample(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """How it interpolates, and the factors where these were given and not sizes."""
    name = operation(node)
    mode = "nearest-exact" if "exact" in name else "nearest" if "nearest" in name else "linear"
    space = int(name[-2])
    attributes: Attributes = {
        "mode": "cubic" if "cubic" in name else mode,
        "align_corners": bool(arguments.get("align_corners", False)),
        "space": space,
    }
    factors = arguments.get("scale_factors") or [arguments.get(f"scales{end}") for end in ("_d", "_h", "_w")[-space:]]
    if space == 1 and "scales" in arguments:
        factors = [arguments["scales"]]
    if all(factor is not None for factor in factors):
        ratios = [float(factor).as_integer_ratio() for factor in factors]
        attributes["factor_numerators"], attributes["factor_denominators"] = (
            tuple(each) for each in zip(*ratios, strict=True)
        )
    elif any(factor is not None for factor in factors):
        return None
    return attributes


def reshape(node: fx.Node, arguments: Arguments) -> Attributes | None:
    """Which dim of the input each dim of the output is, as far as that holds for every number of samples."""
    values = [each.meta.get("val") for each in arguments.values() if isinstance(each, fx.Node)]
    source = values[0] if values else None
    num_tensors = sum(isinstance(value, Tensor) for value in values)  # two in h.view_as(h), which is one node
    if not isinstance(source, Tensor) or not isinstance(node.meta["val"], Tensor) or num_tensors != 1:
        return {}
    elements = operator_row(node.target).elements
    if elements == PERMUTED:
        kept = _moved(node, source.ndim)
    else:
        kept = (_expanded if elements == EXPANDED else _viewed)(source, node.meta["val"])
    return {"kept": kept} if any(place >= 0 for place in kept) else {}


def _moved(node: fx.Node, rank: int) -> tuple[int, ...]:
    """Of a permutation, which is tried on a tensor whose extents are all different."""
    extents = torch.empty(tuple(range(2, rank + 2)), device="meta")
    return tuple(size - 2 for size in function_called(node)(extents, *node.args[1:], **node.kwargs).shape)


def _expanded(source: Tensor, result: Tensor) -> tuple[int, ...]:
    new = result.ndim - source.ndim
    same = (str(a) == str(b) for a, b in zip(source.shape, result.shape[new:], strict=True))
    return (*(-1,) * new, *(place if alike else -1 for place, alike in enumerate(same)))


def _viewed(source: Tensor, result: Tensor) -> tuple[int, ...]:
    """A dim is left alone by a view if it is as long as before and as many elements lie between its neighbours."""
    places: dict[tuple[str, str], int] = {}
    for place, size in enumerate(source.shape):
        places.setdefault((str(size), _inner(source, place)), place)
    sources = []
    for place, size in enumerate(result.shape):
        sources.append(places.pop((str(size), _inner(result, place)), -1))
    return tuple(sources)


def _inner(value: Tensor, place: int) -> str:
    """How many elements lie inside one of a dim, as an expression of the sizes that vary."""
    return str(prod(value.shape[place + 1 :]))


OPAQUE = "opaque"
ELEMENTWISE = "pointwise"
LOSS = "loss"
RESHAPE = "reshape"


@dataclass(frozen=True, slots=True)
class Rules:
    """What kind operators are that halopipe does not know, or knows otherwise, by name: ``mylib::op``.

    Attributes:
        elementwise: operators that treat every element by itself; their tensors are broadcast to the result.
        kinds: for others the kind and what finds its attributes (see ``profiler.capture.kinds``).

    Raises:
        UnknownNameError: there is no such kind, or a name is not that of an operator.
    """

    elementwise: frozenset[str] = frozenset()
    kinds: Mapping[str, tuple[str, Rule]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (*self.elementwise, *self.kinds):
            if "::" not in name:
                raise UnknownNameError(f"{name!r} is no operator", ["a name is namespace::operator: mylib::scale"])
        for kind, _ in self.kinds.values():
            layer_kind(kind)

    def of(self, node: fx.Node) -> tuple[str, Rule] | None:
        """What they say about the operator that ``node`` calls."""
        name = schema_of(overload_of(node)).name
        return (ELEMENTWISE, nothing) if name in self.elementwise else self.kinds.get(name)


NO_RULES = Rules()


def kind_of(node: fx.Node, rules: Rules = NO_RULES) -> tuple[str, Attributes]:
    """The kind of the operator that ``node`` calls, and its attributes (``op`` among them)."""
    op: Attributes = {"op": str(node.target)}
    if not isinstance(node.target, OpOverload):
        return OPAQUE, op
    arguments = arguments_of(node)
    own = rules.of(node)
    row = operator_row(node.target)
    candidates = [own] if own else [(kind, _ATTRIBUTES.get(kind, nothing)) for kind in row.kinds]
    if own is None and torch.Tag.pointwise in node.target.tags:
        candidates.append((ELEMENTWISE, _ATTRIBUTES[ELEMENTWISE]))
    for kind, rule in candidates:
        attributes = None if kind not in _OF_ANY_SIZE and _varies(arguments) else rule(node, arguments)
        if attributes is not None:
            return kind, {**attributes, **op}
    return OPAQUE, op


def _varies(arguments: Arguments) -> bool:
    """Whether an argument is a size that varies, so that the attributes would hold for the example alone."""
    return any(
        isinstance(node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat))
        or (node.op == "placeholder" and node.meta.get("val") is None)  # the number of samples, for one
        for node in nodes_in(tuple(arguments.values()))
    )


_OF_ANY_SIZE = frozenset({ELEMENTWISE, LOSS, RESHAPE, "slice", "upsample", "segment_expand"})
"""Kinds whose attributes hold for every size that an operator may be given."""

_ATTRIBUTES: Mapping[str, Rule] = {
    "adaptive_pool": adaptive_pool,
    "attention": attention,
    "batch_norm": batch_norm,
    "concat": dim,
    "conv": conv,
    "embedding": embedding,
    "global_pool": global_pool,
    "layer_norm": normalised,
    "loss": loss,
    "lstm": recurrence,
    "pad": pad,
    "pointwise": terms_of_sum,
    "pool": pool,
    "reduce": reduction,
    "reshape": reshape,
    "slice": parts,
    "softmax": dim,
    "transposed_conv": transposed_conv,
    "upsample": upsample,
}
"""By kind, what finds its attributes; others have none.  None: the operator is in a form that its kind does not cover,
and may be of its next."""
