"""What layers ask of the stages that hold them: one table, which searches keep to and the runtime refuses by.

    what a layer has                                     what is asked                           said in the graph by
    ---------------------------------------------------  --------------------------------------  ----------------------
    a buffer that one layer writes and others use        all of them are in one stage            ``SHARED_STATE``
    a buffer that it writes from samples                 its stage has one rank                  ``KEEPS_SAMPLES``
    a Function whose backward is not linear              ranks of its stage divide samples only  ``NOT_LINEAR_BACKWARD``
    a parameter that other layers of its stage use       all of them use the same part of it     ``Layer.parameters``
    statistics of batch norm that others use as well     all have the same channels              ``SHARED_STATISTICS``
    numbers drawn for nodes of a sampled graph           its stage has one rank                  ``SEEDS``
    nodes of several seeds that it mixes                 every stage has one rank                ``SEEDS``
    sites; terms of a loss that needs the whole batch    gradients are not divided (ZeRO-2, 3)   dims, kinds
    a term of the loss that other layers read            with ZeRO-2, 3: those are in its stage  kinds
    parameters in parts                                  an optimiser that is not divided        ``Layer.parameters``

Copies of a buffer on several ranks stay equal where what is written follows from parameters and buffers alone, as the
average of weights does that a mean teacher keeps; nothing is asked of such a layer.

A search is given what concerns whole stages as side constraints (:func:`rules_of_state`), and looks at no layout that
breaks the others (:func:`may_be_laid_out`); what divides gradients is asked of :func:`why_gradients_stay_whole` before.
A plan is held against all of them by :func:`require_stages`.

Along which dims a layer may be cut at all follows from its access relation (``SizedLayer.divisible``), and what a cut
moves is priced by :mod:`planner.costs.communication.resharding`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from planner.ir.box import Box, Boxes, whole
from planner.ir.constraints import REPLICAS, TOGETHER, YES, escaped
from planner.ir.errors import UnsupportedModelError, operator_of
from planner.ir.graph import (
    KEEPS_SAMPLES,
    NOT_LINEAR_BACKWARD,
    SAMPLE,
    SEEDS,
    SHARED_STATISTICS,
    Graph,
    Layer,
    producer,
)
from planner.ir.plan import Decision, Placement
from planner.ir.problem import Rule
from planner.layers._samples import batch_wide_layers, prepared_inputs
from planner.layers.division import LayerDivision, divides, layer_division
from planner.layers.sized import AXES

_CHANNELS = AXES["channel"][1]


def rules_of_state(graph: Graph, *, divides_gradients: bool = False) -> dict[Rule, str]:
    """What every plan of ``graph`` is to hold because of what layers write: side constraints, and why.

    Args:
        divides_gradients: whether ranks of a stage divide gradients (ZeRO-2, 3): each has terms of its own samples.
    """
    rules = {}
    if divides_gradients and (terms := _with_readers(graph, _terms(graph))):
        why = f"layers {', '.join(terms)} make the loss of terms, of which each rank has those of its samples"
        rules[Rule(",".join(map(escaped, terms)), TOGETHER, YES)] = why
    for buffer, names in _sharing_state(graph).items():
        why = f"layers {', '.join(names)} use the buffer {buffer}, which one of them writes"
        rules[Rule(",".join(map(escaped, names)), TOGETHER, YES)] = why
    for layer in graph.layers:
        if KEEPS_SAMPLES in layer.attributes:
            why = f"layer {layer.name} writes what it makes of samples to the buffer {layer.attributes[KEEPS_SAMPLES]}"
            rules[Rule(escaped(layer.name), REPLICAS, "1")] = why
        if SEEDS in layer.attributes:
            mixes = layer.attributes[SEEDS] == "mixes"
            rules[Rule("*" if mixes else escaped(layer.name), REPLICAS, "1")] = _of_seeds(layer)
    return rules


def why_gradients_stay_whole(graph: Graph) -> str:
    """Why no ranks of a stage can divide gradients or parameters of this network; empty: they can."""
    if prepared_inputs(graph):
        return "sites of clouds and sampled graphs: their layers sum what ranks have in ways of their own"
    terms = _terms(graph)
    batch_wide = batch_wide_layers(graph)
    if terms and batch_wide:
        return f"layer {terms[0]} makes a term of the loss, and layer {batch_wide[0]} needs it of the whole batch"
    return ""


def _terms(graph: Graph) -> tuple[str, ...]:
    """Layers that make terms of the loss, which other layers read."""
    read = {producer(value) for layer in graph.layers for value in layer.inputs}
    return tuple(layer.name for layer in graph.layers if layer.kind == "loss" and layer.name in read)


def _with_readers(graph: Graph, names: Iterable[str]) -> tuple[str, ...]:
    """Layers, and all that is made of what they make."""
    dependants = set(names)
    for layer in graph.layers:
        if any(producer(value) in dependants for value in layer.inputs):
            dependants.add(layer.name)
    return tuple(layer.name for layer in graph.layers if layer.name in dependants)


def sharing_weights(graph: Graph) -> frozenset[str]:
    """Names of the layers that use a weight which others use too."""
    tied = {index for layers in graph.tied_layers().values() for index in layers}
    return frozenset(
        layer.name for index, layer in enumerate(graph.layers) if index in tied or SHARED_STATISTICS in layer.attributes
    )


def may_be_laid_out(layer: Layer, parts: Mapping[str, int], num_ranks: int, shares_weight: bool) -> bool:
    """Whether a search may divide the layer so, in a stage whose ranks divide more than samples.

    That layers which share a weight happen to use the same parts of it, no search looks for: they are not cut along
    channels.

    Args:
        parts: by dim.
        shares_weight: whether it is one of :func:`sharing_weights`.
    """
    if NOT_LINEAR_BACKWARD in layer.attributes and parts.get(SAMPLE, 1) < num_ranks:
        return False
    return not shares_weight or all(parts.get(dim, 1) == 1 for dim in _CHANNELS)


def require_stages(decision: Decision, graph: Graph) -> None:
    """Raises :class:`UnsupportedModelError` where the stages of a decision are not what the layers in them ask for."""
    for _, error in stage_errors(decision, graph):
        raise error


def stage_errors(decision: Decision, graph: Graph) -> Iterator[tuple[str, UnsupportedModelError]]:
    """What is not as layers ask for: the layer, and the refusal."""
    yield from _of_state(decision, graph)
    for number, stage in enumerate(decision.stages):
        if len(stage.ranks) < 2:
            continue
        layers = [layer for layer in graph.layers if decision.layers[layer.name].stage == number]
        yield from ((each.name, _keeps(each, number, decision)) for each in layers if KEEPS_SAMPLES in each.attributes)
        yield from _of_stage_of_seeds(decision, graph, number)
        is_divided = divides(decision, number, graph)
        if stage.level > 1 and (
            whole_because := why_gradients_stay_whole(graph) or _terms_apart(decision, graph, number)
        ):
            yield layers[0].name, refused_slices(decision, number, [whole_because])
        elif stage.level > 1 and is_divided:
            why = "its layers are divided along more than samples"
            yield layers[0].name, refused_slices(decision, number, [why])
        if not is_divided:
            continue
        if stage.sharded:
            yield from _of_divided_parameters(decision, graph, number, layers)
        for layer in layers:
            placed = decision.layers[layer.name]
            if NOT_LINEAR_BACKWARD in layer.attributes and _parts(placed.cuts).get(SAMPLE, 1) < len(stage.ranks):
                yield layer.name, _not_linear(layer, number)
        yield from _of_statistics(decision, number, layers)
        yield from _of_parameters(decision, graph, number, layers)


def _terms_apart(decision: Decision, graph: Graph, stage: int) -> str:
    """Which layers make the loss of terms, where only some of them are in ``stage``; empty: all are, or none."""
    together = _with_readers(graph, _terms(graph))
    num_here = sum(decision.layers[name].stage == stage for name in together)
    is_apart = 0 < num_here < len(together)
    return f"layers {', '.join(together)}, which make the loss of terms, are in several stages" if is_apart else ""


def _of_statistics(
    decision: Decision, stage: int, layers: Sequence[Layer]
) -> Iterator[tuple[str, UnsupportedModelError]]:
    """Batch norms that use the same running statistics have the same channels on each rank."""
    first: dict[str, Layer] = {}
    for layer in layers:
        if SHARED_STATISTICS not in layer.attributes:
            continue
        name = str(layer.attributes[SHARED_STATISTICS])
        other = first.setdefault(name, layer)
        if _channels(decision.layers[layer.name]) != _channels(decision.layers[other.name]):
            why = f"layers {other.name} and {layer.name} use it, and are cut along channels in different ways"
            yield layer.name, refused_parts(name, stage, layer.name, why)


def _channels(placed: Placement) -> tuple[object, ...]:
    return placed.ways, *(placed.cuts.get(dim) for dim in _CHANNELS)


def refused_parts(name: str, stage: int, layers: str, why: str) -> UnsupportedModelError:
    """The refusal of a parameter that layers would have in different parts."""
    return UnsupportedModelError(
        f"{name} cannot be divided over the ranks of stage {stage}, as the plan's cuts of {layers} would have it",
        [why],
        [
            f"cut {layers} along samples or space, where every rank has all of {name}",
            "plan again with --allow sample,spatial",
            "a parameter of its own for each layer",
        ],
    )


def unlike_parts(one: tuple[str, Sequence[Box]], other: tuple[str, Sequence[Box]]) -> str:
    """Where two layers use other parts of a parameter: their names, each with its boxes by position."""
    first, boxes = one
    second, others = other
    position, (here, there) = next(
        (at, pair) for at, pair in enumerate(zip(boxes, others, strict=True)) if pair[0] != pair[1]
    )
    return f"layer {first} uses {_text(here)} of it at position {position}, layer {second} {_text(there)}"


def refused_slices(decision: Decision, stage: int, reasons: Iterable[str]) -> UnsupportedModelError:
    """The refusal of gradients or parameters in slices."""
    what = "parameters" if decision.stages[stage].zero > 2 else "gradients"
    return UnsupportedModelError(
        f"stage {stage} cannot divide its {what} over its {len(decision.stages[stage].ranks)} ranks",
        reasons,
        ["divide the optimiser's state alone: plan with --zero 1"],
    )


def boxes_in(graph: Graph, decision: Decision, stage: int, name: str) -> Boxes:
    """What each rank of a stage, by position, uses of a parameter: as the first layer says that uses it there."""
    layer = next(each for each in graph.layers if name in each.parameters and decision.layers[each.name].stage == stage)
    if not divides(decision, stage, graph):
        return (whole(graph.parameters[name].shape),) * len(decision.stages[stage].ranks)
    return _division(graph, layer, decision).weights[layer.parameters.index(name)]


def _sharing_state(graph: Graph) -> dict[str, list[str]]:
    """By buffer, the names of the layers of :meth:`Graph.sharing_layers`."""
    return {buffer: [graph.layers[index].name for index in own] for buffer, own in graph.sharing_layers().items()}


def _of_state(decision: Decision, graph: Graph) -> Iterator[tuple[str, UnsupportedModelError]]:
    for buffer, names in _sharing_state(graph).items():
        first, *others = names
        stage = decision.layers[first].stage
        other = next((name for name in others if decision.layers[name].stage != stage), None)
        if other is not None:
            yield (
                other,
                UnsupportedModelError(
                    f"the buffer {buffer} is used by layer {first} on stage {stage} and by layer {other} on stage"
                    f" {decision.layers[other].stage}",
                    ["one of them writes it; a buffer that layers write must be on one stage"],
                    ["put all layers that use it on one stage", "plan again: halopipe plan PROFILE"],
                ),
            )


def _keeps(layer: Layer, stage: int, decision: Decision) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer.name} writes the buffer {layer.attributes[KEEPS_SAMPLES]} from the rows it sees",
        [f"stage {stage} runs it on {len(decision.stages[stage].ranks)} ranks, each with other rows"],
        ["put that layer on a stage of one rank", "plan again: halopipe plan PROFILE"],
    )


def _of_seeds(layer: Layer) -> str:
    if layer.attributes[SEEDS] == "mixes":
        return f"layer {layer.name} mixes nodes of several seeds, whose ranks sample for themselves"
    return f"layer {layer.name} draws random numbers for neighbours of seeds, of which two ranks may have the same"


def _of_stage_of_seeds(decision: Decision, graph: Graph, stage: int) -> Iterator[tuple[str, UnsupportedModelError]]:
    """What ranks that share seeds would draw or mix otherwise than one device."""
    for layer in graph.layers:
        mixes = layer.attributes.get(SEEDS) == "mixes"
        if not mixes and (SEEDS not in layer.attributes or decision.layers[layer.name].stage != stage):
            continue
        twice = "counts once on one device, and twice in parts"
        helps = "nn.LayerNorm over channels, not over nodes"
        if not mixes:
            twice = "would be dropped on one of them alone"
            helps = "dropout behind the last layer, a row a seed"
        error = UnsupportedModelError(
            f"stage {stage} cannot share out seeds: {_of_seeds(layer)}",
            [
                f"{operator_of(layer)} over {' x '.join(layer.outputs[0].dims)}",
                f"stage {stage} has {len(decision.stages[stage].ranks)} ranks; a node that two of them need {twice}",
            ],
            [helps, "a plan with one rank a stage (--allow without sample)"],
        )
        yield layer.name, error


def _of_divided_parameters(
    decision: Decision, graph: Graph, stage: int, layers: Iterable[Layer]
) -> Iterator[tuple[str, UnsupportedModelError]]:
    for layer in layers:
        weights = _division(graph, layer, decision).weights if layer.parameters else ()
        for name, boxes in zip(layer.parameters, weights, strict=True):
            if any(box != whole(graph.parameters[name].shape) for box in boxes):
                what = "so it cannot divide their optimiser's state as well"
                yield (
                    layer.name,
                    UnsupportedModelError(
                        f"stage {stage} divides parameters over its ranks, {what}",
                        [f"each rank has its part of {name} alone, and keeps state for that"],
                        ["plan again without divided optimisers", "cut that stage along samples or space"],
                    ),
                )
                return


def _not_linear(layer: Layer, stage: int) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer.name} runs {layer.attributes[NOT_LINEAR_BACKWARD]}, whose gradient ranks would have in shares",
        [f"stage {stage} shares out more than samples, and its backward is not linear"],
        ["plan with --allow sample alone", "write a backward that is linear in the gradient"],
    )


def _of_parameters(
    decision: Decision, graph: Graph, stage: int, layers: Iterable[Layer]
) -> Iterator[tuple[str, UnsupportedModelError]]:
    """Parameters of which layers of a divided stage use different parts, or those of another stage do."""
    own = tuple(layers)
    tied = graph.tied_layers()
    users = {name: [layer for layer in own if name in layer.parameters] for layer in own for name in layer.parameters}
    for name, using in users.items():
        if name not in tied:
            continue
        boxes = [_division(graph, layer, decision).weights[layer.parameters.index(name)] for layer in using]
        everything = whole(graph.parameters[name].shape)
        if all(box == everything for each in boxes for box in each):
            continue
        names = ", ".join(layer.name for layer in using)
        stages = {decision.layers[graph.layers[index].name].stage for index in tied[name]}
        if len({frozenset(boxes_in(graph, decision, each, name)) for each in stages}) > 1:
            why = "layers of another stage use it too, where it is whole or in other parts"
            yield using[0].name, refused_parts(name, stage, names, why)
            continue
        for layer, other in zip(using[1:], boxes[1:], strict=True):
            if other != boxes[0]:
                why = unlike_parts((using[0].name, boxes[0]), (layer.name, other))
                yield layer.name, refused_parts(name, stage, names, why)
                break


def _division(graph: Graph, layer: Layer, decision: Decision) -> LayerDivision:
    return layer_division(graph, layer, graph.values(), decision.layers[layer.name], max(decision.micro_batches))


def _parts(cuts: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    return {dim: len(points) - 1 for dim, points in cuts.items()}


def _text(box: Box) -> str:
    return " x ".join(map(str, box)) or "all"
