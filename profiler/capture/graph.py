"""A model as the planner's graph and as an executable one, node by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from cuda_ops.calls import arguments_of
from cuda_ops.device.placing import move, on_device, tensors_of
from cuda_ops.preparation import SeparatePreparation
from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import (
    MIXES_SAMPLES,
    SAMPLE,
    Attribute,
    Graph,
    Layer,
    TensorSpec,
    value_name,
)
from planner.layers import MAPPED
from profiler.capture.kept_checks import CheckFindings, keep, kept, key_of
from profiler.capture.kinds import ELEMENTWISE, LOSS, NO_RULES, OPAQUE, Rules, kind_of
from profiler.capture.layers import (
    OperatorGroup,
    groups,
    is_output_of,
    output_names,
    specify,
    specify_input,
    tensor_arguments,
)
from profiler.capture.marks import marked
from profiler.capture.operators import layer_names, name_read, tensors_in
from profiler.capture.sample_independence import Dependence, dependence
from profiler.capture.trace import TracedModel, trace, traces
from profiler.capture.user_module import untouched
from profiler.capture.user_state import UserState
from profiler.capture.verify_capture import (
    correct_dtypes,
    evaluation_fault,
    require_same_loss,
)
from profiler.source.losses import own_loss
from profiler.source.model import LoadedModel, as_captured
from profiler.source.module_kinds import require_plain_modules, require_values
from runtime.captured import CapturedModule, LossCall, attribute

_NUM_DATA_INPUTS = {OPAQUE: 0, ELEMENTWISE: 0, "attention": 3}
"""Leading arguments that the kind's access relation takes for activations, where it is not one."""


def capture(model: LoadedModel, rules: Rules = NO_RULES) -> CapturedModule:
    """Captures ``model`` in the modes that its parts are in and checks the result on its example.

    The module is left as it was: modes, buffers, gradients and attributes of its parts, and the random state.

    An example of one sample is repeated to two.

    Args:
        rules: what the user knows of operators that halopipe does not know, beside ``model.elementwise``.

    Raises:
        UnsupportedModelError: ``torch.export`` refuses the model, the captured graph computes something else, a size
            that was said to vary cannot, or an operator that was said to be elementwise is not.
    """
    require_plain_modules(model.owners)
    require_values(model)
    state = UserState(model.stateful)
    with untouched(*model.stateful, state=state):
        return _captured(model, replace(rules, elementwise=rules.elementwise | model.elementwise), state)


Judge = Callable[[TracedModel, "tuple[OperatorGroup, ...]", LoadedModel], "tuple[Dependence, ...]"]
"""Which layers depend on other samples."""


def capture_for(
    model: LoadedModel, device: torch.device, rules: Rules = NO_RULES, *, whole: bool = True
) -> tuple[LoadedModel, CapturedModule]:
    """The model, which knows then how many rows a sample has in each tensor, and its graph, to be run on ``device``.

    It is captured on the processor, so that its graph is the same wherever it is measured or trained; under autocast
    alone where it runs, since which operators cast differs from device to device, and dtypes are in the graph.

    Args:
        model: as it was loaded, on the processor.
        rules: as of :func:`capture`.
        whole: move it there; else (but for autocast) all stays on the processor, for the runtime to move what a rank
            needs.

    Raises:
        UnsupportedModelError: the model cannot be captured.
    """
    if device.type != "cpu" and model.autocast is not None:
        model = placed(model, device)
    captured = capture(model, rules)
    model = as_captured(model, captured.graph.inputs, captured.graph.samples)
    if device.type == "cpu" or model.autocast is not None or not whole:
        return model, captured
    captured = replace(captured, graph_module=on_device(captured.graph_module, device))
    move(tensors_of(captured.graph_module), device)  # constants, too, which the module may not list
    return placed(model, device), captured


def placed(model: LoadedModel, device: torch.device) -> LoadedModel:
    """The model with its parameters, buffers and example on ``device``; clouds are prepared on the processor."""
    for module in model.owners.values():
        move((*module.parameters(), *module.buffers()), device)
    inputs, targets = (tuple(tensor.to(device) for tensor in each) for each in (model.inputs, model.targets))
    return replace(model, inputs=inputs, targets=targets)


