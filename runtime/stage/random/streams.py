"""Random numbers that depend on the seed, the step, the micro-batch and the node that draws them, and on nothing else.

        micro-batch 2, node dropout_1, 6 rows      011 001 | 101 110 | 010 111      in blocks of 2
        rank 0 with 3 rows draws                   011 001 | 101                    the first two
        rank 1 with 3 rows draws                               110 | 010 111        the last two

So a plan draws what one device draws, whatever its stages, shares, schedule and recomputation.  Floats are drawn with
32 bits whatever the model's dtype: a run in float64 is the exact twin of one in float32.

Where a stage is divided along other dims than samples, a rank draws a part of a layer's numbers (:class:`DrawnPart`).

        micro-batch 2, node dropout_1, 4 samples of 6      011001 101110 | 010111 001011      in blocks of 2
        a rank with samples [1, 3) and rows [2, 4)                  11       01               draws both blocks

So ranks draw, whole along other dims, the samples of which they need a part, and keep their part: copies and halos get
the numbers that their owner gets.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from cuda_ops.dense.evaluation import is_random
from cuda_ops.device import driver
from planner.ir.box import Box, Interval, whole
from planner.ir.errors import StageFailedError
from runtime.captured import CapturedModule, makers
from runtime.pipeline.routing import slices
from runtime.stage.cut import NodeRule
from runtime.stage.modes import MicrobatchShard
from runtime.stage.random.layers import Filled, drawing
from runtime.stage.shapes import SampleDims, cannot_share

BLOCK = 1 << 14
"""Least numbers of a block: few enough to waste little where a rank has a part of one, enough to outweigh its start."""


@dataclass(frozen=True, slots=True)
class DrawnPart:
    """A rank's part of what a node draws.

    Attributes:
        start, count: the samples of which it does a part.
        total: samples of the micro-batch.
        box: the numbers that it needs of those; None: all that these samples have.
        shape: that ``box`` is a part of.
    """

    start: int
    count: int
    total: int
    box: Box | None = None
    shape: tuple[int, ...] = ()


class DrawnParts(Protocol):
    """Where the layers of a divided stage draw."""

    def place(self, layer: str, is_main: bool) -> DrawnPart:
        """In the micro-batch that is being run; ``is_main``: by the layer's own operator, not one that helps it."""

    def parts_of_samples(self, layer: str) -> int:
        """Into how many parts the samples of a layer are cut."""

    def draws_all(self, layer: str) -> bool:
        """Whether every rank draws all that one device draws."""


