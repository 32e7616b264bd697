"""Random numbers that depend on the seed, the step, the micro-batch and the node that draws them, and on nothing else.

        micro-batch 2, node dropout_1, 6 rows      011 001 | 101 110 | 010 111      in blocks of 2
        rank 0 with 3 rows draws                   011 001 | 101                    the first two
        rank 1 with 3 rows draws                               110 | 010 111        the last two

So a plan draws what one device draws, whatever its stages, shares, schedule and recomputation.  Floats are drawn with
32 bits whatever the model's dtype: a run in float64 is the exact twin of one in float32.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from planner.ir.errors import StageFailedError
from runtime.stages.aliases import arguments_of
from runtime.stages.captured import CapturedModel, makers
from runtime.stages.cut import Rule
from runtime.stages.drawing import OPERATORS
from runtime.stages.manner import Portion
from runtime.stages.numbers import Filled
from runtime.stages.places import BLOCK, Place, Places, drawn_part
from runtime.stages.sample_dims import SampleDims, cannot_share

Shape = tuple[int, ...]
_DEFAULT_GENERATOR = threading.Lock()  # a process has one, and a plan's ranks may be threads


@dataclass(slots=True)
class Draw:
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

    def at(self, portion: Portion) -> None:
        """What is run next."""
        self.microbatch, self.total = portion.microbatch, portion.total
        self.start, self.count = portion.start, portion.num_samples

    def key(self, name: str, index: int = 0, first: int = 0) -> int:
        """64 bits for the draw ``index`` of the node ``name``, of the rows from ``first`` on."""
        text = f"{self.seed}/{self.step}/{self.microbatch}/{name}/{index}/{first}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def generator(self, device: torch.device, key: int) -> torch.Generator:
        """A generator that starts from ``key``, good until the next call."""
        found = self._generators.get(device)
        if found is None:
            found = self._generators[device] = torch.Generator(device)
        return found.manual_seed(key)


@dataclass(frozen=True, slots=True)
class Noise:
    """Where the operators of :mod:`runtime.stages.drawing` get their numbers.

    Attributes:
        node: name of the node that draws.
        dim: of the node's result that the samples lie along; None where it has none, or one rank has them all.
        place: in a divided stage, which part of the numbers this rank has now; None: all of its rows.
    """

    draw: Draw
    node: str
    dim: int | None
    place: Callable[[], Place] | None = None

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
        """A tensor of this rank's rows, drawn by ``filled``.

        Rows are drawn in blocks, which are the same however they are shared out.

        Args:
            shape: of this rank's part; the samples lie along ``dim``.  In a divided stage the place says it.
            index: of the draw, where a node draws more than once.
            num_dims: the dims behind these are 1.
        """
        draw, dim = self.draw, self.dim
        start, count, total = draw.start, draw.count, draw.total
        if self.place is not None:
            place = self.place()
            if place.box is not None:
                generator = partial(self._generator, device, index)
                return drawn_part(place, dim, dtype, device, filled, generator, num_dims)
            start, count, total = place.start, place.count, place.total
        if not all(shape):
            return torch.empty(shape, dtype=dtype, device=device)
        if dim is None or (num_dims is not None and dim >= num_dims):
            return filled(torch.empty(shape, dtype=dtype, device=device), self._generator(device, index))
        each, rest = divmod(shape[dim], count)
        if rest:
            raise StageFailedError(
                f"node {self.node} draws numbers of shape {shape} for {count} samples", [f"along dim {dim}"]
            )
        rows = math.ceil(BLOCK * count / math.prod(shape))
        stop = start + count
        found = torch.empty(shape, dtype=dtype, device=device)
        for first in range(start - start % rows, stop, rows):
            last = min(first + rows, total)
            begin, end = max(first, start), min(last, stop)
            part = found.narrow(dim, each * (begin - start), each * (end - begin))
            generator = self._generator(device, index, first)
            if (begin, end) == (first, last) and part.is_contiguous():
                filled(part, generator)
            else:
                block = (*shape[:dim], each * (last - first), *shape[dim + 1 :])
                drawn = filled(torch.empty(block, dtype=dtype, device=device), generator)
                part.copy_(drawn.narrow(dim, each * (begin - first), each * (end - begin)))
        return found

    def _generator(self, device: torch.device, index: int, first: int = 0) -> torch.Generator:
        return self.draw.generator(device, self.draw.key(self.node, index, first))

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``function`` on the process's own generator, which is put back afterwards."""
        generator = _default_generator(args, kwargs)
        with _DEFAULT_GENERATOR:
            state = generator.get_state()
            generator.manual_seed(self.draw.key(self.node))
            try:
                return function(*args, **kwargs)
            finally:
                generator.set_state(state)


class Draws:
    """The nodes of a captured model that draw random numbers.

    Attributes:
        layers: that draw, in order.
    """

    def __init__(self, model: CapturedModel) -> None:
        self._dims = SampleDims(model)
        self._layer_of_node = model.layer_of_node
        nodes = [node for node in model.graph_module.graph.nodes if node.name in model.layer_of_node]
        self._main = frozenset(node.name for node in makers(model).values())
        self.layers = tuple(dict.fromkeys(model.layer_of_node[node.name] for node in nodes if is_random(node)))

    def rule(self, draw: Draw, num_ranks: int = 1, places: Places | None = None) -> Rule:
        """The rule that makes the nodes of a stage on ``num_ranks`` ranks draw by ``draw``.

        Args:
            places: of a divided stage; None: its ranks share rows.

        It raises :class:`UnsupportedModelError` for a node that several ranks cannot draw together.
        """

        def rule(node: fx.Node) -> Callable[..., Any] | None:
            if not is_random(node):
                return None
            drawn = OPERATORS.get(node.target)
            layer = self._layer_of_node.get(node.name, node.name)
            draws_all = num_ranks == 1 if places is None else places.draws_all(layer)
            if drawn is None and not draws_all:
                raise cannot_share(layer, f"its numbers cannot be drawn in parts ({node.target})")
            parts = num_ranks if places is None else places.parts_of_samples(layer)
            place = None if places is None else partial(places.place, layer, node.name in self._main)
            noise = Noise(draw, node.name, self._dims.of(node, layer, parts), place)
            return partial(noise.run, node.target) if drawn is None else partial(drawn, noise)

        return rule

    def noise(self, node: fx.Node, draw: Draw) -> Noise:
        """Where the numbers of ``node`` come from on one device."""
        return Noise(draw, node.name, self._dims.of(node, self._layer_of_node.get(node.name, node.name), 1))


def is_random(node: fx.Node) -> bool:
    """Whether ``node`` draws random numbers; dropout of nothing does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    arguments = arguments_of(node)
    switches = [arguments[name] for name in ("train", "training") if name in arguments]
    if node.target is torch.ops.aten.rrelu.default and not switches:
        return False  # off unless it is said to train
    names = {argument.name for argument in node.target._schema.arguments} & {"dropout", "dropout_p"}
    is_dropout = names or "dropout" in str(node.target)
    rates = [arguments[name] for name in (*names, "p") if name in arguments]
    return False not in switches and not (is_dropout and not any(rates))


def _default_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    """That of the device on which an operator with these arguments runs."""
    device = next((each.device for each in args if isinstance(each, Tensor)), kwargs.get("device"))
    device = torch.device("cpu") if device is None else torch.device(device)
    if device.type == "cuda":
        generator: torch.Generator = torch.cuda.default_generators[device.index or 0]
        return generator
    return torch.default_generator
