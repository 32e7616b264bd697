"""What each layer keeps between forward and backward, and how high memory rises while it runs.

Two passes over the layers, one with whole backwards and one with backwards in halves, are watched allocation by
allocation (:mod:`cuda_ops.memory`).  What a call allocates is exact.  What else is there at that moment is worked out:
in a pass all values stay alive, in training they go with their last reader, and what autograd keeps goes with the first
layer that saved it, as that one's backward comes last.

Where nothing counts allocations (no compiler), storages are counted as operators make them: all but what an operator
allocates for itself and frees before it returns.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks

from cuda_ops._torch import OpOverload, StorageWeakRef, TorchDispatchMode, storage_id, tree_leaves, weak_storage
from cuda_ops.memory import MemoryMeter, meter_of
from planner.ir.profile import Levels
from profiler.measure.noise import LapClock
from profiler.measure.timing import LayerSegment, SegmentedPass, segments
from runtime.captured import CapturedModule


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one layer.

    Attributes:
        saved_bytes: what autograd keeps for its backward that no earlier layer keeps, parameters, buffers and the
            graph's inputs aside: over layers these add up to what is held.
        workspace_bytes: the peak beyond what stays: of forward, beyond its result; of backward, beyond the parameters'
            gradients (so the gradients of its inputs and outputs are in it).
        levels: while it runs.
    """

    saved_bytes: int
    workspace_bytes: int
    levels: Levels


class SavedStorages:
    """Counts the memory behind saved tensors, each storage once.

    Args:
        existing: tensors whose memory is accounted for elsewhere.

    Attributes:
        existing: their addresses.
        first_saved: addresses of those saved for the first time since the last look, with their bytes.
        saved: the same of all that was saved since then, for the first time or not.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        self._seen = {storage_id(tensor): tensor for tensor in existing}
        self.existing = frozenset(self._seen)
        self.first_saved: dict[int, int] = {}
        self.saved: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts ``tensor`` and gives it back; it is kept alive, so that its address stays its own."""
        num_bytes = _size(tensor)
        address = storage_id(tensor)
        if num_bytes and address not in self._seen:
            self._seen[address] = tensor
            self.first_saved[address] = num_bytes
        if address not in self.existing:
            self.saved[address] = num_bytes
        return tensor


def footprints(captured: CapturedModule, tensors: Mapping[str, Tensor], samples: int) -> dict[str, Footprint]:
    """The bytes of every layer for ``samples`` samples; parameters are left without gradients."""
    with metered(next((tensor.device for tensor in tensors.values()), torch.device("cpu"))) as meter:
        return watched_passes(captured, tensors, samples, meter)[0]


@contextmanager
def metered(device: torch.device) -> Iterator[MemoryMeter]:
    """A meter of what is allocated on ``device`` within."""
    meter = meter_of(device)
    if meter is not None:
        yield meter
        return
    with OperatorMemory() as watch:
        yield watch.meter


class OperatorMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch does not type it
    """Counts the storages that operators make while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not type it
        self.meter = StorageMeter()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See :class:`TorchDispatchMode`."""
        keywords = kwargs or {}
        result = func(*args, **keywords)
        if func.namespace != "prim":
            operands = tree_leaves((args, dict(keywords)))
            self.meter.note(operands, result)
            self.ran(func, args, keywords, operands, result)
        return result

    def ran(
        self, func: OpOverload, args: tuple[Any, ...], keywords: Mapping[str, Any], operands: list[Any], result: Any
    ) -> None:
        """An operator is done."""


class StorageMeter:
    """Counts storages while they live."""

    def __init__(self) -> None:
        self._alive: dict[int, int] = {}
        self._peak = 0
        self.current_bytes = 0

    def take_peak(self) -> int:
        """See :class:`cuda_ops.memory.MemoryMeter`."""
        peak = max(self._peak, self.current_bytes)
        self._peak = self.current_bytes
        return peak

    def limit(self, num_bytes: int | None) -> None:
        """There is none."""

    def note(self, operands: list[Any], made: Any) -> None:
        """Counts the storages of ``made`` that are none of those of ``operands``."""
        old = {storage_id(each) for each in operands if isinstance(each, Tensor)}
        for tensor in tree_leaves(made):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            name = storage_id(tensor)
            if name in old or name in self._alive:
                continue
            self._alive[name] = storage.nbytes()
            self.current_bytes += storage.nbytes()
            self._peak = max(self._peak, self.current_bytes)
            weakref.finalize(storage, self._gone, name)

    def _gone(self, name: int) -> None:
        self.current_bytes -= self._alive.pop(name)


