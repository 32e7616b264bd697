"""The shapes of all values for a micro-batch whose inputs have other shapes than those of the capture.

The captured graph is run node by node on tensors without data, so that messages have known shapes and need no headers.

Where samples lie in what the nodes of a captured graph make, nodes inside a layer included.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from cuda_ops._torch import FakeTensorMode
from cuda_ops.dense.recurrent import RECURRENT_SHAPES, autocast
from cuda_ops.device.placing import on_device
from planner.ir.errors import HalopipeError, UnsupportedModelError
from planner.ir.graph import INTERLEAVES_SAMPLES, SAMPLE, Graph, Layer, TensorSpec, value_name
from runtime.captured import CapturedModule, attribute
from runtime.pipeline.microbatches import POINTS, InputSpecs
from runtime.stage.cut import NUM_SAMPLES
from runtime.stage.index_ranges import index_ranges


def graph_at(model: CapturedModule, input_shapes: Mapping[str, tuple[int, ...]]) -> Graph:
    """The graph for one micro-batch; its ``samples`` are the rows of that.

    Takes about 1 ms a node where a size varies; callers keep the result.  No tensor of ``model`` is read or written.

    Args:
        model: the capture, or :func:`without_data` of it.
        input_shapes: of every graph input.

    Raises:
        UnsupportedModelError: a dim differs from the capture's that may not, or the model cannot run with these shapes.
    """
    sizes = _sizes(model, input_shapes)
    graph = model.graph
    rows = sizes.rows
    at_rows = {name: spec.at(rows, graph.samples) for name, spec in graph.inputs.items()}
    if all(tuple(input_shapes[name]) == spec.shape for name, spec in at_rows.items()):
        layers = (replace(each, outputs=_at(each.outputs, rows, graph.samples)) for each in graph.layers)
        return replace(graph, samples=rows, inputs=at_rows, layers=tuple(layers))
    tensors = _run(model, sizes, input_shapes)
    inputs = {name: replace(spec, shape=tuple(input_shapes[name])) for name, spec in graph.inputs.items()}
    layers = (_reshaped(model, layer, tensors, rows) for layer in graph.layers)
    return replace(graph, samples=rows, inputs=inputs, layers=tuple(layers))


def graph_of_sizes(model: CapturedModule, sizes: Mapping[str, int]) -> Graph:
    """The graph for as many samples as the capture's, with other extents of dims that vary.

    Args:
        sizes: by name (``height``); others are as in the capture.
    """
    shapes = {
        name: tuple(
            sizes.get(word, extent) if word in model.sizes else extent
            for word, extent in zip(spec.dims, spec.shape, strict=True)
        )
        for name, spec in model.graph.inputs.items()
    }
    return graph_at(model, shapes)


def without_data(model: CapturedModule) -> CapturedModule:
    """``model`` with empty parameters and buffers: all that :func:`graph_at` needs, and keeps no tensor alive."""
    graph = on_device(model.graph_module, torch.device("cpu")).graph  # where shapes are found
    attributes = {}
    for node in graph.nodes:
        node.meta.clear()
        if node.op == "get_attr":
            value = attribute(model.graph_module, str(node.target))
            attributes[str(node.target)] = torch.empty_like(value, device="meta") if _is_tensor(value) else value
    return replace(model, graph_module=fx.GraphModule(attributes, graph))


def step_inputs(model: CapturedModule) -> InputSpecs:
    """What a step is given, samples first: the tensors of a user's clouds, or the graph's inputs.

    The dims that may differ from the capture's, samples apart, are those named as a size.
    """
    specs, varying = (model.graph.inputs, model.sizes) if model.preparation is None else (model.raw, {POINTS: ()})
    free = ((name, dim) for name, spec in specs.items() for dim, word in enumerate(spec.dims) if word in varying)
    return InputSpecs(specs, model.graph.samples, frozenset(free), index_ranges(model))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Of one micro-batch: its rows, and by name what varies beside them."""

    rows: int
    others: Mapping[str, int]


