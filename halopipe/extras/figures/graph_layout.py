r"""A network on paper: layers from left to right, wrapped into rows as words are, each value on a lane of its own.

A layer stands in the column of its depth (the longest path to it) and on the lowest lane that is free: a lane is held
from the layer that makes a value until the last layer that reads it, so that no edge runs through a box.  A residual
block is two lanes, and a chain is one:

    conv1 - relu - conv2 - add -          columns 0 1 2 3, lane 0
          \_______________/              lane 1 from relu to add

Reference for the columns: Sugiyama, Tagawa and Toda 1981, their first step; lanes are those of interval graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halopipe.terminal import units
from planner.costs.cost_model import CostModel
from planner.costs.rows import layout_text
from planner.ir.errors import MissingMeasurementError
from planner.ir.graph import SAMPLE, Graph, Layer, producer
from planner.ir.plan import Placement, Plan
from planner.ir.profile import Profile

BOX_WIDTH = 0.84
BOX_HEIGHT = 0.66
"""Of a column's and a lane's extent."""

_ROW_GAP = 0.45
LANES_PER_COLUMN = 3.0
"""A column's width over a lane's height."""


_ASPECTS = {"wide": 2.3, "narrow": 0.8}
"""Of the drawn network: for a desk, and for a telephone."""

_EVIDENCE = {
    "measured": "measured at this size",
    "interpolated": "read between measured sizes",
    "family": "by a model of measured layers like it",
    "kernels": "by models of its kernels, which others measured on such a device",
    "datasheet": "from a datasheet",
}


@dataclass(frozen=True, slots=True)
class NetworkDrawing:
    """Where everything is, in columns (x) and lanes (y, downwards).

    Attributes:
        boxes: centre of each layer.
        lines: (x0, y0, x1, y1) of every piece of an edge; level, or from one lane to another.
        width, height: of the whole.
    """

    boxes: tuple[tuple[float, float], ...]
    lines: tuple[tuple[float, float, float, float], ...]
    width: float
    height: float


def draw(num_layers: int, edges: Sequence[tuple[int, int]], aspect: float) -> NetworkDrawing:
    """Lays a network out so that it is about ``aspect`` times as wide as high, a column being three lanes wide.

    Args:
        num_layers: their numbers are in topological order.
        edges: (layer that makes a value, layer that reads it).
    """
    columns = _columns(num_layers, edges)
    lanes = [0] * num_layers
    last_read = list(columns)
    for src, dst in edges:
        last_read[src] = max(last_read[src], columns[dst])
    _give_lanes(columns, lanes, last_read, edges)
    num_columns = max(columns, default=-1) + 1
    highest = [0] * num_columns  # lanes of each column, passing values included
    for layer, lane in enumerate(lanes):
        for column in range(columns[layer], max(columns[layer] + 1, last_read[layer])):
            highest[column] = max(highest[column], lane)
    tops: list[float] = []
    per_row = num_columns
    height = 1.0
    for per_row in _row_lengths(num_columns):
        tops, height = _rows(highest, per_row)
        if per_row * LANES_PER_COLUMN <= aspect * height or per_row == 1:
            break
    per_row = max(1, per_row)
    boxes = tuple((c % per_row + 0.5, tops[c // per_row] + lane + 0.5) for c, lane in zip(columns, lanes, strict=True))
    lines = dict.fromkeys(piece for edge in edges for piece in _pieces(edge, columns, boxes, lanes, tops, per_row))
    return NetworkDrawing(boxes, tuple(lines), float(min(per_row, num_columns)), height)


def edges_of(reads: Mapping[str, Sequence[str]]) -> list[tuple[int, int]]:
    """Pairs of layers' numbers, each once; what is read and no layer is an input of the step."""
    number = {name: index for index, name in enumerate(reads)}
    pairs = ((number[maker], number[name]) for name, makers in reads.items() for maker in makers if maker in number)
    return list(dict.fromkeys(pairs))


