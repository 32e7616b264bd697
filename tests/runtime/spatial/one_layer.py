"""One layer, divided, in one thread: every rank's part is taken from the whole tensors, so that nothing has to be sent.

Parts of leaves are taken by slicing, which autograd records: gradients of all parts add up in the leaves. What every
local form has to do is asked of it for random layouts.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from cuda_ops.calls import arguments_of
from cuda_ops.dense.recurrent import recurrence_by_shape
from planner.ir.box import Box, whole
from planner.ir.graph import Layer, TensorSpec
from planner.ir.plan import Placement
from planner.layers.division import Division, LayerDivision
from profiler.capture.kinds import kind_of
from runtime.pipeline.routing import slices
from runtime.spatial.exchange import PeerGroup
from runtime.spatial.layer_shard import LayerShard
from runtime.spatial.op_rules import form

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class OneLayer:
    """A function of one operator.

    Attributes:
        tensors: its arguments, in order: values, which ``specs`` are of, then parameters, then constants.
        read: which values the operator reads, in order, as often as it does.
        given: by argument of the operator, the place among ``tensors``, or what it is.
        operator_at: what is called in place of the operator on a rank, or (None) on one device.
    """

    layer: Layer
    target: Any
    tensors: tuple[Tensor, ...]
    specs: tuple[TensorSpec, ...]
    read: tuple[int, ...]
    num_parameters: int
    given: Mapping[str, Any]
    operator_at: Callable[[LayerShard | None], Callable[..., Any]] | None = None

    def ranks(self, cuts: Mapping[str, tuple[int, ...]], margin: int = 0) -> Iterator[tuple[LayerShard, Any]]:
        """The step of each rank, and what its form gives."""
        n = len(self.specs)
        parameters = tuple(
            TensorSpec(("feature",) * each.ndim, tuple(each.shape), _dtype(each))
            for each in self.tensors[n : n + self.num_parameters]
        )
        samples = self.specs[0].shape[self.specs[0].dims.index("sample")]
        inputs = tuple(self.specs[place] for place in self.read)
        division = LayerDivision.of(self.layer, inputs, parameters, Placement(0, cuts, margin=margin), samples)
        whole = Division({self.layer.name: division}, len(division.own), samples)
        for position in range(len(division.own)):
            peers = PeerGroup(SimpleNamespace(rank=position), tuple(range(len(division.own))))
            step = LayerShard(peers, whole, division, peers.ranks, inputs_of=self._inputs_of())
            yield step, form(self.layer.kind)(step, self._operator(step), self._arguments(step))

    def whole(self) -> tuple[Tensor, ...]:
        """What one device makes."""
        return listed(
            self._operator(None)(**{name: self._put(value, self.tensors) for name, value in self.given.items()})
        )

    def _operator(self, step: LayerShard | None) -> Callable[..., Any]:
        function = self.target if self.operator_at is None else self.operator_at(step)
        known = self.target._schema.arguments

        def call(**arguments: Any) -> Any:
            named = {each.name: arguments[each.name] for each in known if each.kwarg_only and each.name in arguments}
            return function(*[arguments[each.name] for each in known if not each.kwarg_only], **named)

        return call

    def _inputs_of(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        order = iter(range(len(self.read)))
        for name, value in self.given.items():
            if isinstance(value, _At) and value.place < len(self.specs):
                found[name] = next(order)
            elif isinstance(value, list) and any(isinstance(each, _At) for each in value):
                found[name] = tuple(next(order) if each.place < len(self.specs) else None for each in value)
        return found

    def _arguments(self, step: LayerShard) -> dict[str, Any]:
        tensors = []
        for place, tensor in enumerate(self.tensors):
            if place < len(self.specs):
                box: Box | None = step.held(self.read.index(place))
            elif place < len(self.specs) + self.num_parameters:
                box = step.division.weights[place - len(self.specs)][step.position]
            else:
                box = None
            tensors.append(tensor if box is None else tensor[slices(box, all_of(tensor))])
        return {name: self._put(value, tensors) for name, value in self.given.items()}

    def _put(self, value: Any, tensors: Tensors) -> Any:
        if isinstance(value, _At):
            return tensors[value.place]
        return [self._put(each, tensors) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class _At:
    place: int


def one_layer(
    function: Callable[..., Any], tensors: Tensors, dims: Sequence[str], outputs: Sequence[str], parameters: int = 0
) -> OneLayer:
    """The layer that ``function`` is.

    Args:
        dims: of each value, names; tensors beyond these are parameters, then constants.
        outputs: of each output, names.
    """
    leaves = tuple(each.detach().requires_grad_(each.is_floating_point()) for each in tensors)
    trace = make_fx(lambda *given: function(*given), pre_dispatch=True, tracing_mode="fake")
    with recurrence_by_shape():  # torch 2.11's own rule gives states of LSTMs a dim too many
        traced = trace(*(each.detach() for each in tensors))
    places = {node: _At(at) for at, node in enumerate(n for n in traced.graph.nodes if n.op == "placeholder")}
    calls = [node for node in traced.graph.nodes if node.op == "call_function" and node.target is not operator.getitem]
    (main,) = calls
    kind, attributes = kind_of(main)
    named = arguments_of(main)
    arguments = {each.name: named[each.name] for each in main.target._schema.arguments if each.name in named}
    for name, value in arguments.items():
        if isinstance(value, torch.fx.Node):
            arguments[name] = places[value]
        elif isinstance(value, (list, tuple)):
            arguments[name] = [places.get(each, each) if isinstance(each, torch.fx.Node) else each for each in value]
    made = listed(main.meta["val"])
    specs = tuple(
        TensorSpec(tuple(names.split()), tuple(each.shape), _dtype(each))
        for names, each in zip(dims, leaves, strict=False)
    )
    results = tuple(
        TensorSpec(tuple(names.split()), tuple(each.shape), _dtype(each))
        for names, each in zip(outputs, made, strict=True)
    )
    parameter_names = tuple(f"p{at}" for at in range(parameters))
    read = tuple(each.place for each in _places(list(arguments.values())) if each.place < len(specs))
    names = tuple(f"value{place}" for place in read)
    layer = Layer("layer", kind, names, results, parameter_names, attributes)
    return OneLayer(layer, main.target, leaves, specs, read, parameters, arguments)


def _places(values: list[Any]) -> Iterator[_At]:
    """What an operator reads, in order, as often as it does."""
    for value in values:
        if isinstance(value, _At):
            yield value
        elif isinstance(value, list):
            yield from _places(value)


def listed(value: Any) -> tuple[Tensor, ...]:
    """What a layer makes, as a tuple."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def all_of(x: Tensor) -> Box:
    """The box of a tensor."""
    return whole(tuple(x.shape))


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


