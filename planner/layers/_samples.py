"""Which layers of a graph mix samples, so that a stage of theirs is not divided by samples; which are over sites."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from planner.ir.box import Interval, whole
from planner.ir.errors import UnsupportedModelError, UsageError
from planner.ir.graph import (
    FIXES_SAMPLES,
    INTERLEAVES_SAMPLES,
    MIXES_SAMPLES,
    NEEDS_WHOLE_BATCH,
    SAMPLE,
    UPDATES_STATE,
    Graph,
    Layer,
    TensorSpec,
    is_sites,
    producer,
)
from planner.ir.plan import Decision
from planner.layers._kinds import kind


def check_samples_apart(graph: Graph) -> tuple[str, ...]:
    """Names of the layers through which samples do not stay apart in one sample dim, in order.

    Those are the layers (other than the loss) that read samples and make an output without, those with more than one
    sample dim (the loss too: of pairs of samples, whose classes are samples), those that concatenate or normalise along
    it, and those that the capture found to mix or interleave samples, with the readers of what is interleaved.  Batch
    normalisation is not among them: its statistics are combined.  Neither are layers that treat sites each by itself,
    or with neighbours: those of a stage of several ranks are cut with the samples, anywhere; but all others that read
    sparse tensors are.
    """
    interleaved = {layer.name for layer in graph.layers if INTERLEAVES_SAMPLES in layer.attributes}
    return tuple(
        layer.name
        for layer, inputs in graph.with_inputs()
        if MIXES_SAMPLES in layer.attributes
        or layer.name in interleaved
        or any(producer(value) in interleaved for value in layer.inputs)
        or _mixes(layer, inputs)
        or _mixes_sites(layer, inputs)
    )


def merging_layer(graph: Graph) -> str:
    """The first layer that merges samples with a dim before them, [time, sample] to [time x sample]; empty: none."""
    return next((layer.name for layer in graph.layers if INTERLEAVES_SAMPLES in layer.attributes), "")


def joined_text(graph: Graph) -> str:
    """Which layer makes parts of a batch no parts of the loss, and which one before it is why."""
    joined = f"layer {batch_wide_layers(graph)[0]} joins samples: the losses of parts do not make up that of the batch"
    merging = merging_layer(graph)
    return f"{joined}; layer {merging} merges samples with another dim that comes first" if merging else joined


def batch_wide_layers(graph: Graph) -> tuple[str, ...]:
    """Names of the layers because of which all samples of a step must be in one micro-batch, in order."""
    return tuple(layer.name for layer in graph.layers if NEEDS_WHOLE_BATCH in layer.attributes)


def batch_dependent_layers(graph: Graph) -> tuple[str, ...]:
    """Names of the layers whose output for a sample depends on how a batch is cut into micro-batches, in order.

    Batch normalisation by statistics of the batch, what mixes samples otherwise, and what every forward updates; not
    the loss, whose parts are weighted by their samples.  Ranks that share a micro-batch out share these statistics, so
    that micro-batches alone show in the result.
    """
    return tuple(
        layer.name
        for layer, inputs in graph.with_inputs()
        if layer.kind != "loss"
        and (
            _is_batch_norm(layer)
            or MIXES_SAMPLES in layer.attributes
            or UPDATES_STATE in layer.attributes
            or _mixes(layer, inputs)
        )
    )


def _is_batch_norm(layer: Layer) -> bool:
    """Whether it normalises by statistics of the batch, not by running ones."""
    return kind(layer.kind).REDUCTION == "statistics" and bool(layer.attributes.get("training", True))


def takes_statistics(layer: Layer, trains: bool) -> bool:
    """Whether ranks that divide the layer's samples or space take statistics together.

    Args:
        trains: in training; a forward pass alone normalises by running statistics, where the layer keeps any.
    """
    return kind(layer.kind).REDUCTION == "statistics" and (trains or not layer.buffer_bytes)


def statistics_text(decision: Decision, graph: Graph) -> str:
    """Where layers that depend on their batch see less than the whole of it, in words; empty where none does."""
    layers = batch_dependent_layers(graph)
    count = len(decision.micro_batches)
    if count < 2:
        return ""
    by_name = graph.by_name()
    whole = f"not of the whole batch of {decision.global_batch}"
    updating = [name for name in layers if UPDATES_STATE in by_name[name].attributes]
    norms = [name for name in layers if name not in updating and _is_batch_norm(by_name[name])]
    others = [name for name in layers if name not in (*updating, *norms)]
    parts = []
    if norms:
        running = f", and running ones written {count} times a step" if by_name[norms[0]].buffer_bytes else ""
        parts.append(f"{_first(norms)}: statistics of each of {count} micro-batches, {whole}{running}")
    if others and not fixes_samples(graph):
        parts.append(f"{_first(others)}: made of the samples of each of {count} micro-batches together, {whole}")
    if others and fixes_samples(graph):
        parts.append(
            f"the model takes {graph.samples} samples at a time: whatever it makes of several of them is made of each "
            f"of {count} micro-batches, {whole}"
        )
    if updating:
        buffer = by_name[updating[0]].attributes[UPDATES_STATE]
        parts.append(f"{_first(updating)}: {buffer} is updated by each of {count} micro-batches, not once")
    return "; ".join(parts)


def _first(names: Sequence[str]) -> str:
    return f"layer {names[0]}" + f" and {len(names) - 1} more" * (len(names) > 1)


def require_several_values(graph: Graph, sizes: Sequence[int], remedies: Sequence[str]) -> None:
    """Raises :class:`UsageError` where a batch norm gets one value a channel, which has no variance.

    Args:
        sizes: samples of each micro-batch of a training step.
    """
    layer = normalises_values_of_samples(graph)
    if layer is not None and 1 in sizes:
        raise UsageError(
            f"layer {layer.name} normalises over the batch, and a micro-batch has 1 sample",
            [
                f"1 value a channel, of output {list(layer.outputs[0].shape)}; 2 have a variance",
                f"micro-batches of {', '.join(map(str, sizes))} samples",
            ],
            remedies,
        )


def normalises_values_of_samples(graph: Graph) -> Layer | None:
    """A batch norm that gets one value a channel of each sample, so that of one sample there is no variance."""
    for layer in graph.layers:
        spec = layer.outputs[0]
        is_by_sample = len(spec.shape) > 1 and spec.dims[0] == SAMPLE and not spec.has_sites
        if _is_batch_norm(layer) and is_by_sample and prod(spec.shape[2:]) == 1:
            return layer
    return None


def fixes_samples(graph: Graph) -> bool:
    """Whether it holds for micro-batches of as many samples as it was captured with alone."""
    return any(FIXES_SAMPLES in layer.attributes for layer in graph.layers)


def require_micro_batches(decision: Decision, graph: Graph) -> None:
    """Raises :class:`UnsupportedModelError` where a graph cannot be run by the micro-batches of a plan.

    Either it holds for one number of samples alone, or parts of a batch do not make up its loss.
    """
    others = sorted(set(decision.micro_batches) - {graph.samples})
    if fixes_samples(graph) and others:
        raise UnsupportedModelError(
            f"the model was captured for {graph.samples} samples only, and the plan has micro-batches of {others[0]}",
            ["its code fixes the number of samples"],
            [f"plan again with --micro-batch {graph.samples}", "sizes from x.shape, and no Python loop over samples"],
        )
    wide = batch_wide_layers(graph)
    count = len(decision.micro_batches)
    if wide and count > 1:
        raise UnsupportedModelError(
            f"the loss needs all samples of a step at once, and the plan has {count} micro-batches",
            [joined_text(graph)],
            [
                f"plan again with --micro-batch {decision.global_batch}",
                "samples first where dims are merged, in targets alike: y.transpose(0, 1).flatten(0, 1)"
                if merging_layer(graph)
                else "a loss that is a mean, a sum or a masked mean over samples",
            ],
        )


MAPPED = frozenset({"sparse_conv", "sparse_pool"})
"""Kinds whose work are pairs of a kernel map."""

OVER_SITES = MAPPED | {"segment", "segment_expand"}
"""Kinds that read maps or segments, which the host prepares."""


def prepared_inputs(graph: Graph) -> tuple[str, ...]:
    """The graph inputs that a host prepares ahead of a micro-batch.

    They are functions of the coordinates alone: integers that lie along sites (kernel maps), or that a layer over sites
    reads (where samples start).  Targets are none of them.
    """
    read_by: dict[str, list[Layer]] = {}
    for layer in graph.layers:
        for value in layer.inputs:
            read_by.setdefault(value, []).append(layer)
    prepared = []
    for name, spec in graph.inputs.items():
        reading = read_by.get(name, [])
        is_map = spec.has_sites and any(layer.kind != "loss" for layer in reading)
        is_read = any(layer.kind in OVER_SITES for layer in reading)
        if not spec.is_float and (is_map or is_read):
            prepared.append(name)
    return tuple(prepared)


def throughout_sites(graph: Graph) -> frozenset[str]:
    """Names of the layers whose work and outputs all lie along sites (of a loss the work), samples nowhere.

    The ranks of a stage of such layers alone share its sites, and may be more than the samples of a micro-batch.
    """
    names = set()
    for layer, inputs in graph.with_inputs():
        work = kind(layer.kind).work(layer, inputs)
        outputs = () if layer.kind == "loss" else layer.outputs
        if all(spec.has_sites for spec in (work, *outputs)):
            names.add(layer.name)
    return frozenset(names)


def over_sites(graph: Graph) -> frozenset[str]:
    """Names of the layers that read or make a sparse tensor (or a map)."""
    return frozenset(
        layer.name for layer, inputs in graph.with_inputs() if any(spec.has_sites for spec in (*inputs, *layer.outputs))
    )


def _mixes_sites(layer: Layer, inputs: tuple[TensorSpec, ...]) -> bool:
    """Whether half of the rows of the work may need more than half of those of an input, neighbours apart."""
    specs = (*inputs, *layer.outputs)
    if not any(spec.has_sites for spec in specs):
        return False
    relation = kind(layer.kind)
    work = relation.work(layer, inputs)
    dims = [dim for dim, name in enumerate(work.dims) if is_sites(name) or (name == SAMPLE and layer.kind == "opaque")]
    if len(dims) != 1 or any(sum(map(is_sites, spec.dims)) > 1 for spec in specs):
        return True
    if work.shape[dims[0]] < 2:
        return False
    box = list(whole(work.shape))
    box[dims[0]] = Interval(0, work.shape[dims[0]] // 2)
    return any(
        is_sites(name) and extent > 1 and len(interval) >= extent
        for spec, read in zip(inputs, relation.input_boxes(layer, inputs, tuple(box)), strict=True)
        for name, extent, interval in zip(spec.dims, spec.shape, read, strict=True)
    )


def _mixes(layer: Layer, inputs: tuple[TensorSpec, ...]) -> bool:
    reads_samples = any(spec.has_samples for spec in inputs)
    loses = layer.kind != "loss" and reads_samples and not all(spec.has_samples for spec in layer.outputs)
    repeats = any(spec.dims.count(SAMPLE) > 1 for spec in (*inputs, *layer.outputs))
    joined = [layer.outputs[0].dims[dim] for dim in _joined_dims(layer)]
    return loses or repeats or any(dim == SAMPLE or is_sites(dim) for dim in joined)


def _joined_dims(layer: Layer) -> tuple[int, ...]:
    """Dims along which different places of the inputs end in one."""
    if layer.kind not in ("concat", "softmax", "layer_norm"):
        return ()
    dims = layer.attributes.get("dims", layer.attributes.get("dim", ()))
    return dims if isinstance(dims, tuple) else (int(dims),)