def _columns(num_layers: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    columns = [0] * num_layers
    for src, dst in sorted(edges, key=lambda edge: edge[1]):
        columns[dst] = max(columns[dst], columns[src] + 1)
    return columns


def _give_lanes(
    columns: Sequence[int], lanes: list[int], last_read: Sequence[int], edges: Sequence[tuple[int, int]]
) -> None:
    """A layer goes on in the lane of a value that it is the last to read, else in the lowest that nobody holds."""
    makers: dict[int, list[int]] = {}
    for src, dst in edges:
        makers.setdefault(dst, []).append(src)
    held: dict[int, int] = {}  # by lane, the column until which it is
    for layer in sorted(range(len(columns)), key=lambda layer: (columns[layer], layer)):
        column = columns[layer]
        ending = [lanes[maker] for maker in makers.get(layer, ()) if last_read[maker] == column]
        lane = min((lane for lane in ending if held.get(lane, -1) <= column), default=-1)
        if lane < 0:
            lane = next(number for number in range(len(held) + 1) if held.get(number, -1) <= column)
        lanes[layer] = lane
        held[lane] = max(last_read[layer], column + 1)


def _row_lengths(num_columns: int) -> list[int]:
    """Lengths of rows to try, the longest first, each a twentieth shorter."""
    lengths = []
    length = float(num_columns)
    while length > 1:
        lengths.append(round(length))
        length = min(length - 1, length * 0.95)
    return list(dict.fromkeys([*lengths, 1]))


def _rows(highest: Sequence[int], per_row: int) -> tuple[list[float], float]:
    """The top of each row, and the height of all."""
    tops = []
    top = 0.0
    for start in range(0, len(highest), per_row):
        tops.append(top)
        top += max(highest[start : start + per_row]) + 1 + _ROW_GAP
    return tops, max(1.0, top - _ROW_GAP)


def _pieces(
    edge: tuple[int, int],
    columns: Sequence[int],
    boxes: Sequence[tuple[float, float]],
    lanes: Sequence[int],
    tops: Sequence[float],
    per_row: int,
) -> list[tuple[float, float, float, float]]:
    """An edge stays on its maker's lane up to the column before its reader; at the end of a row it goes on below."""
    src, dst = edge
    half = BOX_WIDTH / 2
    x, _ = boxes[src]
    end_x, end_y = boxes[dst]
    pieces = []
    x = x + half
    row = columns[src] // per_row
    last = columns[dst] // per_row
    while row < last:
        y = tops[row] + lanes[src] + 0.5
        pieces.append((x, y, float(per_row), y))
        row = row + 1
        x = 0.0
    y = tops[row] + lanes[src] + 0.5
    turn = end_x - 1 + half
    if turn > x:
        pieces.append((x, y, turn, y))
        x = turn
    return [*pieces, (x, y, end_x - half, end_y)]


def network(plan: Plan, profile: Profile | None) -> dict[str, Any]:
    """The drawn network: boxes and lines for each aspect, and what is said of each layer."""
    edges = layer_edges(plan, profile)
    costs = layer_costs(plan, profile) if profile is not None else {}
    graph = profile.graph if profile is not None else None
    layers_by_name = graph.by_name() if graph is not None else {}
    layers = []
    for name, placement in plan.decision.layers.items():
        facts = _divided(plan, placement)
        layer = layers_by_name.get(name)
        if graph is not None and layer is not None:
            facts += _made(graph, layer)
        if name in costs:
            facts += _costs(*costs[name])
        layers.append([name, layer.kind if layer is not None else "", placement.stage, facts])
    drawn = {word: draw(len(layers), edges, aspect) for word, aspect in _ASPECTS.items()}
    return {
        "layers": layers,
        "edges": edges,
        "drawn": {
            word: {
                "boxes": [[round(x, 2), round(y, 2)] for x, y in one.boxes],
                "lines": [[round(number, 2) for number in line] for line in one.lines],
                "size": [round(one.width, 2), round(one.height, 2)],
            }
            for word, one in drawn.items()
        },
    }


def _divided(plan: Plan, placement: Placement) -> list[str]:
    """How the ranks of its stage share a layer; nothing of one rank."""
    is_shared = len(plan.decision.stages[placement.stage].ranks) > 1
    return [f"divided: {layout_text(placement, plan.decision.micro_batches[0])}"] if is_shared else []


def _made(graph: Graph, layer: Layer) -> list[str]:
    """What a layer makes, and the size of its parameters if it has any."""
    shapes = ["x".join(map(str, spec.shape)) or "a scalar" for spec in layer.outputs]
    size = graph.parameter_bytes(frozenset({layer.name}))
    return [
        f"makes {', '.join(shapes)} for {units.count(graph.samples, 'sample')}",
        *([f"parameters {units.size(size)}"] if size else []),
    ]


def _costs(forward_s: float, backward_s: float, evidence: str, of: str) -> list[str]:
    """What a layer takes, and how that is known."""
    return [
        f"forward {units.seconds(forward_s)}, backward {units.seconds(backward_s)} ({of})",
        _EVIDENCE.get(evidence, evidence),
    ]


def layer_edges(plan: Plan, profile: Profile | None) -> list[tuple[int, int]]:
    """(maker, reader) by position in the plan; without the profile none are known, and layers stand in their order."""
    if profile is None:
        return [(number, number + 1) for number in range(len(plan.decision.layers) - 1)]
    reads = {layer.name: [producer(value) for value in layer.inputs] for layer in profile.graph.layers}
    return edges_of({name: reads.get(name, []) for name in plan.decision.layers})


def layer_costs(plan: Plan, profile: Profile) -> dict[str, tuple[float, float, str, str]]:
    """By layer: seconds forward and backward on its first rank, how they are known, and of what they are.

    Of a layer that is cut along more than samples: of all of it on one device, since its parts are priced together.
    """
    cost_model = CostModel(profile)
    decision = plan.decision
    by_layer = {}
    index = {layer.name: number for number, layer in enumerate(profile.graph.layers)}
    full = decision.micro_batches[0]
    for name, placement in decision.layers.items():
        ranks = decision.stages[placement.stage].ranks
        whole = any(dim != SAMPLE for dim in placement.cuts) or placement.ways > 1
        samples = full if whole or not placement.cuts else placement.layout.samples(full)[0]
        try:
            table = cost_model.at(cost_model.kind(ranks[0]), samples, len(ranks) > 1)
        except MissingMeasurementError:
            continue
        at = index[name]
        forward_s, backward_s = (float(sums[at + 1] - sums[at]) for sums in (table.forward_s, table.backward_s))
        of = f"{units.count(samples, 'sample')}{', undivided' if whole else ''}"
        by_layer[name] = (forward_s, backward_s, table.evidence[at], of)
    return by_layer
