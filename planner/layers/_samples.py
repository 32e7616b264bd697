"""Which layers mix samples, so that a stage that holds them must not be divided by samples."""

from __future__ import annotations

from planner.ir.graph import INTERLEAVES_SAMPLES, MIXES_SAMPLES, SAMPLE, Graph, Layer, TensorSpec, producer


def check_samples_apart(graph: Graph) -> tuple[str, ...]:
    """Names of the layers through which samples do not stay apart in one sample dim, in order.

    Those are the layers (other than the loss) that read samples and make an output without, those with more than one
    sample dim, those that concatenate or normalise along it, and those that the capture found to mix or interleave
    samples, with the readers of what is interleaved.  Batch normalisation is not among them: its statistics are
    combined.
    """
    values = graph.values()
    interleaved = {layer.name for layer in graph.layers if INTERLEAVES_SAMPLES in layer.attributes}
    return tuple(
        layer.name
        for layer in graph.layers
        if MIXES_SAMPLES in layer.attributes
        or layer.name in interleaved
        or any(producer(value) in interleaved for value in layer.inputs)
        or (layer.kind != "loss" and _mixes(layer, tuple(values[name] for name in layer.inputs)))
    )


def _mixes(layer: Layer, inputs: tuple[TensorSpec, ...]) -> bool:
    reads_samples = any(spec.has_samples for spec in inputs)
    loses = reads_samples and not all(spec.has_samples for spec in layer.outputs)
    repeats = any(spec.dims.count(SAMPLE) > 1 for spec in (*inputs, *layer.outputs))
    return loses or repeats or any(layer.outputs[0].dims[dim] == SAMPLE for dim in _joined_dims(layer))


def _joined_dims(layer: Layer) -> tuple[int, ...]:
    """Dims along which different places of the inputs end in one."""
    if layer.kind not in ("concat", "softmax", "layer_norm"):
        return ()
    dims = layer.attributes.get("dims", layer.attributes.get("dim", ()))
    return dims if isinstance(dims, tuple) else (int(dims),)
