"""Which layers keep samples apart, by their operators: where there are no values to run them on.

A value has its samples along one dim, each in ``pieces`` pieces: [sample, time] flattened has them in one, [time,
sample] flattened in as many as there are times.  Of every operator it is asked what it makes of that dim:

    by place           elementwise operators and norms over other dims: as in their inputs, which must agree
    dims moved         permutations, transposes: the dim goes along
    dims merged        views: what lies before the samples within a merged dim becomes pieces
    products           a dim that is summed over is none of samples
    an argument dim    which is not that of the samples

Whatever else an operator may do, it is said to mix samples, which keeps a plan from dividing them there.  What
:mod:`profiler.capture.sample_independence` finds by running a network is never more: a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any, cast

from torch import Tensor, fx

from cuda_ops._torch import OpOverload
from cuda_ops.calls import arguments_of
from cuda_ops.dense.data_dependent import is_unit
from cuda_ops.operator_table import EXPANDED, PERMUTED, REGROUPED, operator_row
from planner.ir.graph import INTERLEAVES_SAMPLES, MIXES_SAMPLES
from profiler.capture import loss_reduction
from profiler.capture.kinds import ELEMENTWISE, OPAQUE, kind_of
from profiler.capture.layers import OperatorGroup
from profiler.capture.operators import operation, tensors_in
from profiler.capture.sample_independence import Dependence, is_comparable
from profiler.capture.trace import TracedModel
from profiler.source.model import LoadedModel

_DIMS = ("dim", "dims", "dim0", "dim1", "start_dim", "end_dim")


def dependence_of_operators(
    traced: TracedModel, layer_groups: tuple[OperatorGroup, ...], model: LoadedModel
) -> tuple[Dependence, ...]:
    """Of each layer; as :func:`profiler.capture.sample_independence.dependence`, without values."""
    if not traced.is_polymorphic:
        return (
            *(Dependence(MIXES_SAMPLES),) * (len(layer_groups) - 1),
            Dependence(MIXES_SAMPLES, needs_whole_batch=True),
        )
    return _Rules(traced).of(layer_groups)


@dataclass(slots=True)
class _Rules:
    """Goes through a graph.

    Attributes:
        pieces: by node, in how many pieces each sample lies; no entry: it has no samples, or they are mixed.
        partial: numbers of a part of a batch, which another part has another one of: its mean, say.
    """

    traced: TracedModel
    pieces: dict[fx.Node, int] = field(default_factory=dict)
    partial: set[fx.Node] = field(default_factory=set)

    def of(self, layer_groups: tuple[OperatorGroup, ...]) -> tuple[Dependence, ...]:
        numbers = loss_reduction.Numbers(self.traced, [loss_reduction.Executed() for _ in range(3)])
        answers = dict.fromkeys((group.main for group in layer_groups), "")
        of_inputs = loss_reduction.of_inputs_alone(self.traced)
        for node in self.traced.module.graph.nodes:
            if node.op == "output":
                break
            if numbers.is_one(node):
                answer = MIXES_SAMPLES if is_unit(node) else numbers.judged(node, False)  # of it nothing is known
                if not answer and node not in of_inputs:
                    self.partial.add(node)
            else:
                pieces = 1 if node.op != "call_function" else self._pieces(node)
                answer = MIXES_SAMPLES if pieces is None else INTERLEAVES_SAMPLES if pieces > 1 else ""
                self.pieces[node] = pieces or 1
            if node in answers:
                answers[node] = answer
        in_loss = loss_reduction.reaching(self.traced.module.graph)
        joining = {node for node in answers if MIXES_SAMPLES in (answers[node], *kind_of(node)[1])}
        return tuple(
            Dependence(mark, numbers.reductions.get(node, ""), node in joining and node in in_loss)
            for node, mark in answers.items()
        )

    def _dim(self, node: fx.Node) -> int | None:
        """The dim of a value that its samples are along."""
        return next(iter(self.traced.sample_dims(node.meta.get("val"))), None)

    def _pieces(self, node: fx.Node) -> int | None:
        """In how many pieces each sample lies in what ``node`` makes; None: the samples are mixed."""
        read = [each for each in dict.fromkeys(node.all_input_nodes) if self._dim(each) is not None]
        if not all(is_comparable(each, self.traced) for each in (node, *read)):
            return None
        if not self.partial.isdisjoint(node.all_input_nodes):
            return None
        of_inputs = {self.pieces.get(each, 1) for each in read}
        if not read:  # of sizes and parameters alone; the places of samples are none of a sample
            return None if operation(node) == "arange" and self._dim(node) is not None else 1
        if not isinstance(node.target, OpOverload):
            return of_inputs.pop() if node.target.__class__.__name__ == "builtin_function_or_method" else None
        row = operator_row(node.target)
        if row.elements in (REGROUPED, EXPANDED):
            return self._reshaped(node, read[0])
        if len(of_inputs) > 1:
            return None
        (pieces,) = of_inputs
        if row.elements == PERMUTED or self._is_whole(node, read[0]):
            return pieces
        match row.samples:
            case "like":
                return pieces
            case "letters":
                return pieces if self._is_kept_by_einsum(node) else None
            case "each":
                is_first = all(self._dim(each) == 0 for each in (node, *read))
                return pieces if pieces == 1 and is_first else None
            case "product":
                return pieces if self._is_kept_by_product(node) else None
            case "places":
                return pieces if self._is_read_by_place(node) else None
            case "last two":
                return pieces if cast("int", self._dim(read[0])) < read[0].meta["val"].ndim - 2 else None
        kind, details = kind_of(node)
        if MIXES_SAMPLES in details or self._acts_along_samples(node, read):
            return None
        is_loss = row.terms and self._dim(node) is not None
        if kind == ELEMENTWISE and any(
            each.op != "get_attr" and not isinstance(each.meta.get("val"), Tensor) for each in node.all_input_nodes
        ):
            return None  # of sizes, which may be the number of samples
        if kind != OPAQUE or is_loss:
            return pieces if kind != ELEMENTWISE or self._agree(node, read) else None
        return pieces if row.samples == "dim" else None

    def _reshaped(self, node: fx.Node, source: fx.Node) -> int | None:
        """What a view makes of the pieces: rows before the samples that it merges with them are pieces."""
        dim = self._dim(node)
        if dim is None:
            return None
        if operator_row(node.target).elements == EXPANDED:
            return self.pieces.get(source, 1)
        before = _extent(source.meta["val"].shape[: self._dim(source)])
        after = _extent(node.meta["val"].shape[:dim])
        if before is None or after is None:
            return None
        before *= self.pieces.get(source, 1)
        return before // after if before >= after and before % after == 0 else None

    def _is_kept_by_product(self, node: fx.Node) -> bool:
        """Whether no dim of samples is summed over, and those of both factors are one dim of the result."""
        names = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), Tensor)][-2:]
        if len(names) < 2:
            return False
        rank = node.meta["val"].ndim
        places = []
        for factor, summed in zip(names, (-1, -2), strict=True):
            dim = self._dim(factor)
            own = factor.meta["val"].ndim
            if dim is not None:
                if own == 1 or dim == own + summed:
                    return False
                places.append(rank - own + dim)
        return len(set(places)) == 1

    def _is_whole(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether it is a slice of all there is along the samples, as ``x[:, 0]`` begins with."""
        dim = self._dim(source)
        if operation(node) != "slice" or dim is None:
            return False
        own = node.meta["val"]
        other = source.meta["val"]
        return bool(arguments_of(node)["dim"] % other.ndim == dim and self._dim(node) == dim) and str(
            own.shape[dim]
        ) == str(other.shape[dim])

    def _is_kept_by_einsum(self, node: fx.Node) -> bool:
        """Whether the samples of all factors have one letter, which the result keeps."""
        arguments = arguments_of(node)
        sides = str(arguments["equation"]).replace(" ", "").split("->")
        if len(sides) != 2 or "." in sides[0]:
            return False
        letters = set()
        for word, factor in zip(sides[0].split(","), arguments["tensors"], strict=True):
            dim = self._dim(factor)
            letters |= {word[dim]} if dim is not None else set()
        return len(letters) == 1 and letters <= set(sides[1])

    def _is_read_by_place(self, node: fx.Node) -> bool:
        """Whether samples name places in a table without them, or are read at places that all share."""
        arguments = arguments_of(node)
        table = arguments["self"]
        indices = arguments.get("indices", [arguments.get("index")])
        dim = self._dim(table)
        if dim is None:
            return True
        named = [each for each in indices if isinstance(each, fx.Node)]
        if operation(node) != "index":
            return arguments["dim"] % table.meta["val"].ndim != dim and all(
                self._dim(each) in (None, dim) for each in named
            )
        at = indices[dim] if dim < len(indices) else None
        return at is None and all(self._dim(each) is None for each in named) and dim == 0

    def _acts_along_samples(self, node: fx.Node, read: list[fx.Node]) -> bool:
        arguments = arguments_of(node)
        own = {cast("int", self._dim(each)) for each in read}
        rank = max(each.meta["val"].ndim for each in read)
        for name in _DIMS:
            value: Any = arguments.get(name)
            dims = value if isinstance(value, (tuple, list)) else (value,)
            if not dims:  # all of them, as in ``y.roll(1)``
                return True
            if any(isinstance(dim, int) and dim % rank in own for dim in dims):
                return True
        return False

    def _agree(self, node: fx.Node, read: list[fx.Node]) -> bool:
        """Whether the samples of all inputs end in the dim of the samples of the result."""
        outputs = [value for value in tensors_in(node.meta["val"]) if self.traced.sample_dims(value)]
        if not outputs:
            return False
        (wanted,) = self.traced.sample_dims(outputs[0])
        rank = outputs[0].ndim
        return all(rank - each.meta["val"].ndim + cast("int", self._dim(each)) == wanted for each in read)


def _extent(sizes: Any) -> int | None:
    """Of several dims together; None where they vary."""
    return prod(sizes) if all(isinstance(size, int) for size in sizes) else None
