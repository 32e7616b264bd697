"""Which operators make up a layer: one each, but for helpers that nobody else reads.

Joined to their reader are constants (the zeros an LSTM starts from) and views of parameters (a tied, transposed
weight), but not what is made of several layers' rows of samples; joined to its neighbour is what updates a buffer and
has no reader (the batch counter of a batch norm).  So a cut between layers never separates what would only be sent
about.

What the dims of a traced value mean: the samples by the symbol in its shape, others by the kind of its layer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx

from planner.ir.graph import SAMPLE, Attribute, TensorSpec, is_sites
from planner.layers import kind as layer_kind
from profiler.capture.functional import INDEX, is_write, written_buffer
from profiler.capture.kinds import NO_RULES, RESHAPE, Rules, kind_of
from profiler.capture.operators import nodes_in, operation, place
from profiler.capture.trace import TracedModel


@dataclass(frozen=True, slots=True)
class OperatorGroup:
    """The operators of a layer, in order of execution.

    Attributes:
        main: makes the layer's outputs.
        nodes: all of them, ``main`` and the ``getitem`` of its outputs included.
    """

    main: fx.Node
    nodes: tuple[fx.Node, ...]


def makes_tensors(node: fx.Node) -> bool:
    """Whether ``node`` is computed and belongs in a layer: all but sizes."""
    return node.op == "call_function" and not isinstance(
        node.meta.get("val"), (int, float, torch.SymInt, torch.SymFloat)
    )


def groups(traced: TracedModel, rules: Rules = NO_RULES) -> tuple[OperatorGroup, ...]:
    """The layers of a graph, in the order of their main operators."""
    nodes = [node for node in traced.module.graph.nodes if makes_tensors(node)]
    fed = _depends_on_inputs(traced)
    leader: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        leader[node] = leader[node.args[0]] if is_output_of(node) else node
    _join_updates(nodes, leader, fed, traced)
    _join_helpers(nodes, leader, fed, traced, rules)
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(_end(leader, node), []).append(node)
    order = {node: index for index, node in enumerate(nodes)}
    return tuple(OperatorGroup(main, tuple(members[main])) for main in sorted(members, key=order.__getitem__))


def is_output_of(node: fx.Node) -> bool:
    """Whether ``node`` picks one of several outputs of another."""
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and not _is_tensor(node.args[0])


def tensor_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """The tensors that ``node`` reads, in the order of its arguments, as often as it reads them."""
    nodes = nodes_in((node.args, node.kwargs))
    return (argument for argument in nodes if argument.op == "get_attr" or _is_tensor_source(argument))


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _is_tensor_source(node: fx.Node) -> bool:
    return makes_tensors(node) or (node.op == "placeholder" and _is_tensor(node))


def _depends_on_inputs(traced: TracedModel) -> set[fx.Node]:
    fed: set[fx.Node] = set()
    for node in traced.module.graph.nodes:
        if traced.is_input(node) or (makes_tensors(node) and any(argument in fed for argument in node.all_input_nodes)):
            fed.add(node)
    return fed


def _end(leader: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    while leader[node] is not node:
        node = leader[node]
    return node


def _join_helpers(
    nodes: list[fx.Node], leader: dict[fx.Node, fx.Node], fed: set[fx.Node], traced: TracedModel, rules: Rules
) -> None:
    joined: list[fx.Node] = []
    for index, node in reversed([*enumerate(nodes)]):
        if (node in fed and INDEX not in node.meta) or is_write(node) or is_output_of(node):
            continue
        reads_parameter = any(traced.is_parameter(argument) for argument in _attributes_behind(node))
        if reads_parameter and kind_of(node, rules)[0] != RESHAPE:
            continue
        readers = {_end(leader, user) for user in node.users if makes_tensors(user)}
        if readers == {node}:  # updates that are in its layer
            readers = {_end(leader, host) for host in (_neighbour(nodes, index),) if host is not None}
        readers.discard(node)
        if len(readers) == 1 and all(makes_tensors(user) for user in node.users):
            leader[node] = readers.pop()
            joined.append(node)
    for node in reversed(joined):  # a row a sample of another layer is divided, which a helper's inputs are not
        made = filter(makes_tensors, node.all_input_nodes)
        foreign = (each for each in made if _end(leader, each) is not _end(leader, node))
        if INDEX not in node.meta and any(traced.sample_dims(each.meta.get("val")) for each in foreign):
            leader[node] = node


def _attributes_behind(node: fx.Node) -> Iterator[fx.Node]:
    visited = set[fx.Node]()
    waiting = [node]
    while waiting:
        for argument in waiting.pop().all_input_nodes:
            if argument in visited:
                continue
            visited.add(argument)
            if argument.op == "get_attr":
                yield argument
            else:
                waiting.append(argument)


def _join_updates(nodes: list[fx.Node], leader: dict[fx.Node, fx.Node], fed: set[fx.Node], traced: TracedModel) -> None:
    order = {node: index for index, node in enumerate(nodes)}
    for node in reversed(nodes):
        if not _only_updates(node) or any(user in order and not _only_updates(user) for user in node.users):
            continue
        later = [user for user in node.users if user in order]
        if later:  # it is updated again: one layer has all updates that read each other
            leader[node] = _end(leader, later[0])
            continue
        makers = [_end(leader, maker) for maker in node.all_input_nodes if maker in fed and maker in order]
        beside = _user_before(nodes, order[node]) or _neighbour(nodes, order[node])
        host = max(makers, key=order.__getitem__) if makers else beside
        if host is not None and _end(leader, host) is not node:
            leader[node] = _end(leader, host)


def _only_updates(node: fx.Node) -> bool:
    value: Any = node.meta.get("val")
    return is_write(node) or (not isinstance(value, Tensor) and not value)


def _user_before(nodes: list[fx.Node], index: int) -> fx.Node | None:
    """The last operator before an update that uses the same buffer, such as the norm whose statistics it averages."""
    buffer = written_buffer(nodes[index])
    using = (
        node
        for node in reversed(nodes[:index])
        if any(each.op == "get_attr" and each.target == buffer for each in node.all_input_nodes)
    )
    return next((node for node in using if not _only_updates(node)), None) if buffer else None


def _neighbour(nodes: list[fx.Node], index: int) -> fx.Node | None:
    """The next operator of the same module, else the next one, else the one before."""
    later = [node for node in nodes[index + 1 :] if not _only_updates(node)]
    alike = next((node for node in later if place(node) == place(nodes[index])), None)
    earlier = (node for node in reversed(nodes[:index]) if not _only_updates(node))
    return alike or next(iter(later), None) or next(earlier, None)


_SPACE = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}
_FIRM = frozenset({SAMPLE, "channel", "depth", "height", "width", "head"})  # access relations and layouts go by these
_ALIKE = frozenset({"pointwise", "pad", "slice", "batch_norm"})


def specify(value: Tensor, names: tuple[str, ...], traced: TracedModel) -> TensorSpec:
    """The spec of a traced ``value`` in the example; ``names`` are those of its dims if no dim is special.

    Where the number of samples is fixed, dim 0 holds the samples if it is that long.  Sizes that vary give their names
    to dims of no firm meaning.
    """
    symbols = traced.symbols
    shape = tuple(symbols.extent(size, traced.samples) for size in value.shape)
    sizes = [symbols.name_of(size) for size in value.shape]
    if traced.is_polymorphic:
        places = [dim for dim, size in enumerate(value.shape) if symbols.per_sample(size)]
    else:
        places = [0] if shape and shape[0] == traced.samples and sizes[0] is None else []
    dims = list(_placed(names, places, len(shape)))
    guessed = {*traced.varying, "time"} if any(sizes) else set(traced.varying)
    for dim, (name, size) in enumerate(zip(dims, sizes, strict=True)):
        if name not in _FIRM and size != name and (name in guessed or (size and size not in dims)):
            dims[dim] = size if size and size not in dims else f"dim{dim}"
    return TensorSpec(_of_sites(dims), shape, str(value.dtype).removeprefix("torch."))


def _of_sites(dims: Sequence[str]) -> tuple[str, ...]:
    """``dims``; beside sites lie channels."""
    return (dims[0], "channel") if len(dims) == 2 and is_sites(dims[0]) else tuple(dims)


def specify_input(node: fx.Node, traced: TracedModel) -> TensorSpec:
    """The spec of a graph input: just those dims bear the name of a size that vary with it."""
    value = node.meta["val"]
    tensor = node.target
    names = spatial_names(3) if value.ndim == 3 and _is_read_along_width(node) else ()
    spec = specify(value, names or input_names(value), traced)
    places = {
        dim: name for name, occurrences in traced.varying.items() for where, dim in occurrences if where == tensor
    }
    dims = tuple(places.get(dim, f"dim{dim}" if name in traced.varying else name) for dim, name in enumerate(spec.dims))
    return replace(spec, dims=_of_sites(dims))


def _is_read_along_width(node: fx.Node) -> bool:
    """Whether a tensor of 3 dims is convolved or pooled, maybe after what leaves its dims as they are."""
    waiting = [node]
    visited = {node}
    while waiting:
        for user in waiting.pop().users:
            name = operation(user) if user.op == "call_function" else ""
            if name.endswith("1d"):
                return True
            value = user.meta.get("val")
            if isinstance(value, Tensor) and value.ndim == 3 and user not in visited and kind_of(user)[0] in _ALIKE:
                waiting.append(user)
                visited.add(user)
    return False


def input_names(value: Tensor) -> tuple[str, ...]:
    """Names of the dims of a graph input: numbers are images or sequences of features, integers labels or tokens."""
    rank = value.ndim
    if value.is_floating_point():
        return spatial_names(rank) if rank >= 4 else _sequence_names(rank)
    return (SAMPLE, "time")[:rank] if rank <= 2 else (SAMPLE, *_SPACE.get(rank - 1, ()))


def output_names(
    kind: str, rank: int, inputs: tuple[TensorSpec, ...], attributes: Mapping[str, Attribute]
) -> tuple[str, ...]:
    """Names of the dims of a result, ``rank`` of them, of a layer of ``kind``, which states where they are from."""
    dims = layer_kind(kind).DIMS
    if dims == "space":
        return spatial_names(rank)
    if kind == "segment":
        return (SAMPLE, "channel", "cell")[:rank]
    if kind == "attention" and rank == 4:
        return (SAMPLE, "head", "time", "feature")
    if dims == "input":
        alike = next((spec for spec in inputs if len(spec.dims) == rank and SAMPLE in spec.dims[:1]), None)
        if alike is not None:
            return alike.dims
    return _derived_names(kind, rank, inputs[0].dims, attributes) if inputs else _sequence_names(rank)


def _derived_names(
    kind: str, rank: int, names: tuple[str, ...], attributes: Mapping[str, Attribute]
) -> tuple[str, ...]:
    """Of a result some of whose dims are those of the first input, which are called ``names``."""
    kept, dim, dims = (attributes.get(name) for name in ("kept", "dim", "dims"))
    if kind == "reshape" and isinstance(kept, tuple) and _FIRM.intersection(names[at] for at in kept if at > 0):
        used = {names[place] for place in kept if place >= 0}
        return tuple(names[place] if place >= 0 else _unused(at, used) for at, place in enumerate(kept))
    if kind == "global_pool":
        return names[:rank]
    if kind == "reduce" and isinstance(dims, tuple) and len(names) == rank + len(dims):
        return tuple(name for at, name in enumerate(names) if at not in dims)
    if kind == "linear" and len(names) == rank >= 4:
        return (*names[:-1], "channel" if names[-1] == "channel" else "feature")
    if kind == "slice" and isinstance(dim, int) and len(names) == rank + 1:
        return (*names[:dim], *names[dim + 1 :])
    if kind == "concat" and isinstance(dim, int) and len(names) == rank - 1:
        return (*names[:dim], _unused(dim, set(names)), *names[dim:])
    return _sequence_names(rank)


def _unused(dim: int, used: set[str]) -> str:
    """A name for a dim of no known meaning."""
    name = next(name for name in (f"dim{number}" for number in count(dim)) if name not in used)
    used.add(name)
    return name


def spatial_names(rank: int) -> tuple[str, ...]:
    """Sample, channel and up to three dims of space."""
    return (SAMPLE, "channel", *_SPACE.get(rank - 2, ()))[:rank] if rank <= 5 else ()


def _sequence_names(rank: int) -> tuple[str, ...]:
    by_rank = {1: (SAMPLE,), 2: (SAMPLE, "feature"), 3: (SAMPLE, "time", "feature")}
    return by_rank.get(rank, ())


def _placed(names: tuple[str, ...], places: list[int], rank: int) -> tuple[str, ...]:
    """``names`` if they fit: as many as ``rank``, with the samples where they are; else numbered names."""
    if len(names) == rank and places == [0]:
        others = [f"dim{dim}" if name == SAMPLE else name for dim, name in enumerate(names)]  # as of one kept of a pair
        return (SAMPLE, *others[1:])
    return tuple(SAMPLE if dim in places else f"dim{dim}" for dim in range(rank))
