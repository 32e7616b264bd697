"""A rank's part of each parameter and buffer of a divided stage, and the ranks that share its gradient.

    filters [0, 8) of conv1.weight over 4 ranks, samples x channel = 2 x 2
    rank 0, 2   [0, 4)        a group: their gradients are partial sums of the same part
    rank 1, 3   [4, 8)        another

What a layer uses of its parameters is its access relation's (:class:`planner.layers.division.LayerDivision`).  A rank
keeps that part alone, as a parameter of its own; one that is whole is the user's own object.

Which layers of a divided stage use which part of a parameter, buffer or constant, and whether they read it directly.

A layer's operator can run on a part of what it reads directly.  What it reads through another operator, such as a view
or the norm of a weight, has to be whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, fx, nn

from planner.ir.box import Box, volume, whole
from planner.ir.graph import Graph, TensorSpec
from planner.ir.plan import Decision
from planner.layers import kind
from planner.layers.division import Division, LayerDivision, divides
from planner.layers.stage_rules import refused_parts, unlike_parts
from runtime.captured import CapturedModule, attribute, main_nodes
from runtime.pipeline.routing import slices

_STATISTICS = "batch_norm"
_COPY = torch.ops.aten.clone.default


@dataclass(frozen=True, slots=True)
class Use:
    """What a layer uses of a parameter or buffer.

    Attributes:
        boxes: by position of the rank.
        is_direct: whether the layer's main operator reads it, and no other of its operators does but such as can be
            given a part of it as well.
    """

    layer: str
    boxes: tuple[Box, ...]
    is_direct: bool


def uses_of(model: CapturedModule, division: Division) -> dict[str, tuple[Use, ...]]:
    """The uses by the layers of a stage, by name of what is used, in the order of the graph."""
    mains = main_nodes(model)
    readers: dict[str, dict[str, list[fx.Node]]] = {}
    for node in model.graph_module.graph.nodes:
        for layer, reader in _readers(node, model) if node.op == "get_attr" else ():
            if layer in division.layers:
                readers.setdefault(str(node.target), {}).setdefault(layer, []).append(reader)
    by_name: dict[str, tuple[Use, ...]] = {}
    for name, by_layer in readers.items():
        tensor = attribute(model.graph_module, name)
        if not isinstance(tensor, Tensor):
            continue  # a graph that an operator calls
        uses = []
        for layer, nodes in by_layer.items():
            is_direct = _is_by_element([node for node in nodes if node is not mains[layer]], mains[layer])
            uses.append(Use(layer, _boxes(division.layers[layer], name, tensor, is_direct), is_direct))
        by_name[name] = tuple(uses)
    return by_name


def _readers(attribute: fx.Node, model: CapturedModule) -> Iterator[tuple[str, fx.Node]]:
    for user in attribute.users:
        layer = model.layer_of_node.get(user.name)
        if layer is not None:
            yield layer, user


def _is_by_element(readers: list[fx.Node], main: fx.Node) -> bool:
    """Whether the operators beside the main one, and all that is made of them, treat each element by itself.

    So does what makes an average over all batches of running statistics (:mod:`cuda_ops.dense.running_statistics`).
    """
    reached = set[fx.Node]()
    waiting = list(readers)
    while waiting:
        node = waiting.pop()
        if node is not main and node not in reached:
            reached.add(node)
            waiting += node.users
    read = {each for node in reached for each in node.all_input_nodes if not _is_of_one_number(each)}
    made = {each for each in read if each.op != "get_attr"}
    is_known = all(node.target is _COPY or torch.Tag.pointwise in getattr(node.target, "tags", ()) for node in reached)
    return is_known and made <= reached and len({str(each.target) for each in read - made}) <= 1


def _is_of_one_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.ndim


def _boxes(division: LayerDivision, name: str, tensor: Tensor, is_direct: bool) -> tuple[Box, ...]:
    """What each rank uses, as the access relation says.

    Of what is not trained, a frozen parameter is used as a trained one is, and running statistics go by channel; other
    buffers and constants stay whole, and forms take their part of them.
    """
    layer = division.layer
    if name in layer.parameters:
        return division.weights[layer.parameters.index(name)]
    shape = tuple(tensor.shape)
    is_by_channel = layer.kind == _STATISTICS and len(shape) == 1
    if not shape or not is_direct or not (isinstance(tensor, nn.Parameter) or is_by_channel):
        return (whole(shape),) * len(division.own)
    spec = TensorSpec(tuple(f"dim{dim}" for dim in range(len(shape))), shape, str(tensor.dtype).removeprefix("torch."))
    relation = kind(layer.kind)
    return tuple(relation.weight_boxes(layer, (spec,), box)[0] for box in division.done)


T = TypeVar("T", bound=Tensor)


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """What one rank has of a parameter or buffer.

    Attributes:
        shape: of the whole.
        boxes: of each rank of the stage, by position: equal, or disjoint.
        ranks: of the stage, by position.
        position: of this rank.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    ranks: tuple[int, ...]
    position: int

    @classmethod
    def of_whole(cls, tensor: Tensor, ranks: tuple[int, ...], rank: int) -> ParameterPart:
        """Every rank has all of it."""
        shape = tuple(tensor.shape)
        return cls(shape, (whole(shape),) * len(ranks), ranks, ranks.index(rank))

    @property
    def box(self) -> Box:
        """This rank's."""
        return self.boxes[self.position]

    @property
    def is_whole(self) -> bool:
        """Whether this rank has all of it."""
        return self.box == whole(self.shape)

    @property
    def is_divided(self) -> bool:
        """Whether some rank has not all of it."""
        return any(box != whole(self.shape) for box in self.boxes)

    @property
    def is_empty(self) -> bool:
        """Whether this rank has nothing of what has elements."""
        return not volume(self.box) and self.is_divided

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks that have this part, by growing number; a rank without elements is alone."""
        return group_at(self.boxes, self.ranks, self.position)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first that has this part."""
        return self.group[0] == self.ranks[self.position]

    @property
    def speaks(self) -> bool:
        """Whether this rank is the first of all that have some of it: what there is once for the whole is its."""
        some = [rank for rank, box in zip(self.ranks, self.boxes, strict=True) if volume(box)]
        return self.ranks[self.position] == min(some or self.ranks)

    def at(self, rank: int) -> tuple[Box, bool]:
        """The part of a rank of the stage, and whether it is the first that has it."""
        position = self.ranks.index(rank)
        return self.boxes[position], group_at(self.boxes, self.ranks, position)[0] == rank

    def cut(self, tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor; a view."""
        return tensor[slices(self.box, whole(self.shape))]


ParameterParts = Mapping[str, ParameterPart]
"""By the name of the parameter or buffer; those that are not named are whole on all ranks."""


def parts_of(model: CapturedModule, decision: Decision, stage: int, rank: int) -> dict[str, ParameterPart]:
    """What ``rank`` has of the parameters, buffers and constants that the layers of a divided ``stage`` read.

    Raises:
        UnsupportedModelError: layers use different parts of one parameter, or a part of what they do not read directly.
    """
    ranks = decision.stages[stage].ranks
    division = Division.of(model.graph, decision, stage, max(decision.micro_batches))
    parts: dict[str, ParameterPart] = {}
    for name, uses in uses_of(model, division).items():
        shape = tuple(attribute(model.graph_module, name).shape)
        boxes = _agreed(name, shape, uses, stage)
        parts[name] = ParameterPart(shape, boxes, ranks, ranks.index(rank))
    return parts


@torch.no_grad()
def sliced(attributes: Mapping[str, Tensor], parts: ParameterParts) -> dict[str, Tensor]:
    """Each attribute as this rank has it: the user's own object where that is whole, else a copy of the part.

    Parts of parameters are parameters.
    """
    return {name: _sliced(tensor, parts.get(name)) for name, tensor in attributes.items()}


def groups_of_parameters(graph: Graph, decision: Decision) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that share a part of a parameter, for the transport; of divided stages alone."""
    groups: dict[tuple[int, ...], None] = {}
    for stage, each in enumerate(decision.stages):
        if not divides(decision, stage, graph):
            continue
        division = Division.of(graph, decision, stage, max(decision.micro_batches))
        for layer in division.layers.values():
            for boxes in layer.weights:
                groups |= dict.fromkeys(group_at(boxes, each.ranks, position) for position in range(len(boxes)))
    return tuple(group for group in groups if len(group) > 1)


def group_at(boxes: tuple[Box, ...], ranks: tuple[int, ...], position: int) -> tuple[int, ...]:
    """The ranks with the box of ``position``, by growing number; one without elements is alone."""
    if not volume(boxes[position]):
        return (ranks[position],)
    return tuple(sorted(rank for rank, box in zip(ranks, boxes, strict=True) if box == boxes[position]))


def _sliced(tensor: Tensor, part: ParameterPart | None) -> Tensor:
    if part is None or part.is_whole:
        return tensor
    own = part.cut(tensor).clone(memory_format=torch.contiguous_format)
    if not isinstance(tensor, nn.Parameter):
        return own
    parameter = nn.Parameter(own, tensor.requires_grad)
    vars(parameter).update(vars(tensor))  # what people put on it, which optimisers' factories read
    return parameter


def _agreed(name: str, shape: tuple[int, ...], uses: Iterable[Use], stage: int) -> tuple[Box, ...]:
    """The boxes by position, which are the same for all uses (:mod:`planner.layers.stage_rules`)."""
    everything = tuple(uses)
    boxes = everything[0].boxes
    if all(box == whole(shape) for use in everything for box in use.boxes):
        return boxes
    layers = ", ".join(dict.fromkeys(use.layer for use in everything))
    if indirect := [use.layer for use in everything if not use.is_direct]:
        raise refused_parts(
            name, stage, layers, f"layer {indirect[0]} reads it through another operator (a view, a norm)"
        )
    for use in everything[1:]:
        if use.boxes != boxes:
            raise refused_parts(name, stage, layers, unlike_parts((everything[0].layer, boxes), (use.layer, use.boxes)))
    return boxes
