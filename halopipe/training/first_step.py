"""The first step of a job beside one device's, before its second begins.

        run on one device ──> rank 0 ──> the store ──> every rank compares its own gradients, parameters, buffers
                                                       rank 0 hears of all differences, judges, and tells its verdict

So all ranks end with one error, which names what differs most, and where values part.

Where a plan's values and one device's part: the layer, its stage and ranks, the micro-batch, and the two numbers.

Three things can differ from the user's module: its captured graph (a backward of the user's own that was lost), and
what the plan makes of the graph, forward or backward.  The first is looked for by running both on one device: each
value of the graph must be among all that the module's operators make.  If all are, the plan's own gradients tell:
backward makes them from the last layer to the first, so values part at the last layer whose gradient is wrong.
"""

from __future__ import annotations

import copy
import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from cuda_ops._torch import TorchDispatchMode, tree_leaves
from halopipe.data.factories import Item
from halopipe.run_spec.job import Compared, failed_path
from halopipe.training.evaluate import loss_rank
from halopipe.training.rank import Opened, Place, Prepared, Terms
from halopipe.training.single_device import (
    Reference,
    compare_losses,
    compare_tensors,
    losses_of,
    parts_of,
    reference_of,
    why_not_compared,
)
from planner.ir.codec import plain
from planner.ir.errors import NumericsError, UnsupportedModelError
from planner.ir.graph import producer
from planner.ir.plan import Decision
from profiler.capture.graph import Captured, capture
from profiler.capture.operators import operation
from profiler.capture.sample_independence import UNFILLED
from profiler.source.model import LoadedModel
from runtime.engine import StepResult
from runtime.monitor.failure import also, read_error, write_error
from runtime.monitor.watch import SETUP_S
from runtime.numerics.compare import TOLERANCES, Difference, NumericsReport, Sketch, report
from runtime.optim.optimizer import Followed, MakeOptimizer
from runtime.pipeline.messages import CPU
from runtime.stage.captured import CapturedModel, captured_model
from runtime.stage.modes import MicrobatchSlice
from runtime.stage.random.streams import Draw, Draws
from runtime.stage.random.user_module import Answers

if TYPE_CHECKING:
    from cuda_ops._torch import Store

_log = logging.getLogger(__name__)

PATIENCE_S = SETUP_S / 2
"""Longest wait for one device."""

_POLL_S = 0.02
_PART = 2 << 20
"""Bytes of one value of the store, which takes 8 MiB; they are spelled as text."""