def watched_passes(
    captured: CapturedModule,
    tensors: Mapping[str, Tensor],
    samples: int,
    meter: MemoryMeter,
    clock: LapClock | None = None,
) -> tuple[dict[str, Footprint], SegmentedPass, SegmentedPass]:
    """The bytes of every layer, and the two passes that told them: backward whole, and in halves."""
    parts = segments(captured)
    whole, split = (_Watched(captured, tensors, samples, meter, halves, clock) for halves in (False, True))
    gc.collect()
    gc.disable()  # what earlier work left in cycles would be freed now, and count as this network's
    try:
        whole.run()
        split.run()
    finally:
        gc.enable()
    by_layer = {
        part.name: Footprint(
            sum(whole.layers[k].saved.values()),
            whole.layers[k].workspace,
            Levels(
                forward=whole.layers[k].forward,
                backward=whole.layers[k].backward,
                backward_input=split.layers[k].backward,
                backward_weight=split.layers[k].weight,
                left=split.layers[k].left,
                outputs_saved=whole.layers[k].outputs_saved,
                inputs_saved=whole.layers[k].inputs_saved,
                gradients_left=split.layers[k].gradients_left,
                inputs_kept=whole.layers[k].inputs_kept,
                gradients_made=tuple(whole.gradients.made[k]),
                inputs_left=_named(parts, split.layers[k].inputs_left),
                gradients_left_from=_named(parts, split.layers[k].gradients_left_from),
            ),
        )
        for k, part in enumerate(parts)
    }
    for parameter in captured.graph_module.parameters():
        parameter.grad = None
    return by_layer, whole.passed, split.passed


def workspace_bytes(parts: Sequence[LayerSegment], run: SegmentedPass) -> dict[str, int]:
    """``Footprint.workspace_bytes`` of ``parts``, which are run."""
    workspace = {}
    with metered(next((p.device for part in parts for p in part.parameters), torch.device("cpu"))) as meter:
        for part in parts:
            rise, more = _rise(meter, partial(run.forward, part))
            workspace[part.name] = rise - max(0, more)
        run.start_backward()
        for part in reversed(parts):
            gradient_bytes = sum(gradient.nbytes for gradient in run.gradients_of(part)[1])
            rise = _backward_rise(meter, part, partial(run.backward, part))
            workspace[part.name] = max(0, workspace[part.name], gradient_bytes + rise)
    return workspace


@dataclass(slots=True)
class _Layer:
    """What was seen of a layer; levels as of :class:`planner.ir.profile.Levels`.

    Attributes:
        saved: bytes of the storages that it is the first to save, by address.
        inputs_left, gradients_left_from: by number of the layer that made them.
    """

    saved: dict[int, int] = field(default_factory=dict)
    forward: int = 0
    workspace: int = 0
    backward: int = 0
    weight: int = 0
    left: int = 0
    outputs_saved: int = 0
    inputs_saved: int = 0
    inputs_kept: int = 0
    gradients_left: int = 0
    inputs_left: dict[int, int] = field(default_factory=dict)
    gradients_left_from: dict[int, int] = field(default_factory=dict)


