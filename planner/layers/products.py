"""Products with weights, or of inputs: linear layers, embeddings, attention, recurrent layers."""

from __future__ import annotations

from planner.ir.box import Box, Boxes, Interval, whole
from planner.ir.graph import Layer, TensorSpec
from planner.layers._kinds import Kind
from planner.layers._rules import (
    Specs,
    all_apart,
    broadcast,
    empty_work_reads_nothing,
    group_inputs,
    num_elements,
    samples_apart,
    whole_weights,
)


class LinearKind(Kind, name="linear", dims="own"):
    """Linear map of the last dim: ``[..., in] -> [..., out]``, weight ``[out, in]``, bias ``[out]``."""

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """The same rows, all their features; of a factor that is an activation itself, its samples."""
        data = inputs[0]
        output = layer.outputs[0]
        if len(data.shape) == len(output.shape) and data.shape[:-1] == output.shape[:-1]:
            rows: Box = (*work_box[:-1], Interval(0, data.shape[-1]))
        else:
            rows = samples_apart(output, work_box, data)
        return rows, *(samples_apart(output, work_box, spec) for spec in inputs[1:])

    @staticmethod
    def weight_boxes(layer: Layer, parameters: Specs, work_box: Box) -> Boxes:
        """The rows of the weight that make the output features; beside a weight that is an input all of the bias."""
        if len(layer.inputs) > 1:
            return whole_weights(layer, parameters, work_box)
        features = layer.outputs[0].shape[-1]
        return tuple(
            (work_box[-1], *whole(spec.shape[1:])) if spec.shape[0] == features else whole(spec.shape)
            for spec in parameters
        )

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """A multiply and an add per output element and input feature."""
        return 2 * num_elements(layer.outputs[0]) * inputs[0].shape[-1]


class EmbeddingKind(Kind, name="embedding", dims="sequence"):
    """Embedding: indices ``[...]`` -> rows ``[..., feature]`` of a table ``[entry, feature]``."""

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """The indices of the same place."""
        return (work_box[:-1],)

    @staticmethod
    def weight_boxes(layer: Layer, parameters: Specs, work_box: Box) -> Boxes:
        """Any entry may be asked for; of it, the features of the work."""
        return tuple((Interval(0, spec.shape[0]), work_box[-1]) for spec in parameters)


class AttentionKind(Kind, name="attention", dims="own"):
    """Scaled dot-product attention: ``q [sample, head, time, feature]``, ``k`` and ``v`` alike, perhaps a mask.

    Every query reads all keys and values of its sample and head; where attribute ``causal`` says that query t sees keys
    up to t alone, those up to the last query's.  (What another mask makes worthless is read.)  Of keys with fewer
    heads, equal groups of neighbouring heads of queries share one each (Ainslie et al. 2023, "GQA").
    """

    @staticmethod
    @empty_work_reads_nothing
    def input_boxes(layer: Layer, inputs: Specs, work_box: Box) -> Boxes:
        """Queries of the same times, keys and values of all (or all earlier) times; a mask is broadcast to them."""
        output = layer.outputs[0]
        query, key, value, *rest = inputs
        *sample_and_head, time, feature = work_box
        key_times = _all(key, -2)
        if layer.attributes.get("causal"):
            key_times = Interval(0, min(time.stop, key_times.stop))
        return (
            (*sample_and_head, time, _all(query, -1)),
            (*_batch(output, work_box, key), key_times, _all(key, -1)),
            (*_batch(output, work_box, value), key_times, feature),
            *(_mask(output, work_box, spec) for spec in rest),
        )

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """Two products of (query time) x (key time) x feature, each a multiply and an add."""
        key_times = inputs[1].shape[-2]
        query_flops = 2 * num_elements(inputs[0]) * key_times
        return query_flops + 2 * num_elements(layer.outputs[0]) * key_times


def _all(spec: TensorSpec, dim: int) -> Interval:
    return Interval(0, spec.shape[dim])


def _batch(output: TensorSpec, work_box: Box, spec: TensorSpec) -> Box:
    """The same place; of fewer heads than the queries have, those that the queries' groups share."""
    pairs = zip(work_box[:-2], output.shape[:-2], spec.shape[:-2], strict=True)
    box = [interval if extent == total else Interval(0, extent) for interval, total, extent in pairs]
    heads = output.shape[-3:-2]
    shared = spec.shape[-3:-2]
    if heads != shared and shared[0] > 1 and not heads[0] % shared[0]:
        box[-1] = group_inputs(work_box[-3], heads[0], shared[0], shared[0])
    return tuple(box)


def _mask(output: TensorSpec, work_box: Box, spec: TensorSpec) -> Box:
    if not 2 <= len(spec.shape) <= len(output.shape):
        return samples_apart(output, work_box, spec)
    return (*broadcast(output, work_box, spec)[:-1], _all(spec, -1))


class LstmKind(Kind, name="lstm", dims="sequence"):
    """Recurrent layers (LSTM, GRU, plain): ``x [sample, time, feature]`` and states ``[layer, sample, feature]``.

    Outputs: all steps, then the last states.  A step needs all earlier ones, so only samples are apart.
    """

    input_boxes = staticmethod(all_apart)

    @staticmethod
    def forward_flops(layer: Layer, inputs: Specs) -> int:
        """Per step and direction, gates x hidden x (input + hidden) multiply-adds; functions of gates do not count."""
        features = inputs[0].shape[-1]
        output = layer.outputs[0]
        if len(layer.outputs) > 1:
            hidden = layer.outputs[1].shape[-1]
            num_cells = layer.outputs[1].shape[0]
        else:
            hidden = output.shape[-1]
            num_cells = 1
        directions = output.shape[-1] // hidden
        steps = num_elements(output) // output.shape[-1]
        inner = (num_cells // directions - 1) * directions * hidden * (directions * hidden + hidden)
        return 2 * steps * _num_gates(layer) * (directions * hidden * (features + hidden) + inner)


def _num_gates(layer: Layer) -> int:
    op = str(layer.attributes.get("op", ""))
    if "lstm" in op:
        return 4
    return 3 if "gru" in op else 1
