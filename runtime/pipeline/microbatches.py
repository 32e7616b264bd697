"""What a step trains on: micro-batches, of which every rank asks for the parts that its stages read.

    whole batch of 10 rows, planned as 4 + 4 + 4 + 4        ->  4 + 4 + 2 + 0: the last batch of an epoch
    micro-batches given one by one                          ->  each with its own rows, lengths, numbers of points

Whoever makes a batch decides where the numbers come from: the whole batch in this process, a dataset of which only the
needed rows are read, or another rank.  All ranks must agree on the rows and shapes of every micro-batch.

Maps of sparse networks are made by the host ahead of the forward pass (:class:`Ahead`).  On a core of the host that is
work like any other; for an accelerator a thread does it, while the rank starts the kernels of the micro-batch before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from planner.ir.box import Box, Interval, whole
from planner.ir.errors import UsageError
from planner.ir.graph import SAMPLE, TensorSpec
from runtime.pipeline.routing import slices
from runtime.stage.index_ranges import IndexRange

Inputs = Mapping[str, Tensor]
"""Graph inputs by name."""


class Ahead:
    """Inputs that are made, or being made, by stage and micro-batch.

    Args:
        on_thread: whether a thread of its own makes them.
    """

    def __init__(self, *, on_thread: bool) -> None:
        self._thread = ThreadPoolExecutor(1, "prepares") if on_thread else None
        self._made: dict[tuple[int, int], Future[Inputs]] = {}

    def make(self, stage: int, microbatch: int, work: Callable[[], Inputs]) -> None:
        """Make what ``work`` returns, now or while what follows is done."""
        if self._thread is not None:
            self._made[stage, microbatch] = self._thread.submit(work)
            return
        future: Future[Inputs] = Future()
        future.set_result(work())
        self._made[stage, microbatch] = future

    def take(self, stage: int, microbatch: int) -> dict[str, Tensor] | None:
        """What was made, once it is there; None if nobody asked for it.  An error of ``work`` is raised here."""
        future = self._made.pop((stage, microbatch), None)
        return None if future is None else dict(future.result())

    def forget(self) -> None:
        """The micro-batches are another step's."""
        for future in self._made.values():
            future.cancel()
        self._made.clear()


POINTS = "points"
"""The dim of a user's tensors that holds the points of a sample, padded to those of the largest."""
InputShapes = Mapping[str, tuple[int, ...]]
"""By graph input, its shape in one micro-batch."""


class Batch(Protocol):
    """The micro-batches of one step."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Samples of each micro-batch; 0 for one that is left out."""

    def shapes(self, microbatch: int) -> InputShapes:
        """The shape of every graph input of a micro-batch, all its rows counted."""

    def part(self, name: str, microbatch: int, start: int, count: int) -> Tensor:
        """Samples ``start`` to ``start + count`` of a micro-batch's input ``name``; whole if it has no samples."""