def capture_unchecked(model: LoadedModel, rules: Rules, judge: Judge) -> CapturedModule:
    """Captures a model whose tensors have no values: nothing is compared, and ``judge`` says what samples depend on."""
    require_plain_modules(model.owners)
    rules = replace(rules, elementwise=rules.elementwise | model.elementwise)
    traced = trace(model)
    model = replace(model, rows=traced.rows)
    if model.autocast is not None:
        correct_dtypes(traced, model)
    layer_groups = groups(traced, rules)
    return _of_traced(model, traced, rules, layer_groups, judge(traced, layer_groups, model), "")


def _captured(model: LoadedModel, rules: Rules, state: UserState) -> CapturedModule:
    """As :func:`capture`, of a model that is in ``state``."""
    traced, idle, key, state = _verified(model, rules, state)
    model = replace(model, rows=traced.rows)
    findings = kept(key)
    traced = replace(traced, parameters={n: p for n, p in traced.parameters.items() if n not in idle})
    evaluation = evaluation_fault(traced, model, state) if findings is None else findings.evaluation
    if model.autocast is not None:
        correct_dtypes(traced, model)
    layer_groups = groups(traced, rules)
    dependences = dependence(traced, layer_groups, model) if findings is None else findings.layers
    captured = _of_traced(model, traced, rules, layer_groups, dependences, evaluation)
    if findings is None:
        keep(key, CheckFindings(tuple(sorted(idle)), evaluation, dependences))
    return captured


def _verified(model: LoadedModel, rules: Rules, state: UserState) -> tuple[TracedModel, Set[str], str, UserState]:
    """The first trace that computes what the module does, its parameters without gradient, and the findings' name.

    Last comes the state that the module is in then: what it keeps is looked for once more behind a trace, as the user's
    code may have made things meanwhile that nobody puts back.
    """
    candidates = traces(model)
    failure = None
    while True:
        with untouched(*model.stateful, state=state):  # attributes may hold tensors of the trace, without values
            traced = next(candidates, None)
        if traced is None:
            raise failure or AssertionError("a model has a trace, or a refusal")
        model = replace(model, rows=traced.rows)
        state = UserState(model.stateful)
        key = key_of(traced, model, rules, state)
        try:
            findings = kept(key)
            idle = require_same_loss(traced, model, state) if findings is None else set(findings.idle)
            return traced, idle, key, state
        except UnsupportedModelError as error:
            failure = traced.refusal or error
            failure.__cause__ = failure.__cause__ or (error if failure is not error else None)


def _of_traced(
    model: LoadedModel,
    traced: TracedModel,
    rules: Rules,
    layer_groups: tuple[OperatorGroup, ...],
    dependences: tuple[Dependence, ...],
    evaluation: str,
) -> CapturedModule:
    owns = [any(traced.is_parameter(a) for a in tensor_arguments(group.main)) for group in layer_groups]
    names = layer_names([group.main for group in layer_groups], owns, traced.inputs)
    values = _value_names(traced, layer_groups, names)
    by_node = {node.name: value for node, value in values.items()}
    layers = dict(zip(names, dependences, strict=True))
    graph = _graph(traced, rules, layer_groups, names, values)
    is_separate = model.clouds is not None and isinstance(model.clouds.preparation, SeparatePreparation)
    graph = marked(graph, layers, layer_groups, names, traced, is_separate=is_separate)
    return CapturedModule(
        _with_pairs(graph, model),
        traced.module,
        {node.name: name for group, name in zip(layer_groups, names, strict=True) for node in group.nodes},
        {value: node.name for node, value in values.items() if isinstance(node.meta.get("val"), Tensor)},
        traced.is_polymorphic,
        tuple(name for name, layer in layers.items() if layer.mark == MIXES_SAMPLES),
        {name: layer.reduction for name, layer in layers.items() if layer.reduction},
        traced.sizes,
        model.autocast,
        None if model.clouds is None else model.clouds.preparation,
        _raw(model),
        _evaluating(model.module),
        evaluation,
        {name: by_node.get(node, "") for name, node in traced.outputs.items()},
        traced.fixed,
        model.samples < traced.samples,
        _loss_call(model, traced, by_node),
    )


