"""Which layers of a captured graph keep samples apart: what lets a batch be cut.

The graph is run on two samples together and on each of them alone, and every
layer's values are compared.  How values without a sample dim are made of those of the parts is told in
:mod:`profiler.capture.loss_reduction`; what is made of them must be linear.  Batch norms are
run as in evaluation, since their statistics are combined over ranks; dropout is switched off.

A third case lies between: [time, sample, ...] flattened to [time x sample, ...] keeps samples apart, but not each in
one piece.  Such a value may be computed from any share of the samples, but a share of it is no interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from cuda_ops.calls import changed_call
from cuda_ops.dense.data_dependent import is_unit
from cuda_ops.dense.evaluation import draws_in_any_mode, evaluated
from cuda_ops.dense.state_writes import BATCH_NORM
from cuda_ops.dense.user_functions import LINEAR_BACKWARD, is_user_function
from cuda_ops.dense.value_checks import is_value_check
from cuda_ops.operator_table import operator_row
from cuda_ops.preparation import SeparatePreparation
from planner.ir.graph import INTERLEAVES_SAMPLES, MIXES_SAMPLES
from profiler.capture import loss_reduction
from profiler.capture.functional import INDEX
from profiler.capture.kinds import OPAQUE, kind_of
from profiler.capture.layers import OperatorGroup, is_output_of
from profiler.capture.operators import function_called, name_read, tensors_in
from profiler.capture.trace import TracedModel
from profiler.capture.verify_capture import module_loss
from profiler.source.model import LoadedModel, example_of, fed_example, is_alike
from runtime.captured import attribute

_PAIR = 2
_BY_SUM = 2
"""torch's number of ``reduction="sum"``."""


@dataclass(frozen=True, slots=True)
class Dependence:
    """Of a layer on the samples.

    Attributes:
        mark: ``mixes_samples``, ``interleaves_samples`` or nothing.
        reduction: how the parts of a batch make up the layer's result, see :mod:`profiler.capture.loss_reduction`;
            empty where it has a part for each sample, or where parts are just means.
        needs_whole_batch: whether the loss of a batch does not follow from those of its parts.
    """

    mark: str = ""
    reduction: str = ""
    needs_whole_batch: bool = False


@torch.no_grad()
def dependence(
    traced: TracedModel, layer_groups: tuple[OperatorGroup, ...], model: LoadedModel
) -> tuple[Dependence, ...]:
    """Of each layer.

    If the number of samples is fixed, nothing is known, and all layers are said to mix them.  Of the loss the module
    itself is asked, unless it refuses other numbers of samples as well.
    """
    if not traced.is_polymorphic:
        *others, loss = (Dependence(MIXES_SAMPLES),) * len(layer_groups)
        return (*others, replace(loss, needs_whole_batch=not _is_mean_of_examples(model)))
    with model.precision():
        if model.clouds is not None:
            if not isinstance(model.clouds.preparation, SeparatePreparation):
                return _dependence_of_rows(traced, layer_groups, model)
            return _dependence(traced, layer_groups, _pieces(traced, model, model.clouds.preparation))
        return _dependence(traced, layer_groups, _samples(traced, model))


def _is_mean_of_examples(model: LoadedModel) -> bool:
    """Whether the module's own loss of two examples is the mean of those of each, as far as it has one of two."""
    if model.clouds is not None:
        return True
    tensors = (*model.inputs, *model.targets)
    is_cut = [tensor.ndim > 0 and len(tensor) == model.samples for tensor in tensors]
    other = [_altered(tensor) if cut else tensor for tensor, cut in zip(tensors, is_cut, strict=True)]
    both = [torch.cat(pair) if cut else pair[0] for *pair, cut in zip(tensors, other, is_cut, strict=True)]
    try:
        losses = [module_loss(model, part, calm=True) for part in (both, tensors, other)]
    except Exception:  # noqa: BLE001 - the user's module may refuse another number of samples in any way
        return True
    return is_alike(losses[0], (losses[1] + losses[2]) / _PAIR)


def _altered(tensor: Tensor) -> Tensor:
    """Other samples: in another order, and other numbers."""
    return tensor.flip(0) * 0.75 if tensor.is_floating_point() else tensor.flip(0)


