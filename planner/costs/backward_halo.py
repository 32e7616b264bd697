"""What the backward of a convolution over cut space moves where the halo of dy is cheaper than that of dx.

The rule is ``planner.layers.backward_halo``'s, which says it for one plan; here it is said in arrays, and a test
compares the two.
"""

from __future__ import annotations

import numpy as np

from planner.costs.boxes import Boxes, Counts, moved
from planner.costs.shards import Shards

_KINDS = frozenset({"conv", "transposed_conv"})


def halo_of_dy(maker: Shards, output: int, of_maker: int, reader: Shards, of_reader: int) -> Counts | None:
    """``[source, destination]`` elements of dy that move; None where dx must move.

    Args:
        output: of the maker, the first input of the reader.
        of_maker, of_reader: which of their options.
    """
    layer, option = reader.sized.layer, reader.options[of_reader]
    kernel = layer.attributes.get("kernel")
    if layer.kind not in _KINDS or not isinstance(kernel, tuple) or option.margin or option.ways > 1:
        return None
    held, own, needed = maker.held[output][of_maker], reader.work[of_reader], reader.needed[0][of_reader]
    leading = own.shape[1] - len(kernel)
    if not _are_parts(held) or not _are_parts(own) or maker.options[of_maker].margin:
        return None
    if (held[:, :leading] != needed[:, :leading]).any():
        return None
    shape = np.array(layer.outputs[0].shape)
    reached = own.copy()
    for place in range(len(kernel)):
        reached[:, leading + place] = _reached(reader, place, held[:, leading + place])
    reached[..., 0] = np.maximum(reached[..., 0], 0)
    reached[..., 1] = np.minimum(reached[..., 1], shape)
    if (reached[..., 1] <= reached[..., 0]).any():
        return None
    found: Counts = moved(own[None], own[None], reached[None])[0, 0]
    src, dst = np.nonzero(found)
    if (_shared(own[src, :leading], reached[dst, :leading]) != own[dst, :leading]).any():
        return None
    return found


def _reached(reader: Shards, place: int, held: Boxes) -> Boxes:
    """``[ranks, 2]``: the outputs along one dim of space that read some of what is held."""
    layer = reader.sized.layer
    kernel, stride, padding, dilation = (
        int(layer.attributes[name][place])  # type: ignore[index]
        for name in ("kernel", "stride", "padding", "dilation")
    )
    span, start, last = dilation * (kernel - 1), held[:, 0], held[:, 1] - 1
    if layer.kind == "transposed_conv":
        return np.stack([start * stride - padding, last * stride - padding + span + 1], axis=-1)
    return np.stack([-((span - padding - start) // stride), (last + padding) // stride + 1], axis=-1)


def _are_parts(boxes: Boxes) -> bool:
    """Whether no rank is without a part and no two have the same (parts that are not equal share nothing)."""
    return bool((boxes[..., 1] > boxes[..., 0]).all()) and len(np.unique(boxes, axis=0)) == len(boxes)


def _shared(a: Boxes, b: Boxes) -> Boxes:
    return np.stack([np.maximum(a[..., 0], b[..., 0]), np.minimum(a[..., 1], b[..., 1])], axis=-1)
