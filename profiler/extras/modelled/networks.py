"""A network at its true size without its memory: parameters and example have shapes and dtypes, and no values.

The factory runs under ``torch.device("meta")``; then every tensor becomes a fake one on the processor, so that
operators are chosen as they are there (fused attention, for one).  What is captured cannot be compared with the module,
which has no values either: operators are taken at their word (:mod:`profiler.extras.modelled.dependence`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cuda_ops._torch import FakeTensorMode
from planner.ir.errors import FactoryError, HalopipeError, UnsupportedModelError
from planner.ir.graph import Layer
from planner.ir.profile import ModelSource
from profiler.capture.graph import capture_unchecked
from profiler.capture.kinds import NO_RULES
from profiler.capture.sizes import NUM_SAMPLES
from profiler.capture.user_module import refuse_hooks
from profiler.extras.modelled.dependence import dependence_of_operators
from profiler.source.model import LoadedModel, as_captured
from profiler.source.source import load_model
from runtime.captured import CapturedModule

_NO_VALUES = ("meta tensor", "is_meta", "data-dependent", "FakeTensor", "no data", "on meta device", "device meta")
"""Parts of what torch says where a value is asked for."""


@dataclass(frozen=True, slots=True)
class FakeNetwork:
    """A model on fake tensors.

    Attributes:
        mode: in which all that computes on them runs.
    """

    model: LoadedModel
    captured: CapturedModule
    mode: FakeTensorMode


def fake_network(source: ModelSource) -> FakeNetwork:
    """The network that ``source`` names, captured.

    Raises:
        FactoryError: the factory reads values, or makes something that is no model.
        UnsupportedModelError: it cannot be captured, or is a sparse network, whose shapes follow from its points.
    """
    with _saying_what_is_missing(source):
        with torch.device("meta"):
            model = load_model(source)
        refuse_hooks(model.module)  # which fake parameters would not have
        # Real tensors among them, such as a constant that forward makes of numbers, are taken as fakes.
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        model = _faked(model, mode)
        captured = capture_unchecked(model, NO_RULES, dependence_of_operators)
        model = as_captured(model, captured.graph.inputs, captured.graph.samples)
        return FakeNetwork(model, _without_idle(captured, model, mode), mode)


@contextmanager
def _saying_what_is_missing(source: ModelSource) -> Iterator[None]:
    try:
        yield
    except HalopipeError as error:
        if not any(part in str(error) for part in _NO_VALUES):
            raise
        with_values = (
            [] if isinstance(error, UnsupportedModelError) else ["profile it where its memory fits: leave out --on"]
        )
        raise FactoryError(
            f"{source.factory} reads values, and there are none",
            [error.title, *error.details],
            [
                "make what depends on values before the module is called, or of sizes alone: range, not .item()",
                *with_values,  # forward is captured, with values or without
            ],
        ) from error


def _faked(model: LoadedModel, mode: FakeTensorMode) -> LoadedModel:
    """The model, whose tensors are replaced; those that were one are one again."""
    fakes: dict[int, tuple[Tensor, Tensor]] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            with mode:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, tensor.requires_grad)
            fakes[id(tensor)] = empty, tensor  # kept, so that its id stays its own
        return fakes[id(tensor)][0]

    for root in model.owners.values():
        for part in root.modules():
            tables: tuple[dict[str, Tensor | None], ...] = (part._parameters, part._buffers)  # type: ignore[assignment]  # torch's types part them
            for table in tables:
                table.update({name: fake(value) for name, value in table.items() if value is not None})
    return replace(model, inputs=tuple(map(fake, model.inputs)), targets=tuple(map(fake, model.targets)))


def _without_idle(captured: CapturedModule, model: LoadedModel, mode: FakeTensorMode) -> CapturedModule:
    """Less the parameters that get no gradient, which the optimiser leaves alone."""
    graph = captured.graph
    module = captured.graph_module
    tensors = model.tensors
    sizes = {name: tensors[tensor].shape[dim] for name, (tensor, dim) in captured.sizes.items()}
    graph_inputs = {NUM_SAMPLES: model.samples, **sizes, **tensors}
    with mode, model.precision():
        loss = module(*(graph_inputs[node.target] for node in module.graph.nodes if node.op == "placeholder"))
        loss.backward()
    idle = {name for name in graph.parameters if module.get_parameter(name).grad is None}
    for parameter in module.parameters():
        parameter.grad = None
    if not idle:
        return captured
    num_bytes = {name: graph.parameters[name].num_bytes for name in idle}

    def less(layer: Layer) -> Layer:
        own = [name for name in layer.parameters if name in idle]
        rest = tuple(name for name in layer.parameters if name not in idle)
        return replace(layer, parameters=rest, buffer_bytes=layer.buffer_bytes + sum(num_bytes[name] for name in own))

    layers = tuple(map(less, graph.layers))
    kept = {name: spec for name, spec in graph.parameters.items() if name not in idle}
    return replace(captured, graph=replace(graph, layers=layers, parameters=kept))