def _dependence_of_rows(
    traced: TracedModel, layer_groups: tuple[OperatorGroup, ...], model: LoadedModel
) -> tuple[Dependence, ...]:
    """Of a sparse network, whose sites are no equal number of rows a sample: known kinds keep samples apart.

    Of others those do whose first rows follow from the first rows that they read, sites or samples.
    """
    run = _GraphRun(traced, model.samples, example_of(traced.inputs, model, model.samples))
    run.keep()
    for node in traced.module.graph.nodes:
        if node.op != "output":
            run.execute(node)
    marks = [
        MIXES_SAMPLES if kind_of(group.main)[0] == OPAQUE and not _keeps_rows(group.main, run) else ""
        for group in layer_groups
    ]
    *others, loss = map(Dependence, marks)
    return (*others, replace(loss, needs_whole_batch=not _is_mean_over_clouds(traced, model)))


def _is_mean_over_clouds(traced: TracedModel, model: LoadedModel) -> bool:
    """Whether the loss of two clouds is the mean of those of each."""
    *alone, together = (_loss_of_clouds(traced, model, first, count) for first, count in ((0, 1), (1, 1), (0, _PAIR)))
    return is_alike(together, (alone[0] + alone[1]) / _PAIR)


def _loss_of_clouds(traced: TracedModel, model: LoadedModel, first: int, count: int) -> Tensor:
    fed = fed_example(model, _PAIR)
    num_inputs = len(model.fed[0])
    part = [tensor[first : first + count] if tensor.ndim and len(tensor) == _PAIR else tensor for tensor in fed]
    inputs, targets = model.prepared(tuple(part[:num_inputs]), tuple(part[num_inputs:]))
    run = _GraphRun(traced, count, dict(zip(traced.inputs, (*inputs, *targets), strict=True)))
    for node in traced.module.graph.nodes:
        if node.op == "output":
            (loss,) = tensors_in(fx.map_arg(node.args[0], run.values.__getitem__))
            return loss
        run.execute(node)
    raise ValueError("a graph without an output")