class _GradientsUnderWay:
    """Whose backward makes each gradient of a value, and whose is the last to be given it.

    Attributes:
        made: by layer, of the gradients that its backward makes: (name of the last layer given it, bytes).
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._alive: dict[int, tuple[StorageWeakRef, int, int]] = {}  # by storage: its maker, and its bytes
        self.made: list[list[tuple[str, int]]] = [[] for _ in names]

    def maker(self, gradient: Tensor) -> int | None:
        """Of one that was under way at the last look; None: it was not, or is that of the loss."""
        entry = self._alive.get(storage_id(gradient))
        return None if entry is None or entry[1] == len(self.made) else entry[1]

    def look(self, k: int, gradients: Iterable[Tensor]) -> None:
        """Those under way when the backward of layer ``k`` begins; -1: when all have run."""
        now = {storage_id(gradient): gradient for gradient in gradients}
        for address in [address for address in self._alive if address not in now]:
            _, maker, size = self._alive.pop(address)
            if maker < len(self.made) and size:
                self.made[maker].append((self._names[k + 1], size))
        for address in now.keys() - self._alive.keys():
            gradient = now[address]
            # Memory of a storage to which nobody but this refers is given back, its number is not used again.
            self._alive[address] = (weak_storage(gradient), k + 1, _size(gradient))


class _Watched:
    """A pass over all layers, watched."""

    def __init__(
        self,
        captured: CapturedModule,
        tensors: Mapping[str, Tensor],
        samples: int,
        meter: MemoryMeter,
        halves: bool,
        clock: LapClock | None = None,
    ) -> None:
        self._parts = segments(captured)
        self._meter = meter
        self._halves = halves
        module = captured.graph_module
        self._counter = SavedStorages((*module.parameters(), *module.buffers(), *tensors.values()))
        self.passed = SegmentedPass(captured, tensors, samples, clock, split=halves)
        self.layers = [_Layer() for _ in self._parts]
        self.gradients = _GradientsUnderWay([part.name for part in self._parts])

    def run(self) -> None:
        """Fills ``layers``."""
        for parameter in (parameter for part in self._parts for parameter in part.parameters):
            parameter.grad = None  # first gradients are not added to any
        made: dict[int, int] = {}  # by address of a value, the layer that made it
        for k, (layer, part) in enumerate(zip(self.layers, self._parts, strict=True)):
            with saved_tensors_hooks(self._counter.pack, lambda tensor: tensor):
                layer.forward, more = _rise(self._meter, partial(self.passed.forward, part))
            layer.workspace = layer.forward - max(0, more)
            layer.saved = self._counter.first_saved
            self._counter.first_saved = {}
            kept = self._counter.saved
            self._counter.saved = {}
            results = {storage_id(value): _size(value) for value in map(self.passed.value, part.results)}
            layer.outputs_saved = sum(size for address, size in results.items() if address in layer.saved)
            layer.inputs_saved = sum(size for address, size in layer.saved.items() if address in made)
            layer.inputs_kept = sum(size for address, size in kept.items() if address in made)
            for address in results:
                made.setdefault(address, k)
        for layer, unsaved in zip(self.layers, self._unsaved(), strict=True):
            layer.forward += unsaved
        first = {address: k for k, layer in enumerate(self.layers) for address in layer.saved}
        self.passed.start_backward()
        left: dict[int, Tensor] = {}  # kept alive, so that their addresses stay their own
        outputs_of: dict[int, list[_Layer]] = {}  # the layers, by address of the gradient under way of their output
        for k in reversed(range(len(self._parts))):
            outputs_of = self._backward(k, first, made, left, outputs_of)
        self.gradients.look(-1, ())

    def _backward(
        self,
        k: int,
        first: Mapping[int, int],
        made: Mapping[int, int],
        left: dict[int, Tensor],
        outputs_of: Mapping[int, list[_Layer]],
    ) -> dict[int, list[_Layer]]:
        part = self._parts[k]
        layer = self.layers[k]
        gradients = self.passed.gradients_of(part)[1]
        gradient_bytes = _total(gradients)
        own = {storage_id(gradient) for gradient in gradients}
        moving = list(self.passed.gradients_under_way())
        self.gradients.look(k, moving)
        under_way = _total(moving)
        addresses = {storage_id(gradient) for gradient in moving}
        now = {a: [*outputs_of.get(a, ()), *([layer] if a in own else ())] for a in addresses | own}
        del gradients, moving
        rise = _backward_rise(self._meter, part, partial(self.passed.backward_input, part))
        layer.backward = max(0, under_way + rise)
        layer.workspace = max(0, layer.workspace, gradient_bytes + rise)
        if not self._halves:
            self.passed.backward_weight(part)
            return now
        held = {storage_id(tensor): tensor for tensor in self.passed.left_of(part)}
        for address, tensor in held.items():
            if (maker := made.get(address, k)) != k:
                layer.inputs_left[maker] = layer.inputs_left.get(maker, 0) + _size(tensor)
            if address not in left and address not in self._counter.existing:
                left[address] = tensor
                self.layers[first.get(address, k)].left += _size(tensor)
                if (whose := self.gradients.maker(tensor)) is not None:
                    layer.gradients_left_from[whose] = layer.gradients_left_from.get(whose, 0) + _size(tensor)
                for other in now.get(address, ()):
                    other.gradients_left += _size(tensor)
        layer.weight = max(0, _backward_rise(self._meter, part, partial(self.passed.backward_weight, part)))
        return now

    def _unsaved(self) -> list[int]:
        """By layer, the bytes of earlier layers' values that it or a later one reads, and no earlier one has saved."""
        made: dict[int, tuple[int, int]] = {}  # by address: who made it, and its bytes
        last: dict[int, int] = {}
        for k, part in enumerate(self._parts):
            for node in part.results:
                made.setdefault(self._place(node), (k, _size(self.passed.value(node))))
            for node in part.reads:
                last[self._place(node)] = k
        saved = {address: k for k, layer in enumerate(self.layers) for address in layer.saved}
        more = [0] * (len(self._parts) + 1)
        for address, (k, size) in made.items():
            until = min(last.get(address, k), saved.get(address, len(self._parts)))
            if until > k and address not in self._counter.existing:
                more[k + 1] += size
                more[until + 1] -= size
        levels = []
        level = 0
        for change in more[:-1]:
            level += change
            levels.append(level)
        return levels

    def _place(self, node: fx.Node) -> int:
        value = self.passed.value(node)
        return storage_id(value) if isinstance(value, Tensor) else 0


def _rise(meter: MemoryMeter, run: Callable[[], None]) -> tuple[int, int]:
    """By how much memory rose at most, and how much more there was at the end."""
    meter.take_peak()
    before = meter.current_bytes
    run()
    return meter.take_peak() - before, meter.current_bytes - before


def _backward_rise(meter: MemoryMeter, part: LayerSegment, run: Callable[[], None]) -> int:
    """By how much memory rose at most in a backward, less the first gradients of the layer's parameters."""
    new = [parameter for parameter in part.parameters if parameter.grad is None]
    rise, _ = _rise(meter, run)
    return rise - sum(parameter.nbytes for parameter in new if parameter.grad is not None)


def _named(parts: Sequence[LayerSegment], by_layer: Mapping[int, int]) -> tuple[tuple[str, int], ...]:
    return tuple((parts[k].name, size) for k, size in by_layer.items() if size)


def _size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes() if isinstance(tensor, Tensor) else 0


def _total(tensors: Iterable[Tensor]) -> int:
    return sum({storage_id(tensor): _size(tensor) for tensor in tensors}.values())