def _loss_call(model: LoadedModel, traced: TracedModel, by_node: Mapping[str, str]) -> LossCall | None:
    """How the loss function that the user gave is called."""
    returned = traced.returned
    loss = model.loss_fn
    if returned is None or len(returned.paths) != len(traced.outputs) or getattr(loss, "function", loss) is own_loss:
        return None
    call = model.call
    num_outputs = len(traced.outputs)
    takes_one = getattr(loss, "unpacked", False)

    def arguments(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        targets = call.aims(tensors[num_outputs:])
        alone = takes_one and isinstance(targets, tuple)
        return returned.filled(tensors[:num_outputs]), targets[0] if alone else targets

    outputs = (by_node.get(node, "") for node in traced.outputs.values())
    return LossCall((*outputs, *traced.inputs[len(model.inputs) :]), arguments)


def _evaluating(module: nn.Module) -> tuple[str, ...]:
    """Modules in evaluation mode, of those within one another the outermost, by name."""
    outermost: list[str] = []
    for name, part in module.named_modules():
        if not part.training and not any(name.startswith(f"{outer}.") or not outer for outer in outermost):
            outermost.append(name)
    return tuple(name or type(module).__name__ for name in outermost)


def _value_names(
    traced: TracedModel, layer_groups: tuple[OperatorGroup, ...], names: tuple[str, ...]
) -> dict[fx.Node, str]:
    """The value that each placeholder, main node and output of a main node is; nodes inside a layer are none."""
    values = {node: node.target for node in traced.module.graph.nodes if traced.is_input(node)}
    for group, name in zip(layer_groups, names, strict=True):
        values[group.main] = name
        for node in group.nodes:
            if is_output_of(node) and node.args[0] is group.main:
                values[node] = value_name(name, cast("int", node.args[1]))
    return values


def _graph(
    traced: TracedModel,
    rules: Rules,
    layer_groups: tuple[OperatorGroup, ...],
    names: tuple[str, ...],
    values: Mapping[fx.Node, str],
) -> Graph:
    specs: dict[str, TensorSpec] = {}
    for node, name in values.items():
        if node.op == "placeholder":
            specs[name] = specify_input(node, traced)
    inputs = dict(specs)
    layers = []
    buffers = [_buffers(traced, group) for group in layer_groups]
    readers = Counter(buffer for own in buffers for buffer in own)
    for group, name, own in zip(layer_groups, names, buffers, strict=True):
        layer = _layer(traced, rules, group, name, values, specs)
        shared = tuple((buffer, size) for buffer, size in own.items() if readers[buffer] > 1)
        layer = replace(layer, buffer_bytes=sum(own.values()), shared_buffers=shared)
        specs.update((value_name(name, index), spec) for index, spec in enumerate(layer.outputs))
        layers.append(layer)
    used = {name for layer in layers for name in layer.parameters}
    parameters = {name: parameter_spec(value) for name, value in traced.parameters.items() if name in used}
    return Graph(traced.samples, inputs, tuple(layers), parameters, names[-1])


def _layer(
    traced: TracedModel,
    rules: Rules,
    group: OperatorGroup,
    name: str,
    values: Mapping[fx.Node, str],
    specs: Mapping[str, TensorSpec],
) -> Layer:
    others = [node for node in group.nodes if node is not group.main]
    arguments = [argument for node in (group.main, *others) for argument in tensor_arguments(node)]
    inputs = [values[a] for a in arguments if a.op != "get_attr" and a not in group.nodes]
    attributes = list(dict.fromkeys(name_read(a) for a in arguments if a.op == "get_attr"))
    parameters = tuple(target for target in attributes if target in traced.parameters)
    read = tuple(specs[value] for value in inputs)
    kind, details = _kind(traced, rules, group, read)
    outputs = tuple(
        specify(value, output_names(kind, value.ndim, read, details), traced)
        for value in tensors_in(group.main.meta["val"])
    )
    if kind == ELEMENTWISE and rules.of(group.main) is not None:
        _require_elementwise(name, str(details["op"]), read, outputs)
    return Layer(name, kind, tuple(inputs), outputs, parameters, details)


def _buffers(traced: TracedModel, group: OperatorGroup) -> dict[str, int]:
    """Bytes of the buffers and constants that a layer reads, by name."""
    read = (argument for node in group.nodes for argument in tensor_arguments(node) if argument.op == "get_attr")
    names = dict.fromkeys(name_read(argument) for argument in read)
    tensors = {name: attribute(traced.module, name) for name in names if name not in traced.parameters}
    return {name: tensor.nbytes for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def _require_elementwise(name: str, op: str, read: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
    """Raises :class:`UnsupportedModelError` where the shapes of an elementwise operator say that it is none."""
    shapes = [spec.shape for spec in read]
    for output in outputs:
        if not all(_is_broadcast(shape, output.shape) for shape in shapes):
            raise UnsupportedModelError(
                f"{op} is not elementwise",
                [f"in {name}", f"it reads {', '.join(map(str, shapes))} and makes {output.shape}"],
                ["leave it out of the elementwise operators"],
            )


def _is_broadcast(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(extent in (1, total) for extent, total in pairs)


def _kind(
    traced: TracedModel, rules: Rules, group: OperatorGroup, read: tuple[TensorSpec, ...]
) -> tuple[str, dict[str, Attribute]]:
    """The kind of the main operator, or ``opaque`` where its access relation would not hold for the whole layer."""
    kind, details = kind_of(group.main, rules)
    arguments = list(tensor_arguments(group.main))
    if kind == "embedding":
        arguments.reverse()  # the table comes first
    count = len(arguments) if kind == "concat" else _NUM_DATA_INPUTS.get(kind, 1)
    data = arguments[:count]
    beside = {a for node in group.nodes if node is not group.main for a in _values_read(node, group)}
    reads_more = bool(beside - set(_values_read(group.main, group)))
    data_is_inside = len(data) < count or any(a.op == "get_attr" or a in group.nodes for a in data)
    parameter_is_viewed = any(
        traced.is_parameter(argument)
        for node in group.nodes
        if node is not group.main
        for argument in tensor_arguments(node)
    )
    is_other_attention = kind == "attention" and not _is_plain_attention(group.main)
    not_over_samples = kind == LOSS and not (read and SAMPLE in read[0].dims)
    pools_samples = kind == "global_pool" and SAMPLE in read[0].dims[2:]
    if reads_more or is_other_attention or data_is_inside or parameter_is_viewed or not_over_samples or pools_samples:
        return OPAQUE, {"op": details["op"]}
    return kind, details


def _is_plain_attention(node: fx.Node) -> bool:
    """Whether queries, keys and values come first, in this order, and have as many dims each as the result."""
    roles = [arguments_of(node)[name] for name in ("query", "key", "value")]
    rank = node.meta["val"].ndim
    in_order = list(tensor_arguments(node))[: len(roles)] == roles
    return in_order and all(isinstance(v := each.meta.get("val"), Tensor) and v.ndim == rank for each in roles)


def _values_read(node: fx.Node, group: OperatorGroup) -> Iterator[fx.Node]:
    """Values of other layers, and inputs of the graph, that ``node`` reads."""
    return (a for a in tensor_arguments(node) if a.op != "get_attr" and a not in group.nodes)


def parameter_spec(value: Tensor) -> TensorSpec:
    """Of a tensor whose dims have no names."""
    dims = tuple(f"dim{dim}" for dim in range(value.ndim))
    return TensorSpec(dims, tuple(value.shape), str(value.dtype).removeprefix("torch."))


def _with_pairs(graph: Graph, model: LoadedModel) -> Graph:
    """``graph``, whose sparse layers know how many pairs of their maps the example has."""
    if model.clouds is None:
        return graph
    tensors = model.tensors

    def pairs(layer: Layer) -> Layer:
        if layer.kind not in MAPPED:
            return layer
        return replace(layer, attributes={**layer.attributes, "pairs": int((tensors[layer.inputs[1]] >= 0).sum())})

    return replace(graph, layers=tuple(map(pairs, graph.layers)))


def _raw(model: LoadedModel) -> dict[str, TensorSpec]:
    """The tensors that a batch of clouds has: samples, the points of each, and what a point has."""
    if model.clouds is None:
        return {}
    specs = {}
    first = model.clouds.inputs[0]
    points = first.shape[1] if first.ndim > 1 else 0
    for name, tensor in model.clouds.named.items():
        dims = [SAMPLE, *(f"dim{dim}" for dim in range(1, tensor.ndim))]
        if tensor.ndim > 1 and tensor.shape[1] == points and name != "counts":
            dims[1] = "points"
        specs[name] = TensorSpec(tuple(dims), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    return specs