_SPACE = {1: "width", 2: "height width", 3: "depth height width"}


def images(*extents: int, samples: int = 2, channels: int = 3) -> Tensor:
    return torch.randn(samples, channels, *extents, dtype=torch.float64)


def spatial(function: Callable[..., Any], x: Tensor, outputs: int = 1) -> OneLayer:
    names = f"sample channel {_SPACE[x.ndim - 2]}"
    return one_layer(function, [x], [names], [names] * outputs)


def layouts(one: OneLayer, seed: int, count: int = 6, dims: tuple[str, ...] = ()) -> list[dict[str, tuple[int, ...]]]:
    """Random cuts of up to three of the dims of the output, into 2 to 6 parts."""
    rng = random.Random(seed)
    spec = one.layer.outputs[0]
    extents = dict(zip(spec.dims, spec.shape, strict=True))
    names = dims or spec.dims
    found = []
    for _ in range(count):
        chosen = rng.sample(names, rng.randint(1, min(3, len(names))))
        ways = [rng.choice((2, 3, 4, 6))] if len(chosen) == 1 else [rng.choice((2, 3)) for _ in chosen]
        found.append({name: random_cuts(rng, extents[name], n) for name, n in zip(chosen, ways, strict=True)})
    return found


def check_all(one: OneLayer, kind: str, seed: int = 0, count: int = 6, dims: tuple[str, ...] = ()) -> None:
    assert one.layer.kind == kind
    for at, cuts in enumerate(layouts(one, seed, count, dims)):
        check(one, cuts)
        if at == 0:
            check_connected(one, cuts)