@dataclass(frozen=True, slots=True)
class InputSpecs:
    """What the model takes.

    Attributes:
        specs: graph inputs by name, in order, at ``captured`` samples.
        free: (input, dim) pairs whose extents may differ from those of the capture, beside samples.
        ranges: by input, what integers it may hold.
    """

    specs: Mapping[str, TensorSpec]
    captured: int
    free: frozenset[tuple[str, int]] = frozenset()
    ranges: Mapping[str, tuple[IndexRange, ...]] = field(default_factory=dict)

    def rows(self, tensors: Sequence[Tensor]) -> int:
        """Samples that the tensors hold.

        Raises:
            UsageError: there are too few or too many of them, they disagree on the number of samples, a dim has
                another extent than the model was captured with, or one holds a class or row that there is not.
        """
        if len(tensors) != len(self.specs):
            names = ", ".join(self.specs)
            raise UsageError(f"a step takes {len(self.specs)} tensors ({names}), it was given {len(tensors)}")
        by_rows: dict[int, str] = {}
        for tensor, (name, spec) in zip(tensors, self.specs.items(), strict=True):
            if tensor.ndim != len(spec.shape):
                raise UsageError(f"{name} has shape {tuple(tensor.shape)}, the model takes {spec.shape}")
            for dim, (extent, wanted) in enumerate(zip(tensor.shape, spec.shape, strict=True)):
                if spec.dims[dim] == SAMPLE:
                    each = max(1, wanted // self.captured)
                    if extent % each:
                        raise UsageError(f"{name} has {extent} rows, a sample has {each} of them")
                    by_rows.setdefault(extent * self.captured // wanted, name)
                elif extent != wanted and (name, dim) not in self.free:
                    expected = self.shape(name, spec.shape, self._of(by_rows))
                    raise UsageError(
                        f"{name} has shape {tuple(tensor.shape)}, the plan expects {expected}",
                        [f"dim {dim} ({spec.dims[dim]}) is {extent}, the model was captured with {wanted}"],
                        ["declare the dim as variable in the factory's example, and profile and plan again"],
                    )
        if len(by_rows) > 1:
            counts = ", ".join(f"{name} has {rows}" for rows, name in by_rows.items())
            raise UsageError("the tensors of a batch disagree on its samples", [counts])
        for tensor, name in zip(tensors, self.specs, strict=True):
            self.require_in_range(name, tensor)
        return self._of(by_rows)

    def samples(self, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """How many there are, by the first of the tensors of these inputs that has some."""
        for name, tensor in tensors:
            spec = self.specs[name]
            if spec.has_samples and tensor.ndim == len(spec.shape):
                dim = spec.dims.index(SAMPLE)
                return tensor.shape[dim] * self.captured // spec.shape[dim]
        return self.captured

    def require_in_range(self, name: str, tensor: Tensor) -> None:
        """Raises :class:`UsageError` where an input on the host holds a class or row that there is not."""
        for each in self.ranges.get(name, ()) if tensor.device.type == "cpu" else ():
            each.require(name, tensor)

    def _of(self, by_rows: Mapping[int, str]) -> int:
        return next(iter(by_rows), self.captured)

    def narrow(self, tensor: Tensor, name: str, start: int, count: int) -> Tensor:
        """Samples ``start`` to ``start + count`` of the input ``name``; whole if it has no samples."""
        spec = self.specs[name]
        if not spec.has_samples:
            return tensor
        dim = spec.dims.index(SAMPLE)
        each = spec.shape[dim] // self.captured
        return tensor.narrow(dim, start * each, count * each)

    def part(self, tensors: Sequence[Tensor], start: int, count: int) -> tuple[Tensor, ...]:
        """The same of the inputs that ``tensors`` are, in order."""
        return tuple(self.narrow(tensor, name, start, count) for name, tensor in zip(self.specs, tensors, strict=True))

    def split(self, tensor: Tensor, name: str, rows: Sequence[int]) -> tuple[Tensor, ...]:
        """The input ``name`` in parts of ``rows`` samples; each part whole if it has no samples."""
        spec = self.specs[name]
        if not spec.has_samples:
            return (tensor,) * len(rows)
        dim = spec.dims.index(SAMPLE)
        each = spec.shape[dim] // self.captured
        return torch.split(tensor, [count * each for count in rows], dim)

    def shape(self, name: str, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """``shape`` with ``rows`` samples."""
        spec = self.specs[name]
        return tuple(
            spec.shape[dim] // self.captured * rows if spec.dims[dim] == SAMPLE else extent
            for dim, extent in enumerate(shape)
        )


class WholeBatch:
    """A global batch that this process has whole.

    Args:
        tensors: in the order of the graph's inputs.
        planned: samples of each micro-batch of a full batch; the rows that are there fill them in order.

    Raises:
        UsageError: the tensors are not what the model takes, or hold more rows than planned, or none.
    """

    def __init__(self, inputs: InputSpecs, tensors: Sequence[Tensor], planned: tuple[int, ...]) -> None:
        self._inputs = inputs
        self._tensors = dict(zip(inputs.specs, tensors, strict=False))
        self.rows = filled(inputs.rows(tensors), planned)
        self._parts: dict[str, tuple[Tensor, ...]] = {}

    def shapes(self, microbatch: int) -> InputShapes:
        rows = self.rows[microbatch]
        return {n: self._inputs.shape(n, tuple(tensor.shape), rows) for n, tensor in self._tensors.items()}

    def part(self, name: str, microbatch: int, start: int, count: int) -> Tensor:
        parts = self._parts.get(name)
        if parts is None:  # all at once, as one is dear
            parts = self._parts[name] = self._inputs.split(self._tensors[name], name, self.rows)
        part = parts[microbatch]
        return part if count == self.rows[microbatch] else self._inputs.narrow(part, name, start, count)


class MicroBatches:
    """Micro-batches given one by one, each of its own size and shape.

    Args:
        micro_batches: for each, the tensors in the order of the graph's inputs.
        planned: number of micro-batches in the plan's program.

    Raises:
        UsageError: there are more than planned, or tensors are not what the model takes.
    """

    def __init__(self, inputs: InputSpecs, micro_batches: Sequence[Sequence[Tensor]], planned: int) -> None:
        if not 0 < len(micro_batches) <= planned:
            raise UsageError(f"the plan has {planned} micro-batches, the step was given {len(micro_batches)}")
        self._inputs = inputs
        self._tensors = [dict(zip(inputs.specs, tensors, strict=False)) for tensors in micro_batches]
        self.rows = (*(inputs.rows(tensors) for tensors in micro_batches), *[0] * (planned - len(micro_batches)))

    def shapes(self, microbatch: int) -> InputShapes:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors[microbatch].items()}

    def part(self, name: str, microbatch: int, start: int, count: int) -> Tensor:
        return self._inputs.narrow(self._tensors[microbatch][name], name, start, count)


def filled(rows: int, planned: tuple[int, ...]) -> tuple[int, ...]:
    """``rows`` over micro-batches of at most ``planned`` samples, in order: ``filled(10, (4, 4, 4))`` is ``(4, 4, 2)``.

    Raises:
        UsageError: there are no rows, or more than planned.
    """
    if not 0 < rows <= sum(planned):
        raise UsageError(
            f"a batch has {rows} samples, the plan's global batch is {sum(planned)}",
            ["a smaller batch fills the first micro-batches, a larger one does not fit"],
            [
                f"batches of up to {sum(planned)} samples",
                *([f"halopipe plan PROFILE --global-batch {rows}"] if rows else []),
            ],
        )
    sizes = []
    remaining = rows
    for size in planned:
        sizes.append(min(size, remaining))
        remaining -= sizes[-1]
    return tuple(sizes)


def part_in(batch: Batch, name: str, microbatch: int, box: Box, spec: TensorSpec) -> Tensor:
    """The part ``box`` of an input of a micro-batch, whose whole ``spec`` is given."""
    rows = batch.rows[microbatch]
    if SAMPLE not in spec.dims:
        return batch.part(name, microbatch, 0, rows)[slices(box, whole(spec.shape))]
    dim = spec.dims.index(SAMPLE)
    each = max(1, spec.shape[dim] // rows)
    start = box[dim].start // each
    stop = -(-box[dim].stop // each)
    origin = list(whole(spec.shape))
    origin[dim] = Interval(start * each, stop * each)
    return batch.part(name, microbatch, start, stop - start)[slices(box, tuple(origin))]
