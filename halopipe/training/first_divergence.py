"""Where a plan's values and one device's part: the layer, its stage and ranks, the micro-batch, and the two numbers.

Three things can differ from the user's module: its captured graph (a backward of the user's own that was lost), and
what the plan makes of the graph, forward or backward.  The first is looked for by running both on one device: each
value of the graph must be among all that the module's operators make.  If all are, the plan's own gradients tell:
backward makes them from the last layer to the first, so values part at the last layer whose gradient is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from cuda_ops._torch import TorchDispatchMode, tree_leaves
from cuda_ops.operator_table import operator_row
from halopipe.data.factories import BatchItem
from halopipe.training.single_device import losses_of, parts_of, rows_of
from planner.ir.graph import producer
from planner.ir.plan import Decision
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from runtime.numerics.compare import TOLERANCES, Sketch
from runtime.numerics.difference import Difference
from runtime.rank import RankContext
from runtime.stage.modes import MicrobatchShard
from runtime.stage.random.streams import CounterRng, RandomNodes
from runtime.stage.random.user_module import Answers
from runtime.stage.shapes import step_inputs

_GRADIENT = "gradient"


def first_divergence(
    context: RankContext, model: LoadedModel, captured: CapturedModule, item: BatchItem, wrong: Sequence[Difference]
) -> list[str]:
    """The lines that say it.

    Args:
        model: with the values that it has before the first step, on the processor; gradients are left in it.
        captured: its graph.
        item: what the first step read.
        wrong: what is not as on one device.
    """
    decision = context.decision
    if captured.preparation is None:
        line = _in_the_graph(context, model, captured, item)
        if line:
            return [line]
    lines = [
        "the captured graph does on one device what the user's module does" if captured.preparation is None else ""
    ]
    gradients = {each.name: each for each in wrong if each.kind == _GRADIENT}
    layers = [layer for layer in captured.graph.layers if any(name in gradients for name in layer.parameters)]
    if layers:
        layer = layers[-1]
        first = next(gradients[name] for name in layer.parameters if name in gradients)
        lines.append(f"values part at {_place(decision, layer.name)}: {first}")
    elif any(each.kind == "loss" for each in wrong):
        lines.append(f"no gradient differs: values part at {_place(decision, producer(captured.graph.loss))}")
    return [line for line in lines if line]


def _in_the_graph(context: RankContext, model: LoadedModel, captured: CapturedModule, item: BatchItem) -> str:
    """The first value that the graph makes on one device and the user's module does not; empty: there is none."""
    decision = context.decision
    dtype = next((each.dtype for each in model.module.parameters()), torch.get_default_dtype())
    near = TOLERANCES.get(model.autocast or dtype, TOLERANCES[torch.float32]).tensor
    loss_of = losses_of(model, captured, context)
    draw = CounterRng(context.seed)
    for number, (rows, inputs, targets) in enumerate(_micro_batches(item, decision, captured)):
        trace = _Trace()
        with trace, Answers(captured, draw).given((rows,), number):  # answers come first, and need not be looked at
            loss_of(inputs, targets).backward()  # type: ignore[no-untyped-call]  # torch does not type it
        draw.at(MicrobatchShard(number, rows, 0, rows))
        run = _SketchingRun(captured, draw)
        with nullcontext() if model.autocast is None else torch.autocast(inputs[0].device.type, model.autocast):
            loss = run.run(*_graph_inputs(captured, rows, (*inputs, *targets)))
        loss.backward()
        for direction, values in (("forward", run.values), ("backward", dict(reversed(run.gradients.items())))):
            for value, sketch in values.items():
                nearest = trace.nearest(sketch)
                if nearest is None or sketch.distance(nearest) > near * max(sketch.norm, nearest.norm):
                    theirs = "none of that size" if nearest is None else f"norm {nearest.norm:.9g}"
                    what = "makes values" if direction == "forward" else "gets a gradient"
                    return (
                        f"the captured graph is not the user's module: in the {direction} of micro-batch {number}, "
                        f"{_place(decision, producer(value))} {what} of norm {sketch.norm:.9g}, "
                        f"the nearest that the module makes: {theirs}"
                    )
    return ""


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """All that the operators of a module make, forward and backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self._made: dict[int, list[Sketch]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if operator_row(func).fills == "empty":  # whatever was in memory is in no other run
            made.zero_()
        for each in tree_leaves((args, made)):
            if isinstance(each, Tensor) and each.is_floating_point() and each.layout is torch.strided:
                self._made[each.numel()].append(Sketch.of(each))
        return made

    def nearest(self, sketch: Sketch) -> Sketch | None:
        """What is least far from ``sketch``."""
        count = torch.Size(sketch.shape).numel()
        return min(self._made.get(count, []), key=sketch.distance, default=None)


class _SketchingRun(fx.Interpreter):
    """A captured graph, whose layers' values and gradients are kept."""

    def __init__(self, model: CapturedModule, draw: CounterRng) -> None:
        super().__init__(model.graph_module)
        self._rule = RandomNodes(model).rule(draw)
        self._value_of = {node: value for value, node in model.node_of_value.items() if value not in model.graph.inputs}
        self.values: dict[str, Sketch] = {}
        self.gradients: dict[str, Sketch] = {}

    def run_node(self, n: fx.Node) -> Any:
        own = self._rule(n) if n.op == "call_function" else None
        if own is None:
            made = super().run_node(n)
            if n.op == "call_function" and operator_row(n.target).fills == "empty":
                made.zero_()
        else:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            made = own(*args, **kwargs)
        value = self._value_of.get(n.name)
        if value is not None and isinstance(made, Tensor) and made.is_floating_point():
            self.values[value] = Sketch.of(made)
            if made.requires_grad:
                self.gradients[value] = self.values[value]  # keeps the forward's order

                def note(gradient: Tensor) -> None:
                    self.gradients[value] = Sketch.of(gradient)

                made.register_hook(note)  # type: ignore[no-untyped-call]  # torch does not type it
        return made


def _graph_inputs(model: CapturedModule, rows: int, tensors: Sequence[Tensor]) -> Iterator[Any]:
    """What the placeholders of the graph stand for, in their order."""
    named: Mapping[str, Tensor] = dict(zip(model.graph.inputs, tensors, strict=True))
    for node in model.graph_module.graph.nodes:
        if node.op == "placeholder":
            name = str(node.target)
            if name in named:
                yield named[name]
            else:
                size = model.sizes.get(name)
                yield rows if size is None else named[size[0]].shape[size[1]]


def _micro_batches(
    item: BatchItem, decision: Decision, captured: CapturedModule
) -> Iterator[tuple[int, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    specs = step_inputs(captured)
    rows = rows_of(item, decision.micro_batches, specs)
    yield from ((count, *part) for count, part in zip(rows, parts_of(item, rows, specs), strict=True))


def _place(decision: Decision, layer: str) -> str:
    stage = decision.layers[layer].stage
    ranks = ", ".join(map(str, decision.stages[stage].ranks))
    return f"layer {layer} (stage {stage}, rank {ranks})"