def drawn_part(
    place: DrawnPart,
    dim: int | None,
    dtype: torch.dtype,
    device: torch.device,
    filled: Filled,
    generator: Callable[[int], torch.Generator],
    num_dims: int | None = None,
) -> Tensor:
    """The numbers of ``place.box``.

    Args:
        dim: that samples lie along; None: the numbers are the same for all samples, and drawn at once.
        generator: for the block that begins with a sample.
        num_dims: the dims after these are 1.
    """
    box, shape = _shortened(place, num_dims)
    local = tuple(map(len, box))
    if not all(local):
        return torch.empty(local, dtype=dtype, device=device)
    if dim is None or (num_dims is not None and dim >= num_dims):
        drawn = filled(torch.empty(shape, dtype=dtype, device=device), generator(0))
        return drawn[slices(box, whole(shape))].contiguous()
    each, rest = divmod(shape[dim], place.total)
    if rest:
        raise StageFailedError(f"numbers of shape {shape} are drawn for {place.total} samples", [f"along dim {dim}"])
    rows = math.ceil(BLOCK * place.total / math.prod(shape))
    begin = box[dim].start // each
    end = -(-box[dim].stop // each)
    numbers = torch.empty(local, dtype=dtype, device=device)
    for first in range(begin - begin % rows, end, rows):
        block = Interval(each * first, each * min(first + rows, place.total))
        drawn = filled(
            torch.empty((*shape[:dim], len(block), *shape[dim + 1 :]), dtype=dtype, device=device), generator(first)
        )
        shared = (*box[:dim], box[dim] & block, *box[dim + 1 :])
        numbers[slices(shared, box)] = drawn[slices(shared, (*whole(shape[:dim]), block, *whole(shape[dim + 1 :])))]
    return numbers


def _shortened(place: DrawnPart, num_dims: int | None) -> tuple[Box, tuple[int, ...]]:
    box = place.box or ()
    if num_dims is None:
        return box, place.shape
    ones = len(box) - num_dims
    return (*box[:num_dims], *(Interval(0, 1),) * ones), (*place.shape[:num_dims], *(1,) * ones)


Shape = tuple[int, ...]
_DEFAULT_GENERATOR = threading.Lock()  # a process has one, and a plan's ranks may be threads


@dataclass(slots=True)
class CounterRng:
    """What is drawn for now; to be set before each forward.

    Attributes:
        seed: of the run.
        step, microbatch: counted from 0.
        start, count: this rank's rows of the micro-batch.
        total: rows of the micro-batch.
    """

    seed: int
    step: int = 0
    microbatch: int = 0
    start: int = 0
    count: int = 0
    total: int = 0
    _generators: dict[torch.device, torch.Generator] = field(default_factory=dict, init=False, repr=False)

    def at(self, microbatch_shard: MicrobatchShard) -> None:
        """What is run next."""
        self.microbatch = microbatch_shard.of
        self.total = microbatch_shard.total
        self.start = microbatch_shard.start
        self.count = microbatch_shard.num_samples

    def key(self, name: str, index: int = 0, first: int = 0) -> int:
        """64 bits for the draw ``index`` of the node ``name``, of the rows from ``first`` on."""
        text = f"{self.seed}/{self.step}/{self.microbatch}/{name}/{index}/{first}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def generator(self, device: torch.device, key: int) -> torch.Generator:
        """A generator that starts from ``key``, good until the next call."""
        cached = self._generators.get(device)
        if cached is None:
            cached = self._generators[device] = driver.generator(device)
        return cached.manual_seed(key)


@dataclass(frozen=True, slots=True)
class NodeStream:
    """Where the operators of :mod:`runtime.stage.random.layers` get their numbers.

    Attributes:
        node: name of the node that draws.
        dim: of the node's result that the samples lie along; None where it has none, or one rank has them all.
        place: in a divided stage, which part of the numbers this rank has now; None: all of its rows.
    """

    rng: CounterRng
    node: str
    dim: int | None
    place: Callable[[], DrawnPart] | None = None

    def fill(
        self,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device,
        filled: Filled,
        *,
        index: int = 0,
        num_dims: int | None = None,
    ) -> Tensor:
        """A tensor of this rank's numbers, drawn by ``filled``.

        Args:
            shape: of this rank's part; the samples lie along ``dim``.  In a divided stage the place says it.
            index: of the draw, where a node draws more than once.
            num_dims: the dims after these are 1.
        """
        rng = self.rng
        dim = self.dim
        place = None if self.place is None else self.place()
        if place is not None and place.box is not None:
            return drawn_part(place, dim, dtype, device, filled, partial(self._generator, device, index), num_dims)
        numbers = torch.empty(shape, dtype=dtype, device=device)
        if not all(shape):
            return numbers
        if dim is None or (num_dims is not None and dim >= num_dims):
            return filled(numbers, self._generator(device, index))
        self._fill_blocks(numbers, dim, place or DrawnPart(rng.start, rng.count, rng.total), filled, index)
        return numbers

    def _fill_blocks(self, numbers: Tensor, dim: int, place: DrawnPart, filled: Filled, index: int) -> None:
        """Fills ``numbers`` by those of whole samples, in blocks, which are the same however samples are shared out."""
        shape = numbers.shape
        each, rest = divmod(shape[dim], place.count)
        if rest:
            raise StageFailedError(
                f"node {self.node} draws numbers of shape {tuple(shape)} for {place.count} samples",
                [f"along dim {dim}"],
            )
        rows = math.ceil(BLOCK * place.count / math.prod(shape))
        stop = place.start + place.count
        for first in range(place.start - place.start % rows, stop, rows):
            last = min(first + rows, place.total)
            begin = max(first, place.start)
            end = min(last, stop)
            part = numbers.narrow(dim, each * (begin - place.start), each * (end - begin))
            generator = self._generator(numbers.device, index, first)
            if (begin, end) == (first, last) and part.is_contiguous():
                filled(part, generator)
            else:
                block = numbers.new_empty((*shape[:dim], each * (last - first), *shape[dim + 1 :]))
                part.copy_(filled(block, generator).narrow(dim, each * (begin - first), each * (end - begin)))

    def _generator(self, device: torch.device, index: int, first: int = 0) -> torch.Generator:
        return self.rng.generator(device, self.rng.key(self.node, index, first))

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function`` on the process's own generator, which is put back afterwards."""
        generator = _default_generator(args, kwargs)
        with _DEFAULT_GENERATOR:
            state = generator.get_state()
            generator.manual_seed(self.rng.key(self.node))
            try:
                return function(*args, **kwargs)
            finally:
                generator.set_state(state)


class RandomNodes:
    """The nodes of a captured model that draw random numbers.

    Attributes:
        layers: that draw, in order.
    """

    def __init__(self, model: CapturedModule) -> None:
        self._dims = SampleDims(model)
        self._layer_of_node = model.layer_of_node
        nodes = [node for node in model.graph_module.graph.nodes if node.name in model.layer_of_node]
        self._main = frozenset(node.name for node in makers(model).values())
        self.layers = tuple(dict.fromkeys(model.layer_of_node[node.name] for node in nodes if is_random(node)))

    def rule(self, rng: CounterRng, num_ranks: int = 1, places: DrawnParts | None = None) -> NodeRule:
        """The rule that makes the nodes of a stage on ``num_ranks`` ranks draw by ``rng``.

        Args:
            places: of a divided stage; None: its ranks share rows.

        It raises :class:`UnsupportedModelError` for a node that several ranks cannot draw together.
        """

        def rule(node: fx.Node) -> Callable[..., Any] | None:
            if not is_random(node):
                return None
            drawn = drawing(node.target)
            layer = self._layer_of_node.get(node.name, node.name)
            draws_all = num_ranks == 1 if places is None else places.draws_all(layer)
            if drawn is None and not draws_all:
                raise cannot_share(layer, f"its numbers cannot be drawn in parts ({node.target})")
            parts = num_ranks if places is None else places.parts_of_samples(layer)
            place = None if places is None else partial(places.place, layer, node.name in self._main)
            noise = NodeStream(rng, node.name, self._dims.of(node, layer, parts), place)
            target: Any = node.target
            return partial(noise.run, target) if drawn is None else partial(drawn, noise)

        return rule

    def noise(self, node: fx.Node, rng: CounterRng) -> NodeStream:
        """Where the numbers of ``node`` come from on one device."""
        return NodeStream(rng, node.name, self._dims.of(node, self._layer_of_node.get(node.name, node.name), 1))


def _default_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    """That of the device on which an operator with these arguments runs."""
    device = next((each.device for each in args if isinstance(each, Tensor)), kwargs.get("device"))
    return driver.default_generator(torch.device("cpu") if device is None else torch.device(device))
