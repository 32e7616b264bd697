"""The sparse operators as Triton kernels, for GPUs.

`load` gives them by the names of the operators.  Site sets are not among them: sorting and removing duplicates are
torch's own on a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

from cuda_ops.device.compiling import own_folder

__all__ = ["load"]

_CACHE = "TRITON_CACHE_DIR"


@functools.cache
def load() -> SimpleNamespace | None:
    """The kernels by the operators' names; None where Triton is not installed.  Triton is imported here, not before."""
    if importlib.util.find_spec("triton") is None:
        return None
    _own_cache()
    from cuda_ops.sparse.gpu import boxes, conv, conv_weight, maps, points, pool, rows, segments
    from cuda_ops.sparse.gpu.arrangement import Arrangements

    arrangements = Arrangements()
    return SimpleNamespace(
        kernel_map=maps.kernel_map,
        reversed_map=maps.reversed_map,
        sparse_conv=functools.partial(conv.sparse_conv, arrangements),
        sparse_conv_weight=functools.partial(conv_weight.sparse_conv_weight, arrangements),
        sparse_max_pool=pool.sparse_max_pool,
        sparse_max_pool_backward=pool.sparse_max_pool_backward,
        sparse_sum_pool=pool.sparse_sum_pool,
        segment_sum=segments.segment_sum,
        segment_max=segments.segment_max,
        segment_expand=segments.segment_expand,
        interpolate=points.interpolate,
        interpolate_backward=points.interpolate_backward,
        interpolate_weight=points.interpolate_weight,
        pack_rows=rows.pack_rows,
        unpack_add=rows.unpack_add,
        pack_boxes=boxes.pack_boxes,
        unpack_boxes=boxes.unpack_boxes,
    )


def _own_cache() -> None:
    """Triton loads what it finds in its cache: where that is another user's, or open to others, it gets another."""
    named = os.environ.get(_CACHE, "")
    folder = Path(named) if named else Path.home() / ".triton" / "cache"
    if folder.exists() or folder.is_symlink():
        chosen = own_folder(folder)
        if chosen != folder:
            os.environ[_CACHE] = str(chosen)