Explain = Callable[[Sequence[Difference]], list[str]]
"""Where values part, as lines, of what is wrong on all ranks."""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What a rank does after the first update.

    Attributes:
        read: gives what one device computed; called on rank 0.
        strict: whether it is an error, too, where rounding hides what is compared.
        explain: called on rank 0 where something is wrong.
    """

    terms: Terms
    place: Place
    read: Callable[[], Reference]
    strict: bool
    explain: Explain

    def compare(self, opened: Opened, losses: Sequence[float]) -> tuple[Reference, tuple[Compared, ...]]:
        """One device's step, and this rank's differences from it.

        Args:
            losses: of the steps so far, where this rank knows them.

        Raises:
            NumericsError: on all ranks, if any of them computes something else.
        """
        place = self.place
        place.activity.begin("waiting for the run on one device")
        place.activity.deadline_s = SETUP_S
        if place.rank == 0:
            _publish(place.store, "reference", self.read().to_bytes())
        place.meet()
        reference = Reference.from_bytes(_published(place.store, "reference"))
        if reference.error:
            raise read_error(reference.error)
        if reference.skipped:
            return reference, ()
        place.activity.begin("comparing with one device")
        mine, trouble = self._mine(reference, opened, losses)
        place.store.set(f"compared/{place.rank}", json.dumps(trouble or [plain(each) for each in mine]))
        place.meet()
        if place.rank == 0:
            place.store.set("verdict", self._verdict(reference))
        place.meet()
        verdict = place.store.get("verdict").decode()
        if verdict:
            raise read_error(verdict)
        return reference, mine

    def _mine(self, reference: Reference, opened: Opened, losses: Sequence[float]) -> tuple[tuple[Compared, ...], str]:
        try:
            mine = compare_tensors(reference, opened.engine)
        except NumericsError as error:  # a tensor that one device does not have: the others must not wait
            return (), write_error(error)
        if opened.consumer.transport.rank == loss_rank(opened.consumer):
            mine += compare_losses(reference, losses)
        return mine, ""

    def _verdict(self, reference: Reference) -> str:
        """The error as text; empty where there is none."""
        found: list[Difference] = []
        for rank in range(self.place.num_ranks):
            record = json.loads(self.place.store.get(f"compared/{rank}").decode())
            if isinstance(record, str):
                return record
            found += (Difference(**each) for each in record)
        try:
            report(found, reference.dtype, witness=reference.witness, strict=self.strict)
        except NumericsError as error:
            wrong = [each for each in found if each.is_wrong]
            return write_error(also(error, self._explained(wrong)) if wrong else error)
        return ""

    def _explained(self, wrong: Sequence[Difference]) -> list[str]:
        self.place.activity.begin("looking for the layer at which values part")
        try:
            return self.explain(wrong)
        except Exception as error:  # noqa: BLE001 - the verdict is more than its explanation
            return [f"where values part could not be found: {type(error).__name__}: {error}"]


def read_when_written(path: Path) -> Reference:
    """What another process writes to ``path``; where it failed, or takes too long, there is no reference."""
    end_s, failed = time.monotonic() + PATIENCE_S, failed_path(path)
    while not path.exists():
        if failed.exists():
            return Reference(skipped=failed.read_text(encoding="utf-8"))
        if time.monotonic() > end_s:
            return Reference(skipped=f"one device did not come to an end in {PATIENCE_S:g} s")
        time.sleep(_POLL_S)
    return Reference.from_bytes(path.read_bytes())


def _publish(store: Store, key: str, data: bytes) -> None:
    parts = [data[first : first + _PART] for first in range(0, len(data), _PART)]
    for number, part in enumerate(parts):
        store.set(f"{key}/{number}", part.hex())
    store.set(key, str(len(parts)))


def _published(store: Store, key: str) -> bytes:
    count = int(store.get(key).decode())
    return b"".join(bytes.fromhex(store.get(f"{key}/{number}").decode()) for number in range(count))


_GRADIENT = "gradient"


def parting(terms: Terms, model: LoadedModel, captured: Captured, item: Item, wrong: Sequence[Difference]) -> list[str]:
    """The lines that say it.

    Args:
        model: with the values that it has before the first step, on the processor; gradients are left in it.
        captured: its graph.
        item: what the first step read.
        wrong: what is not as on one device.
    """
    decision, found = terms.plan.decision, captured_model(captured)
    if found.prepared is None:
        line = _in_the_graph(terms, model, captured, item)
        if line:
            return [line]
    lines = ["the captured graph does on one device what the user's module does" if found.prepared is None else ""]
    gradients = {each.name: each for each in wrong if each.kind == _GRADIENT}
    layers = [layer for layer in found.graph.layers if any(name in gradients for name in layer.parameters)]
    if layers:
        layer = layers[-1]
        first = next(gradients[name] for name in layer.parameters if name in gradients)
        lines.append(f"values part at {_place(decision, layer.name)}: {first}")
    elif any(each.kind == "loss" for each in wrong):
        lines.append(f"no gradient differs: values part at {_place(decision, producer(found.graph.loss))}")
    return [line for line in lines if line]


def _in_the_graph(terms: Terms, model: LoadedModel, captured: Captured, item: Item) -> str:
    """The first value that the graph makes on one device and the user's module does not; empty: there is none."""
    found, decision = captured_model(captured), terms.plan.decision
    dtype = next((each.dtype for each in model.module.parameters()), torch.get_default_dtype())
    near = TOLERANCES.get(model.autocast or dtype, TOLERANCES[torch.float32]).tensor
    loss_of, draw = losses_of(model, captured, terms), Draw(terms.seed)
    for number, (rows, inputs, targets) in enumerate(_micro_batches(item, decision)):
        trace = _Trace()
        with trace, Answers(found, draw).given((rows,), number):  # answers come first, and need not be looked at
            loss_of(inputs, targets).backward()  # type: ignore[no-untyped-call]  # torch does not type it
        draw.at(MicrobatchSlice(number, rows, 0, rows))
        run = _Run(found, draw)
        with nullcontext() if model.autocast is None else torch.autocast(inputs[0].device.type, model.autocast):
            loss = run.run(*_given(found, rows, (*inputs, *targets)))
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
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in UNFILLED:  # whatever was in memory is in no other run
            found.zero_()
        for each in tree_leaves((args, found)):
            if isinstance(each, Tensor) and each.is_floating_point() and each.layout is torch.strided:
                self._made[each.numel()].append(Sketch.of(each))
        return found

    def nearest(self, sketch: Sketch) -> Sketch | None:
        """What is least far from ``sketch``."""
        count = torch.Size(sketch.shape).numel()
        return min(self._made.get(count, []), key=sketch.distance, default=None)