def check(one: OneLayer, cuts: Mapping[str, tuple[int, ...]], margin: int = 0, tolerance: float = 1e-12) -> None:
    """Every part equals what one device makes there, and gradients of all parts add up to its gradients."""
    whole = one.whole()
    cotangents = [torch.randn_like(each) if each.is_floating_point() else each for each in whole]
    leaves = [each for each in one.tensors if each.requires_grad]
    floats = [each.is_floating_point() for each in whole]
    total = sum((each * by).sum() for each, by, real in zip(whole, cotangents, floats, strict=True) if real)
    expected = (
        torch.autograd.grad(total, leaves, allow_unused=True)
        if isinstance(total, Tensor) and total.requires_grad
        else ()
    )
    sums: list[Tensor] = []
    need: list[set[bool]] = [set() for _ in whole]
    for step, result in one.ranks(cuts, margin):
        parts = listed(result)
        assert len(parts) == len(whole)
        for output, (part, everything, by) in enumerate(zip(parts, whole, cotangents, strict=True)):
            held = step.done if output == 0 else step.division.held[output][step.position]
            there = everything[slices(held, all_of(everything))]
            assert part.shape == there.shape, (step.position, output)
            assert part.dtype == there.dtype
            _close(part, there, tolerance)
            need[output].add(part.requires_grad)
            assert part.requires_grad or not everything.requires_grad, "a part is not connected"
            if part.requires_grad:
                owned = step.division.owned[output]
                own = owned[step.position]
                if owned.index(own) == step.position:
                    sums.append((part[slices(own, held)] * by[slices(own, all_of(by))]).sum())
                else:
                    sums.append(part.sum() * 0)
    assert all(len(each) == 1 for each in need), "backward goes another way on some rank"
    if sums and any(each is not None for each in expected):
        found = torch.autograd.grad(sum(sums), leaves, allow_unused=True)
        for mine, theirs in zip(found, expected, strict=True):
            if theirs is not None:
                assert mine is not None, "a gradient is missing"
                _close(mine, theirs, tolerance)


def check_connected(one: OneLayer, cuts: Mapping[str, tuple[int, ...]]) -> None:
    """Backward from every rank's part alone reaches the same of what the layer reads, empty or not."""
    reached = set[int]()
    ways = set[frozenset[int]]()
    leaves = one.tensors
    watched = tuple(_Watched.apply(each, at, reached) if each.requires_grad else each for at, each in enumerate(leaves))
    for _, result in replace(one, tensors=watched).ranks(cuts):
        reached.clear()
        for part in listed(result):
            if part.requires_grad:
                part.sum().backward(retain_graph=True)
        ways.add(frozenset(reached))
    assert len(ways) == 1
    expected = {at for at, each in enumerate(leaves) if each.requires_grad}
    assert ways == {frozenset(expected)} or "detach" in str(one.target)


class _Watched(torch.autograd.Function):
    """Notes that backward came by, with a gradient or without."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: int, reached: set[int]) -> Tensor:
        ctx.place = place
        ctx.reached = reached
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.reached.add(ctx.place)
        return gradient, None, None


def random_cuts(rng: random.Random, extent: int, parts: int) -> tuple[int, ...]:
    """Uneven, some of them empty."""
    return (0, *sorted(rng.randint(0, extent) for _ in range(parts - 1)), extent)


def _close(mine: Tensor, theirs: Tensor, tolerance: float) -> None:
    if not mine.is_floating_point():
        assert torch.equal(mine, theirs)
        return
    scale = max(1.0, float(theirs.detach().abs().max())) if theirs.numel() else 1.0
    assert torch.allclose(mine, theirs, rtol=0, atol=tolerance * scale), float((mine - theirs).detach().abs().max())
