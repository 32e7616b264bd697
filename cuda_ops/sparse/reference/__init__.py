"""Every operator in plain torch: the definition that the faster ones are held against, and what runs without them.

Runs on every device.  The tensors are contiguous and fit together: ``kernels`` has looked.
"""

from __future__ import annotations

from cuda_ops.sparse.reference.conv import sparse_conv, sparse_conv_weight
from cuda_ops.sparse.reference.maps import generated_sites, kernel_map, reversed_map, sorted_sites, strided_sites
from cuda_ops.sparse.reference.rows import (
    interpolate,
    interpolate_backward,
    interpolate_weight,
    pack_boxes,
    pack_rows,
    segment_expand,
    segment_max,
    segment_sum,
    sparse_max_pool,
    sparse_max_pool_backward,
    sparse_sum_pool,
    unpack_add,
    unpack_boxes,
)

__all__ = [
    "generated_sites",
    "interpolate",
    "interpolate_backward",
    "interpolate_weight",
    "kernel_map",
    "pack_boxes",
    "pack_rows",
    "reversed_map",
    "segment_expand",
    "segment_max",
    "segment_sum",
    "sorted_sites",
    "sparse_conv",
    "sparse_conv_weight",
    "sparse_max_pool",
    "sparse_max_pool_backward",
    "sparse_sum_pool",
    "strided_sites",
    "unpack_add",
    "unpack_boxes",
]