class _Run(fx.Interpreter):
    """A captured graph, whose layers' values and gradients are kept."""

    def __init__(self, model: CapturedModel, draw: Draw) -> None:
        super().__init__(model.graph_module)
        self._rule = Draws(model).rule(draw)
        self._value_of = {node: value for value, node in model.node_of_value.items() if value not in model.graph.inputs}
        self.values: dict[str, Sketch] = {}
        self.gradients: dict[str, Sketch] = {}

    def run_node(self, n: fx.Node) -> Any:
        own = self._rule(n) if n.op == "call_function" else None
        if own is None:
            found = super().run_node(n)
            if n.op == "call_function" and operation(n) in UNFILLED:
                found.zero_()
        else:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            found = own(*args, **kwargs)
        value = self._value_of.get(n.name)
        if value is not None and isinstance(found, Tensor) and found.is_floating_point():
            self.values[value] = Sketch.of(found)
            if found.requires_grad:
                self.gradients[value] = self.values[value]  # keeps the forward's order

                def note(gradient: Tensor) -> None:
                    self.gradients[value] = Sketch.of(gradient)

                found.register_hook(note)  # type: ignore[no-untyped-call]  # torch does not type it
        return found


def _given(model: CapturedModel, rows: int, tensors: Sequence[Tensor]) -> Iterator[Any]:
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


def _micro_batches(item: Item, decision: Decision) -> Iterator[tuple[int, tuple[Tensor, ...], tuple[Tensor, ...]]]:
    parts, counts = parts_of(item, decision.micro_batches)
    if isinstance(item, list):
        yield from ((rows, *part) for rows, part in zip(counts, parts, strict=True))
        return
    first = 0
    for rows in counts:
        inputs, targets = (
            tuple(
                each.narrow(0, first, rows) if each.ndim and each.shape[0] == sum(counts) else each for each in tensors
            )
            for tensors in parts[0]
        )
        yield rows, inputs, targets
        first += rows


def _place(decision: Decision, layer: str) -> str:
    stage = decision.layers[layer].stage
    ranks = ", ".join(map(str, decision.stages[stage].ranks))
    return f"layer {layer} (stage {stage}, rank {ranks})"


@dataclass(frozen=True, slots=True)
class Kept:
    """The model as it was before the first step; or why it could not be kept.

    Attributes:
        optimizer: makes its optimiser.
    """

    model: LoadedModel | None = None
    reason: str = ""
    optimizer: MakeOptimizer | None = None

    @classmethod
    def of(cls, terms: Terms, prepared: Prepared, *, check: bool) -> Kept:
        """A copy, where there is memory for it and one device has such a step."""
        if not check:
            return cls()
        reason = why_not_compared(terms, torch.device("cpu"))
        if reason:
            return cls(reason=reason)
        try:
            made = terms.optimizer
            return cls(copy.deepcopy(prepared.model), "", made.as_it_is() if isinstance(made, Followed) else made)
        except Exception as error:  # noqa: BLE001 - the user's module may refuse in any way
            return cls(reason=f"the model cannot be copied: {type(error).__name__}: {error}")


class WatchedSteps:
    """The steps before the first update, which are compared with one device.

    Args:
        kept: on rank 0.

    Attributes:
        is_over: the first update was compared.
    """

    def __init__(self, terms: Terms, place: Place, opened: Opened, kept: Kept | None) -> None:
        self._terms, self._opened, self._kept = terms, opened, kept
        self._items: list[Item] = []
        self._losses: list[float] = []
        self._first = FirstStep(terms, place, self._read, False, self._explain)
        self._device, self._steps_left, self.is_over = place.device or CPU, terms.accumulate, False

    def after(self, item: Item, result: StepResult) -> NumericsReport | None:
        """What the comparison shows, after the first update; None before.

        Raises:
            NumericsError: the step is not one device's.
        """
        self._losses += [] if result.loss is None else [result.loss]
        if self._kept is not None and self._kept.model is not None:
            self._items.append(item)
        self._steps_left -= 1
        if self._steps_left:
            return None
        self.is_over = True
        reference, compared = self._first.compare(self._opened, self._losses)
        if reference.skipped:
            if self._kept is not None:
                _log.warning("the first step was not compared with one device: %s", reference.skipped)
            return NumericsReport(reference.dtype, 0, 0, {}, skipped=reference.skipped)
        found = (Difference(**plain(each)) for each in compared)
        return report(found, reference.dtype, witness=reference.witness, strict=False)

    def _read(self) -> Reference:
        kept = self._kept or Kept()
        if kept.model is None:
            return Reference(skipped=kept.reason)
        try:
            terms = replace(self._terms, optimizer=kept.optimizer or self._terms.optimizer)
            return reference_of(terms, copy.deepcopy(kept.model), self._items, self._device)
        except UnsupportedModelError as error:
            return Reference(error=write_error(error))
        except Exception as error:  # noqa: BLE001 - whatever the user's module raises, and memory that runs out
            return Reference(skipped=f"one device could not run it: {type(error).__name__}: {error}")

    def _explain(self, wrong: Sequence[Difference]) -> list[str]:
        kept = self._kept
        if kept is None or kept.model is None:
            return []
        return parting(self._terms, kept.model, capture(kept.model), self._items[0], wrong)