def _sizes(model: CapturedModule, shapes: Mapping[str, tuple[int, ...]]) -> _Sizes:
    graph = model.graph
    is_free = any(node.target == NUM_SAMPLES for node in model.graph_module.graph.nodes)
    sizes: dict[str, tuple[int, str]] = {}
    for name, spec in graph.inputs.items():
        shape = tuple(shapes[name]) if name in shapes else ()
        if len(shape) != len(spec.shape):
            raise UnsupportedModelError(f"{name} has shape {shape}, the model was captured with {spec.shape}")
        for dim, (extent, captured) in enumerate(zip(shape, spec.shape, strict=True)):
            word = spec.dims[dim]
            if (word == SAMPLE and is_free) or word in model.sizes:
                each = captured // graph.samples if word == SAMPLE else 1
                place = f"dim {dim} of {name}"
                size, first = sizes.setdefault(word, (extent // each, place))
                if size * each != extent:
                    raise UnsupportedModelError(
                        f"{word} differs within a micro-batch", [f"{first} says {size}, {place} is {extent}"]
                    )
            elif extent != captured:
                raise _fixed(name, dim, word, extent, captured, model.fixed)
    rows = sizes.pop(SAMPLE, (graph.samples, ""))[0]
    return _Sizes(rows, {word: size for word, (size, _) in sizes.items()})


def _fixed(name: str, dim: int, word: str, extent: int, captured: int, line: str) -> UnsupportedModelError:
    details = []
    if word == SAMPLE:
        details = [f"the number of samples is fixed {line}"] if line else []
        remedies = [f"micro-batches of {captured}, or a model whose code does not fix the number of samples"]
    else:
        remedies = [f"batches of {captured} there", "let the factory say that it varies, see profiler.source.source"]
    return UnsupportedModelError(
        f"dim {dim} of {name} ({word}) is {extent}, the model was captured for {captured} only", details, remedies
    )


def _run(model: CapturedModule, sizes: _Sizes, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[Tensor, ...]]:
    """By name of a node what it makes, without data; what picks one of several outputs stands for all of them."""
    numbers: dict[str, int] = {NUM_SAMPLES: sizes.rows, **sizes.others}
    values: dict[fx.Node, Any] = {}
    with FakeTensorMode(), torch.no_grad(), autocast("cpu", model.autocast):
        for node in model.graph_module.graph.nodes:
            if node.op == "placeholder" and node.target in numbers:
                values[node] = numbers[node.target]
            elif node.op == "placeholder":
                dtype = getattr(torch, model.graph.inputs[node.target].dtype)
                values[node] = torch.empty(tuple(shapes[node.target]), dtype=dtype)
            elif node.op == "get_attr":
                value = attribute(model.graph_module, str(node.target))
                values[node] = torch.empty(value.shape, dtype=value.dtype) if _is_tensor(value) else value
            elif node.op == "call_function":
                values[node] = _call(model, node, values, shapes)
    whole = {n: values[n.all_input_nodes[0]] if _is_part(n, values) else value for n, value in values.items()}
    return {node.name: _tensors(value) for node, value in whole.items()}


def _call(
    model: CapturedModule, node: fx.Node, values: Mapping[fx.Node, Any], shapes: Mapping[str, tuple[int, ...]]
) -> Any:
    function: Any = RECURRENT_SHAPES.get(node.target) or node.target
    try:
        return function(*fx.map_arg(node.args, values.__getitem__), **fx.map_arg(node.kwargs, values.__getitem__))
    except HalopipeError:
        raise
    except Exception as error:
        inputs = [
            f"{name} is {tuple(shapes[name])}, captured with {spec.shape}" for name, spec in model.graph.inputs.items()
        ]
        raise UnsupportedModelError(
            f"layer {model.layer_of_node.get(node.name, node.name)} cannot run with these shapes",
            [*str(error).splitlines()[:1], *inputs],
            ["batches of shapes that the model itself takes"],
        ) from error


def _is_part(node: fx.Node, values: Mapping[fx.Node, Any]) -> bool:
    return node.target is operator.getitem and not _is_tensor(values[node.all_input_nodes[0]])


def _tensors(value: Any) -> tuple[Tensor, ...]:
    if _is_tensor(value):
        return (value,)
    return tuple(item for item in value if _is_tensor(item)) if isinstance(value, (tuple, list)) else ()


def _reshaped(model: CapturedModule, layer: Layer, tensors: Mapping[str, tuple[Tensor, ...]], rows: int) -> Layer:
    """``layer`` with the shapes that ``tensors`` have by node; dtypes are the capture's, which were found with data."""
    outputs = _at(layer.outputs, rows, model.graph.samples)
    names = (value_name(layer.name, index) for index in range(len(outputs)))
    made = next((tensors[model.node_of_value[name]] for name in names if name in model.node_of_value), None)
    if made is None:
        return replace(layer, outputs=outputs)  # nobody reads them
    specs = (replace(spec, shape=tuple(tensor.shape)) for spec, tensor in zip(outputs, made, strict=True))
    return replace(layer, outputs=tuple(specs))


def _at(specs: tuple[TensorSpec, ...], rows: int, captured: int) -> tuple[TensorSpec, ...]:
    return tuple(spec.at(rows, captured) for spec in specs)


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


class SampleDims:
    """The dim of each node's result that samples lie along, by the symbols that stand for their number."""

    def __init__(self, model: CapturedModule) -> None:
        self._symbols = _symbols_of_samples(model)
        interleaving = {layer.name for layer in model.graph.layers if layer.attributes.get(INTERLEAVES_SAMPLES)}
        self._interleaved: set[str] = set()
        for node in model.graph_module.graph.nodes:
            mixed = model.layer_of_node.get(node.name) in interleaving
            mixed = mixed or any(each.name in self._interleaved for each in node.all_input_nodes)
            if mixed and any(factor != 1 for _, factor in self._dims(node)):
                self._interleaved.add(node.name)

    def of(self, node: fx.Node, layer: str, num_ranks: int) -> int | None:
        """The dim; None if the result is the same for all samples, or no share of them is an interval of it.

        Raises:
            UnsupportedModelError: the latter, and several ranks have the samples.
        """
        dims = self._dims(node)
        reason = ""
        if not self._symbols:
            reason = "the model was captured for one number of samples"
        elif len(dims) > 1 or any(factor is None for _, factor in dims) or node.name in self._interleaved:
            reason = "a share of the samples is no interval of what it draws"
        if reason and num_ranks > 1:
            raise cannot_share(layer, reason)
        return dims[0][0] if dims and not reason else None

    def _dims(self, node: fx.Node) -> list[tuple[int, Any]]:
        """Dims that depend on the number of samples, and the factor that each is of it; None: it is no multiple."""
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):  # a recurrent layer: its output comes first
            value = next((each for each in value if isinstance(each, Tensor)), None)
        if not isinstance(value, Tensor):
            return []
        sizes: Sequence[int | torch.SymInt] = value.shape
        return [
            (dim, _factor(size.node.expr, self._symbols))
            for dim, size in enumerate(sizes)
            if isinstance(size, torch.SymInt) and self._symbols & size.node.expr.free_symbols
        ]


def _factor(expression: Any, symbols: frozenset[Any]) -> Any:
    samples = next(iter(symbols))
    expression = expression.xreplace(dict.fromkeys(symbols, samples))
    factor = expression.coeff(samples)
    return factor if factor != 0 and (expression - factor * samples).expand() == 0 else None


def _symbols_of_samples(model: CapturedModule) -> frozenset[Any]:
    """Every input may have a symbol of its own."""
    nodes = {node.target: node for node in model.graph_module.graph.nodes if node.op == "placeholder"}
    sizes = [
        nodes[name].meta["val"].shape[spec.dims.index(SAMPLE)]
        for name, spec in model.graph.inputs.items()
        if SAMPLE in spec.dims
    ]
    return frozenset(
        symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols
    )


def cannot_share(layer: str, reason: str) -> UnsupportedModelError:
    """The error of a layer that several ranks cannot draw for."""
    return UnsupportedModelError(
        f"layer {layer} draws random numbers, and cannot on several ranks as on one",
        [reason],
        ["put the layer on a stage of one rank", "train without it (a dropout of 0)"],
    )