def _keeps_rows(node: fx.Node, run: _GraphRun) -> bool:
    whole = run.values[node]
    if not isinstance(whole, Tensor) or not whole.ndim or len(whole) < _PAIR or _is_random(node):
        return False
    rows = len(whole)

    def first(argument: fx.Node) -> Any:
        value = run.values[argument]
        per_row = isinstance(value, Tensor) and value.ndim and len(value) == rows and argument.op != "get_attr"
        return value[: rows // 2] if per_row else value

    try:
        part = function_called(node)(*fx.map_arg(node.args, first), **fx.map_arg(node.kwargs, first))
    except RuntimeError:
        return False
    return is_alike(part, whole[: rows // 2])


def _samples(traced: TracedModel, model: LoadedModel) -> list[_GraphRun]:
    """Two samples together, and each alone."""
    rows = dict(zip(traced.inputs, model.fed_rows, strict=True))
    example = example_of(traced.inputs, model, max(_PAIR, model.samples))
    both = _distinct(example_of(traced.inputs, model, _PAIR), example, rows, model)
    runs = [_GraphRun(traced, _PAIR, both)]
    for sample in range(_PAIR):
        alone = {name: _sample(each, rows[name], sample) if rows[name] else each for name, each in both.items()}
        runs.append(_GraphRun(traced, 1, alone))
    return runs


def _sample(tensor: Tensor, rows: int, number: int) -> Tensor:
    """One sample of a tensor of which each has so many rows."""
    return tensor[number * rows : (number + 1) * rows]


def _pieces(traced: TracedModel, model: LoadedModel, preparation: SeparatePreparation) -> list[_GraphRun]:
    """Two samples side by side, and each alone: the rows of one are none of the other's."""
    inputs, targets = model.fed
    pieces = [slice(at, at + 1) for at in range(_PAIR)]
    batches = preparation.side_by_side([[each[piece] for each in (*inputs, *targets)] for piece in pieces])
    runs = []
    for made, rows in zip(batches, (slice(0, _PAIR), *pieces), strict=True):
        tensors = (*made, *(target[rows] for target in targets))
        runs.append(_GraphRun(traced, len(made[0]), dict(zip(traced.inputs, tensors, strict=True))))
    return runs


def _dependence(
    traced: TracedModel, layer_groups: tuple[OperatorGroup, ...], runs: list[_GraphRun]
) -> tuple[Dependence, ...]:
    answers = dict.fromkeys((group.main for group in layer_groups), "")
    numbers = loss_reduction.Numbers(traced, runs)
    unknown: set[fx.Node] = set()
    together: set[fx.Node] = set()  # of the pair alone: there is no value for one sample
    for node in traced.module.graph.nodes:
        if node.op == "output":
            break
        if any(argument in unknown for argument in node.all_input_nodes):
            unknown.add(node)
        own = is_user_function(node) and not any(argument in unknown for argument in node.all_input_nodes)
        mixes = own and _mixes_gradients(node, runs, traced)
        if any(argument in together for argument in node.all_input_nodes) or not _run_all(runs, node):
            together.add(node)
            unknown.add(node)
            if node in answers:
                answers[node] = MIXES_SAMPLES
        if _is_random(node):
            if node not in unknown and not (is_comparable(node, traced) and _gives_parts(node, runs, traced)):
                unknown.add(node)
        elif node in answers and answers[node] != MIXES_SAMPLES and numbers.is_one(node):
            answers[node] = numbers.judged(node, node not in unknown)
        elif node in answers and node not in unknown and is_comparable(node, traced) and not mixes:
            answers[node] = _compare(node, runs, traced)
        elif node in answers and node not in unknown:
            answers[node] = MIXES_SAMPLES
            unknown.add(node)
    in_loss = loss_reduction.reaching(traced.module.graph)
    return tuple(
        Dependence(mark, numbers.reductions.get(node, ""), _joins_the_batch(node, mark) and node in in_loss)
        for node, mark in answers.items()
    )


def _joins_the_batch(node: fx.Node, mark: str) -> bool:
    """Batch norm does not: its statistics are a micro-batch's (decision 0001)."""
    if kind_of(node)[0] == "batch_norm":
        return False
    return mark == MIXES_SAMPLES or MIXES_SAMPLES in kind_of(node)[1]


@torch.enable_grad()
def _mixes_gradients(node: fx.Node, runs: list[_GraphRun], traced: TracedModel) -> bool:
    """Whether the backward of a user's Function does something else to two samples together than to each alone.

    Notes in ``node.meta`` whether it is linear: where it is not, it needs the gradient that one device has.
    """
    tensors, integers, name = cast("tuple[list[fx.Node], Any, str]", node.args)
    function = function_called(node)
    values = [[run.values[each] for each in tensors] for run in runs]
    numbers = [fx.node.map_arg(integers, run.values.__getitem__) for run in runs]

    def gradients(of: int, seeds: list[Tensor]) -> list[Tensor]:
        leaves = [value.detach().clone().requires_grad_(value.is_floating_point()) for value in values[of]]
        outputs = function(leaves, numbers[of], name)
        pairs = [(out, seed) for out, seed in zip(outputs, seeds, strict=True) if out.requires_grad]
        wanted = [each for each in leaves if each.requires_grad]
        if not pairs or not wanted:
            return [torch.zeros_like(each) for each in leaves]
        results, of_results = zip(*pairs, strict=True)
        computed = iter(torch.autograd.grad(results, wanted, of_results, allow_unused=True))
        ordered = [next(computed) if each.requires_grad else None for each in leaves]
        return [torch.zeros_like(each) if g is None else g for each, g in zip(leaves, ordered, strict=True)]

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        outputs = function(values[0], numbers[0], name)

    def seeds() -> list[Tensor]:
        drawn = [torch.randn(out.shape, generator=generator).to(out.device) for out in outputs]
        return [
            each.to(out.dtype) if out.is_floating_point() else each for each, out in zip(drawn, outputs, strict=True)
        ]

    one = seeds()
    other = seeds()
    whole = gradients(0, one)
    both = gradients(0, [a + b for a, b in zip(one, other, strict=True)])
    apart = [a + b for a, b in zip(whole, gradients(0, other), strict=True)]
    node.meta[LINEAR_BACKWARD] = all(map(is_alike, both, apart))
    metas = tensors_in(node.meta["val"])
    if not any(traced.sample_dims(meta) for meta in (*metas, *(each.meta["val"] for each in tensors))):
        return False  # of parameters alone: there are no samples that it could mix
    alone = []
    for sample in range(_PAIR):
        parts = [_part(seed, meta, sample, traced) for seed, meta in zip(one, metas, strict=True)]
        alone.append(gradients(1 + sample, parts))
    for argument, together, *each in zip(tensors, whole, *alone, strict=True):
        dims = traced.sample_dims(argument.meta["val"]) if argument.op != "get_attr" else []
        joined = torch.cat(each, dims[0]) if dims else each[0] + each[1]
        if not is_alike(together, joined):
            return True
    return False


def _part(seed: Tensor, meta: Tensor, sample: int, traced: TracedModel) -> Tensor:
    dims = traced.sample_dims(meta)
    return seed.chunk(_PAIR, dims[0])[sample] if dims else seed


def _run_all(runs: list[_GraphRun], node: fx.Node) -> bool:
    """Executes ``node`` in all of ``runs``; whether it does on one sample, as on the pair."""
    runs[0].execute(node)
    try:
        for run in runs[1:]:
            run.execute(node)
    except (IndexError, RuntimeError, ValueError):  # a class that there is with more samples only
        return False
    return True


class _GraphRun(loss_reduction.Executed):
    """Node by node; buffers are copies."""

    def __init__(self, traced: TracedModel, samples: int, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.traced = traced
        self.graph_inputs = traced.graph_inputs(tensors, samples)
        self.readers = {node: len(node.users) for node in traced.module.graph.nodes}

    def keep(self) -> None:
        """Let go of no value."""
        self.readers = dict.fromkeys(self.readers, -1)

    def execute(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.values[node] = self.graph_inputs[name_read(node)]
        elif node.op == "get_attr":
            value: Any = attribute(self.traced.module, name_read(node))
            is_state = isinstance(value, Tensor) and node.target not in self.traced.parameters
            self.values[node] = value.clone() if is_state else value
        else:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self.values.__getitem__)
            called = evaluated(node) or function_called(node)
            self.values[node] = args[0] if is_value_check(node) else called(*args, **kwargs)  # altered ones may fail
            if loss_reduction.is_over_terms(node):
                args, kwargs = changed_call(node.target, args, kwargs, {"reduction": _BY_SUM})
                self.summed[node] = function_called(node)(*args, **kwargs)
            if operator_row(node.target).fills == "empty":  # whatever was in memory would tell the runs apart
                self.values[node].zero_()
        for argument in node.all_input_nodes:
            self.readers[argument] -= 1
            if not self.readers[argument]:
                del self.values[argument]


def _distinct(
    pair: Mapping[str, Tensor], example: Mapping[str, Tensor], rows: Mapping[str, int], model: LoadedModel
) -> dict[str, Tensor]:
    """The pair of samples, but with numbers that tell them apart where these are alike, as two labels may be.

    Integers that are all zero become ones where the module takes those: they may number the only class.
    """
    result = dict(pair)
    for name, tensor in pair.items():
        if not rows[name]:
            continue
        first, second = tensor.split(rows[name])  # type: ignore[no-untyped-call]  # torch does not type it
        if not torch.equal(first, second):
            continue
        other = _unlike(first, example[name].split(rows[name]))  # type: ignore[no-untyped-call]  # as above
        result[name] = torch.cat((first, other))
        if torch.equal(first, other):
            tried = {**result, name: torch.cat((first, torch.ones_like(other)))}
            result = tried if _runs(model, tried) else result
    return result


def _runs(model: LoadedModel, tensors: Mapping[str, Tensor]) -> bool:
    try:
        module_loss(model, tensors.values(), calm=True)
    except Exception:  # noqa: BLE001 - the user's module may refuse numbers in any way
        return False
    return True


def _unlike(sample: Tensor, samples: Sequence[Tensor]) -> Tensor:
    """Other numbers; of integers those of another sample, or ones that are no larger: they may number classes."""
    if sample.is_floating_point() or sample.is_complex():
        return sample * 0.75 if bool(sample.any()) else torch.full_like(sample, 0.25)
    others = (each for each in (*samples, sample.flip(tuple(range(sample.ndim)))) if not torch.equal(each, sample))
    other: Tensor | None = next(others, None)
    if other is not None:
        return other
    if sample.dtype == torch.bool:
        return sample.logical_not()
    return torch.where(sample > 0, sample - 1, sample)


def _is_random(node: fx.Node) -> bool:
    if node.target is BATCH_NORM:
        return node.args[3] is None  # its values do depend on the others, by its statistics
    return draws_in_any_mode(node)


def is_comparable(node: fx.Node, traced: TracedModel) -> bool:
    """Whether every output has one sample dim at most, a multiple of the number of samples."""
    for value in tensors_in(node.meta["val"]):
        dims = traced.sample_dims(value)
        if len(dims) > 1 or any(traced.symbols.per_sample(value.shape[dim]) is None for dim in dims):
            return False
    return True


def _gives_parts(node: fx.Node, runs: list[_GraphRun], traced: TracedModel) -> bool:
    """Each sample goes on with its part of what was drawn for the pair, where that has a row a sample."""
    parts: list[list[Tensor]] = [[], []]
    for meta, together in zip(tensors_in(node.meta["val"]), tensors_in(runs[0].values.get(node)), strict=False):
        dims = traced.sample_dims(meta)
        if dims and traced.symbols.per_sample(meta.shape[dims[0]]) != 1:
            return False
        halves = (together, together)
        if dims:
            halves = together.split(1, dims[0])  # type: ignore[no-untyped-call]  # torch does not type it
        for part, half in zip(parts, halves, strict=True):
            part.append(half)
    _hand_on(node, runs, parts)
    return True


def _compare(node: fx.Node, runs: list[_GraphRun], traced: TracedModel) -> str:
    """How the pair's values relate to its samples'; these then go on from the pair's, so that no error adds up."""
    answer = ""
    parts: list[list[Tensor]] = [[], []]
    outputs = [tensors_in(run.values.get(node)) for run in runs]
    unread = _unread(node)
    for place, (meta, together, *alone) in enumerate(zip(tensors_in(node.meta["val"]), *outputs, strict=True)):
        dims = traced.sample_dims(meta)
        sites = traced.site_dims(meta)
        if place in unread:
            mark = ""
            halves = [together, together]
        elif dims and sites:
            mark = MIXES_SAMPLES
            halves = [together, together]
        elif sites:
            mark, halves = _with_rows(node, together, alone, sites)
        elif not dims and is_unit(node):  # of a selection, which other samples may have more or fewer of
            mark = MIXES_SAMPLES
            halves = [together, together]
        elif not dims:
            mark, halves = _without_samples(together, alone)
        else:
            mark, halves = _with_samples(together, alone, dims[0])
        answer = MIXES_SAMPLES if MIXES_SAMPLES in (answer, mark) else answer or mark
        for part, half in zip(parts, halves, strict=True):
            part.append(half)
    _hand_on(node, runs, parts)
    return answer


def _unread(node: fx.Node) -> frozenset[int]:
    """The places of outputs that no node reads, such as the offsets that ``embedding_bag`` keeps for its backward."""
    values = node.meta["val"]
    if isinstance(values, Tensor) or not all(is_output_of(user) for user in node.users):
        return frozenset()
    read = {user.args[1] for user in node.users if user.users}
    tensors = tensors_in(values)
    return frozenset(range(len(tensors))) - read if len(tensors) == len(values) else frozenset()


def _hand_on(node: fx.Node, runs: list[_GraphRun], parts: list[list[Tensor]]) -> None:
    """Lets each sample go on with its part of what ``node`` made of the pair."""
    for run, part in zip(runs[1:], parts, strict=True):
        if node in run.values and part:
            run.values[node] = part[0] if isinstance(run.values[node], Tensor) else part


def _without_samples(together: Tensor, alone: list[Tensor]) -> tuple[str, list[Tensor]]:
    """The pair's value must be the mean of its samples'; then these go on with their own."""
    mean = (alone[0] + alone[1]) / _PAIR if together.is_floating_point() else alone[0]
    return ("", alone) if is_alike(together, mean) else (MIXES_SAMPLES, [together, together])


def _with_rows(node: fx.Node, together: Tensor, alone: list[Tensor], dims: list[int]) -> tuple[str, list[Tensor]]:
    """The same of rows of nodes or edges, of which each piece has its own number; indices count from their piece."""
    dim = dims[0]
    rows = [value.shape[dims[0]] for value in alone]
    if len(dims) > 1 or sum(rows) != together.shape[dim]:
        return MIXES_SAMPLES, [together, together]
    halves = [half.contiguous() for half in together.split(rows, dim)]  # type: ignore[no-untyped-call]  # of torch
    if all(is_alike(half, value) for half, value in zip(halves, alone, strict=True)):
        return _normalises_rows(node), halves
    if not together.is_floating_point():
        return "" if INDEX in node.meta else MIXES_SAMPLES, alone
    return MIXES_SAMPLES, halves


def _normalises_rows(node: fx.Node) -> str:
    """Nodes that two pieces have in common count once on one device: statistics over them are not those of parts."""
    kind, attributes = kind_of(node)
    return MIXES_SAMPLES if kind == "batch_norm" and attributes.get("training") else ""


def _with_samples(together: Tensor, alone: list[Tensor], dim: int) -> tuple[str, list[Tensor]]:
    """The samples' parts of the pair's value: halves, or every other of several pieces."""
    rows = together.shape[dim] // _PAIR
    for pieces in (number for number in range(1, rows + 1) if rows % number == 0):
        shape = (pieces, _PAIR, rows // pieces)
        apart: Tensor = together.unflatten(dim, shape)  # type: ignore[no-untyped-call]  # torch does not type it
        halves = [apart.select(dim + 1, sample).flatten(dim, dim + 1).contiguous() for sample in range(_PAIR)]
        if all(is_alike(half, value) for half, value in zip(halves, alone, strict=True)):
            return (INTERLEAVES_SAMPLES if pieces > 1 else ""), halves
    return MIXES_SAMPLES, [half.contiguous() for half in together.chunk(_PAIR, dim)]
