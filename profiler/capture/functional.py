"""In-place operators become their functional twins, so that every value has one maker and may be kept or sent.

    y = relu_(x)    ->    y = relu(x), and later uses of x read y

A write to a part of a tensor (``x[:, 0] += 1``) makes a new tensor as well, which later uses of the old one and of its
other views read (:mod:`profiler.capture.functional`).  Updates of buffers (running statistics) stay in place: they are
state.

Views in a traced graph, and what a write to a view makes of the tensor that it shows.

    v = x[:, 0]; v += 1; y = x * 2    ->    w = x[:, 0] + 1; z = select_scatter(x, w, 1, 0); y = z * 2

Whoever reads ``x``, or another view of it, before the write reads what it was.

Of sampled graphs, views of row numbers go to their readers (:func:`keep_indices_home`).

Constants that are made beside a tensor, ``x.new_ones(3, 3)``, take its dtype and device and read nothing of it.  They
become ``ones(3, 3)``, so that nobody has to send ``x`` for them; those as long as there are samples stay
(:func:`detach_constants`).  Rows that are divided again are not merged (:func:`keep_rows_apart`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, fx

from cuda_ops._torch import OpOverload, overload_name, schema_of, storage_id, wrap_with_set_grad_enabled
from cuda_ops.calls import arguments_of, parameters_of
from cuda_ops.operator_table import PARTS, operator_row
from planner.ir.errors import UnsupportedModelError
from profiler.capture.operators import function_called, name_read, node_argument, operation, overload_of, place
from profiler.capture.user_module import OF_PARAMETERS_WRITTEN

_aten = torch.ops.aten
_MAKERS = {"ones": _aten.ones.default, "zeros": _aten.zeros.default, "full": _aten.full.default}
_ROWS = 2


class Views:
    """Which values of a graph are views of which others, as it is gone through in order."""

    def __init__(self) -> None:
        self._whole: dict[fx.Node, fx.Node] = {}
        self._maker: dict[fx.Node, fx.Node] = {}  # whose operator shows that part of the whole

    def note(self, node: fx.Node) -> None:
        """Takes up ``node`` if it is a view."""
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if source is not None and node.target is operator.getitem:
            source = source.args[0] if source.args and isinstance(source.args[0], fx.Node) else None
        if source is not None and _shows(node, source):
            self._whole[node] = source
            self._maker[node] = node

    def alias(self, node: fx.Node, of: fx.Node) -> None:
        """Takes up ``node`` as another name of ``of``."""
        self._whole[node] = of
        self._maker[node] = node

    def chain(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """``node``, what it is a view of, and so on up to what is none."""
        nodes = [node]
        while nodes[-1] in self._whole:
            nodes.append(self._whole[nodes[-1]])
        return tuple(nodes)

    def read_later(self, chain: Collection[fx.Node], node: fx.Node) -> list[fx.Node]:
        """Other views of what ``chain`` ends with that are read after ``node``, each behind what it is a view of.

        Those that nobody reads any more are left: a loop that writes place by place has made two for each place.
        """
        root = tuple(chain)[-1]
        chains = sorted(map(self.chain, self._whole), key=len)
        others = [views[0] for views in chains if views[-1] is root and views[0] not in chain]
        late = [view for view in others if any(node < user for user in view.users)]
        wanted = {part for view in late for part in self.chain(view)}
        return [view for view in others if view in wanted]

    def whole(self, graph: fx.Graph, part: fx.Node, written: fx.Node) -> fx.Node | None:
        """A new node: what ``part`` is a view of, where ``written`` is in its place; None for views of other kinds."""
        made = _undone(graph, self._maker[part], self._whole[part], written)
        if made is not None and made is not written:
            made.meta = {**written.meta, "val": self._whole[part].meta.get("val")}
        return made

    def rebuilt(self, graph: fx.Graph, view: fx.Node, written: Mapping[fx.Node, fx.Node]) -> fx.Node:
        """A new node: ``view`` of what is now in the place of its whole."""
        maker = self._maker[view]
        whole = written[self._whole[view]]
        if maker.target is not operator.getitem:
            return graph.node_copy(maker, lambda node: whole if node is maker.args[0] else node)
        split = node_argument(maker, 0)
        parts = graph.node_copy(split, lambda node: whole if node is split.args[0] else node)
        with graph.inserting_after(parts):
            return graph.node_copy(maker, lambda node: parts)

    def replace(self, written: Mapping[fx.Node, fx.Node]) -> None:
        """The values of ``written`` take the places of its keys."""
        for old, new in written.items():
            if old in self._whole:
                self._whole[new] = written.get(self._whole[old], self._whole[old])
                self._maker[new] = self._maker[old]


def _shows(node: fx.Node, source: fx.Node) -> bool:
    """Whether the result of ``node`` lies in the memory of ``source``: as seen when it was traced, else by schema."""
    if operation(node) == "lift_fresh_copy":  # of a constant, which was no copy when it was traced
        return False
    mine = node.meta.get("val")
    others = source.meta.get("val")
    if isinstance(mine, Tensor) and isinstance(others, Tensor):
        return bool(storage_id(mine) == storage_id(others))
    maker = node_argument(node, 0) if node.target is operator.getitem else node
    if not isinstance(maker.target, OpOverload):
        return False
    return any(result.alias_info is not None for result in schema_of(maker.target).returns)


def _undone(graph: fx.Graph, maker: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node | None:
    """``whole`` with ``part`` in the place that ``maker`` shows, in the way that the row of its operator says."""
    if maker.target is operator.getitem:
        return _joined(graph, maker, whole, part)
    rest: tuple[Any, ...] = maker.args[1:]
    match operator_row(maker.target).undo:
        case "same":
            return part
        case "slice":
            return _scattered(graph, _aten.slice_scatter.default, whole, part, *rest, **maker.kwargs)
        case "select":
            return _scattered(graph, _aten.select_scatter.default, whole, part, *rest, **maker.kwargs)
        case "narrow" if _are_numbers(rest):
            dim, start, length = rest
            return _scattered(graph, _aten.slice_scatter.default, whole, part, dim, start, start + length)
        case "diagonal":
            return graph.call_function(_aten.diagonal_scatter.default, (whole, part, *rest), maker.kwargs)
        case "again":
            return graph.call_function(function_called(maker), (part, *rest), maker.kwargs)
        case "order":
            order = [dim % len(rest[0]) for dim in rest[0]]
            return graph.call_function(function_called(maker), (part, [order.index(dim) for dim in range(len(order))]))
        case "shape":
            return graph.call_function(_aten.reshape_as.default, (part, whole))
    return None


def _joined(graph: fx.Graph, maker: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node | None:
    """For one of several parts that a tensor was divided into."""
    split, index = cast("tuple[fx.Node, int]", maker.args)
    dim = arguments_of(split).get("dim", 0)
    undo = operator_row(split.target).undo
    if undo == "items":
        return _scattered(graph, _aten.select_scatter.default, whole, part, dim, index)
    lengths = [value.shape[dim] for value in split.meta.get("val", ())]
    if undo != "slices" or not _are_numbers(lengths):
        return None
    start = sum(lengths[:index])
    return _scattered(graph, _aten.slice_scatter.default, whole, part, dim, start, start + lengths[index])


def _scattered(graph: fx.Graph, scatter: OpOverload, whole: fx.Node, part: fx.Node, *at: Any, **named: Any) -> fx.Node:
    """``whole`` with ``part`` in place of a slice; complex numbers as pairs, since torch has no gradient of theirs."""
    value = whole.meta["val"]
    if not value.is_complex():
        return graph.call_function(scatter, (whole, part, *at), named)
    dim, *rest = at or (named.pop("dim", 0),)
    made = graph.call_function(_aten.view_as_complex.default, (whole,))
    with graph.inserting_before(made):
        both = tuple(graph.call_function(_aten.view_as_real.default, (each,)) for each in (whole, part))
        pairs = graph.call_function(scatter, (*both, dim % value.ndim, *rest), named)
    for node, of in (*zip(both, (whole, part), strict=True), (pairs, whole)):
        node.meta = {**of.meta, "val": torch.view_as_real(of.meta["val"])}
    made.args = (pairs,)
    return made


def _are_numbers(values: Iterable[object]) -> bool:
    return all(isinstance(value, int) for value in values)


_TWINS = {
    torch.ops.aten.bernoulli_.float: torch.ops.aten.bernoulli.p,
    torch.ops.aten.normal_.default: torch.ops.aten.normal_functional.default,
    torch.ops.aten.copy_.default: torch.ops.aten.expand_as.default,
}
"""Of operators whose twin has another name."""


def rewrite_in_place(graph: fx.Graph, attributes: Mapping[str, Any]) -> None:
    """Rewrites ``graph``; ``attributes`` holds what its ``get_attr`` nodes read.

    Raises:
        UnsupportedModelError: a view that cannot be undone is written to while the tensor, or another view, is read
            later; or an operator has no twin.
    """
    views = Views()
    buffers = list[fx.Node]()
    for node in list(graph.nodes):
        _require_parameters_kept(node, views, attributes)
        if not is_write(node):
            views.note(node)
            continue
        root = views.chain(node.args[0])[-1]
        if node.target is torch.ops.aten.detach_.default:  # nothing is written
            node.target = torch.ops.aten.detach.default
            _replace_later(node.args[0], node, node)
            views.alias(node, node.args[0])
        elif root.op == "get_attr" and not is_trained(attributes[name_read(root)]):
            views.alias(node, node.args[0])
            buffers.append(node)
        else:
            _rewrite(graph, node, views)
    written = {part for node in buffers for part in views.chain(node_argument(node, 0))}
    roots = {node: views.chain(node_argument(node, 0))[-1] for node in buffers}
    for node in buffers:
        rewrites = [other for other in buffers if other is not node and roots[other] is roots[node]]
        _copy_for_readers(graph, node, written, rewrites)


def _require_parameters_kept(node: fx.Node, views: Views, attributes: Mapping[str, Any]) -> None:
    """Raises :class:`UnsupportedModelError` if ``node`` writes to a parameter, also inside of ``torch.no_grad()``.

    A step has several micro-batches and ranks, each with a forward of its own: what each writes is not what one does.
    """
    for write in _writes_of(node, attributes):
        root = views.chain(write)[-1]
        if root.op == "get_attr" and is_trained(attributes.get(name_read(root))):
            raise UnsupportedModelError(
                f"forward writes to its own parameter {root.target}",
                [f"{node.target} in {place(node) or 'the module itself'}"],
                list(OF_PARAMETERS_WRITTEN),
            )


def _writes_of(node: fx.Node, attributes: Mapping[str, Any]) -> list[fx.Node]:
    """What ``node`` writes to: its first argument, or what the operators inside of a ``no_grad`` block do."""
    if node.target is not wrap_with_set_grad_enabled:
        return [node_argument(node, 0)] if is_write(node) else []
    inner = cast("fx.GraphModule", attributes[name_read(node_argument(node, 1))])
    views = Views()
    roots = list[fx.Node]()
    for each in inner.graph.nodes:
        roots += [views.chain(write)[-1] for write in _writes_of(each, dict(inner.named_children()))]
        views.note(each)
    places = [each for each in inner.graph.nodes if each.op == "placeholder"]
    return [cast("fx.Node", node.args[2 + places.index(root)]) for root in roots if root in places]


def _copy_for_readers(
    graph: fx.Graph, node: fx.Node, written: Collection[fx.Node], rewrites: Iterable[fx.Node]
) -> None:
    """Others read a copy of a buffer that ``node`` wrote: it is written again before their backward, or elsewhere.

    Views of the buffer that are ``written`` themselves stay views of it.  Between two writes of the same buffer,
    ``rewrites`` among them, readers share a copy.
    """
    others = [user for user in node.users if user not in written and user.op != "output"]
    readers = [user for user in others if not (is_write(user) and user.args[0] is node)]
    if not readers:
        return
    made: fx.Node | None = None
    for reader in sorted(readers):
        since = node if made is None else made
        is_old = any(since < other < reader for other in rewrites)
        if made is None or is_old:
            with graph.inserting_before(reader) if is_old else graph.inserting_after(node):
                made = graph.call_function(torch.ops.aten.clone.default, (node,))
            made.meta = dict(node.meta)
        reader.replace_input_with(node, made)


def is_write(node: fx.Node) -> bool:
    """Whether ``node`` writes to its first argument."""
    if not isinstance(node.target, OpOverload) or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    info = parameters_of(node.target)[0].alias_info
    return info is not None and info.is_write


def written_buffer(node: fx.Node) -> str:
    """The buffer that ``node`` writes to, perhaps through views; empty: none."""
    root = node.args[0] if is_write(node) else None
    while isinstance(root, fx.Node) and root.op == "call_function" and root.args:
        root = root.args[0]
    return str(root.target) if isinstance(root, fx.Node) and root.op == "get_attr" else ""


def is_trained(value: Any) -> bool:
    """Whether it is a parameter that gets a gradient."""
    return isinstance(value, torch.nn.Parameter) and value.requires_grad


def _rewrite(graph: fx.Graph, node: fx.Node, views: Views) -> None:
    """``node`` is given its twin; what is read later of the tensor that it wrote to is made again behind it."""
    write = node_argument(node, 0)
    target = node.target
    chain = views.chain(write)
    others = views.read_later(chain, node)
    reader = _late_reader((*chain[1:], *others), node)
    last = _make_functional(graph, node)
    written = {write: last}
    if reader is not None:
        for part, whole in pairwise(chain):
            with graph.inserting_after(last):
                made = views.whole(graph, part, written[part])
            if made is None:
                raise UnsupportedModelError(
                    f"{target} writes to a part of a tensor that is read again",
                    [f"in {place(node)}", f"the tensor is read by {reader.target} in {place(reader)}"],
                    ["write it without the in-place operator, as x = x + y rather than x += y"],
                )
            written[whole] = made
            last = made if made is not written[part] else last
        for view in others:
            with graph.inserting_after(last):
                written[view] = last = views.rebuilt(graph, view, written)
    for old, new in written.items():
        _replace_later(old, new, last)
    views.replace(written)


def _make_functional(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """Gives ``node`` the twin of its operator; the node whose value has the dtype of what was written to."""
    written = node_argument(node, 0)
    others = list[Any](node.args[1:])
    own = overload_of(node)
    name = schema_of(own).name.removeprefix("aten::")
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    overload = _TWINS.get(own) or getattr(packet, overload_name(own), None)
    if overload is None:
        raise UnsupportedModelError(
            f"{node.target} has no twin that is not in place", [f"in {place(node)}"], ["use an operator that returns"]
        )
    if node.target is torch.ops.aten.copy_.default:
        with graph.inserting_before(node):
            others = [_like(graph, others[0], written, node)]
        node.args = (*others, written)
    else:
        node.kwargs = {**_left_out(node, overload), **node.kwargs}
    node.target = overload
    if not any(_widens(other, written) for other in others):
        return node
    with graph.inserting_after(node):
        made = _like(graph, node, written, node)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return made


def _left_out(node: fx.Node, twin: OpOverload) -> dict[str, Any]:
    """Arguments that ``node`` leaves to their defaults, where ``twin`` has none."""
    own = {each.name: each.default_value for each in schema_of(overload_of(node)).arguments if each.has_default_value()}
    rest = (each for each in schema_of(twin).arguments[len(node.args) :] if not each.has_default_value())
    return {each.name: own[each.name] for each in rest if each.name in own}


def _like(graph: fx.Graph, value: fx.Node, other: fx.Node, node: fx.Node) -> fx.Node:
    """``value`` in the dtype of ``other``, in the place of ``node``."""
    made = graph.call_function(torch.ops.aten.type_as.default, (value, other))
    made.meta = dict(node.meta)
    if isinstance(value.meta.get("val"), Tensor) and isinstance(other.meta.get("val"), Tensor):
        made.meta["val"] = value.meta["val"].type_as(other.meta["val"])
    return made


def _widens(value: Any, written: fx.Node) -> bool:
    """Whether an operator that does not write would answer in the dtype of ``value`` rather than of ``written``."""
    other, own = (each.meta.get("val") if isinstance(each, fx.Node) else None for each in (value, written))
    if not isinstance(other, Tensor) or not isinstance(own, Tensor) or not other.is_floating_point():
        return False
    return other.dtype != own.dtype and torch.promote_types(other.dtype, own.dtype) != own.dtype


def _replace_later(old: fx.Node, new: fx.Node, last: fx.Node) -> None:
    """Who reads ``old`` after ``last`` reads ``new`` instead."""
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not last and last < user)


def _late_reader(values: Iterable[fx.Node], node: fx.Node) -> fx.Node | None:
    """Who reads one of ``values`` after ``node``; sizes do not matter."""
    readers = (user for value in values for user in value.users if node < user)
    return next((user for user in readers if not isinstance(user.meta.get("val"), (int, torch.SymInt))), None)


INDEX = "is_index"
"""In ``node.meta`` of a view of indices: it belongs to the layer that reads it."""


def keep_indices_home(graph: fx.Graph, indices: Iterable[str]) -> None:
    """Gives every reader of rows' numbers views of its own, of the inputs ``indices``.

    They count from the first row that a rank has, which is another one in another stage: a view that several layers
    read, or that is made on another stage, would be handed on with the numbers of its maker.
    """
    names = frozenset(indices)
    _select_rather_than_unbind(graph, names)
    index_views: list[fx.Node] = []
    for node in graph.nodes:
        source = node.args[0] if node.op == "call_function" and node.args else None
        is_view = isinstance(source, fx.Node) and (source.target in names or INDEX in source.meta)
        if is_view and operator_row(node.target).elements not in ("", PARTS):
            node.meta[INDEX] = True
            index_views.append(node)
    for node in reversed(index_views):
        for user in list(node.users)[1:]:
            with graph.inserting_before(user):
                own = graph.node_copy(node)
            user.replace_input_with(node, own)


def _select_rather_than_unbind(graph: fx.Graph, names: frozenset[str]) -> None:
    """``source, target = edge_index`` as ``edge_index[0], edge_index[1]``."""
    for node in list(graph.nodes):
        if node.target is not _aten.unbind.int or node_argument(node, 0).target not in names:
            continue
        for user in list(node.users):
            dim = node.args[1] if len(node.args) > 1 else 0
            with graph.inserting_before(user):
                made = graph.call_function(_aten.select.int, (node.args[0], dim, user.args[1]))
            made.meta = dict(user.meta)
            user.replace_all_uses_with(made)
            graph.erase_node(user)
        graph.erase_node(node)


def detach_constants(graph: fx.Graph) -> None:
    """Rewrites ``new_*`` and ``*_like`` of fixed shapes, and ``type_as``, which reads a dtype of its other tensor."""
    for node in list(graph.nodes):
        if not isinstance(node.target, OpOverload) or not isinstance(node.meta.get("val"), Tensor):
            continue
        if node.target is _aten.type_as.default:
            node.target = _aten.to.dtype
            node.args = (node.args[0], node.meta["val"].dtype)
            continue
        maker = _MAKERS.get(operator_row(node.target).fills)
        shape = tuple(node.meta["val"].shape)
        if maker is None or not node.args or not isinstance(node.args[0], fx.Node) or not _are_numbers(shape):
            continue
        value = node.meta["val"]
        with graph.inserting_before(node):
            made = graph.call_function(
                maker, (list(shape), *_fill(node)), {"dtype": value.dtype, "device": value.device}
            )
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def keep_rows_apart(graph: fx.Graph) -> None:
    """Takes a product of rows on the dims that they are made of again, where those begin with another than samples.

    ``nn.MultiheadAttention`` merges time and samples to rows for its last product, and divides them again; rows of one
    sample would not lie together in between.  The product itself is the same.
    """
    for divided in list(graph.nodes):
        product = _sole_input(divided)
        merged = _sole_input(product)
        if product is None or merged is None or product.target is not _aten.linear.default:
            continue
        if {operation(divided), operation(merged)} - {"view", "reshape"} or product.meta["val"].dim() != _ROWS:
            continue
        shape = divided.meta["val"].shape
        width = merged.meta["val"].shape[-1]
        first, *others, last = shape
        if last != product.meta["val"].shape[-1] or not _are_numbers((first,)) or _are_numbers(others):
            continue
        sizes = [*cast("list[Any]", divided.args[1])[:-1], width]
        with graph.inserting_before(divided):
            rows = graph.call_function(_aten.reshape.default, (merged.args[0], sizes))
            made = graph.call_function(product.target, (rows, *product.args[1:]), product.kwargs)
        rows.meta = {**merged.meta, "val": merged.meta["val"].reshape((*shape[:-1], width))}
        made.meta = {**product.meta, "val": divided.meta["val"]}
        divided.replace_all_uses_with(made)
        for node in (divided, product, merged):
            graph.erase_node(node)


def _sole_input(node: fx.Node | None) -> fx.Node | None:
    """What a tensor is made of first, if nothing else is made of that."""
    source = node.args[0] if node is not None and node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node) or source.op != "call_function" or len(source.users) > 1:
        return None
    return source if isinstance(source.meta.get("val"), Tensor) else None


def _fill(node: fx.Node) -> tuple[Any, ...]:
    """What ``full`` is full of."""
    arguments = arguments_of(node)
    return (arguments["fill_value"],) if "fill_value" in arguments else ()
