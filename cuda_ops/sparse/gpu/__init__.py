"""The sparse operators as Triton kernels, for GPUs.

`load` gives them by the names of the operators.  Site sets are not among them: sorting and removing duplicates are
torch's own on a GPU.  No CUDA graph is captured here; kernels may be captured into one of the user's, see ``tiling``.

Modules:

    conv         Sparse convolution and its weight gradient: gather and multiply
    gathers      What is read from somewhere and put, or added, somewhere else
    launch       How kernels are launched: on the tensor's own device, with the options that all of them share
    maps         Kernel maps by binary search in sorted keys, and their reverse
    reductions   Reductions: pooling over the neighbours of a map, sums and maxima over runs of rows, and their ways
                 back
    tiling       How the kernels that multiply are tiled: block sizes by type and channels, and which rows share a tile
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
    from cuda_ops.sparse.gpu import conv, gathers, maps, reductions
    from cuda_ops.sparse.gpu.tiling import Arrangements

    arrangements = Arrangements()
    return SimpleNamespace(
        kernel_map=maps.kernel_map,
        reversed_map=maps.reversed_map,
        sparse_conv=functools.partial(conv.sparse_conv, arrangements),
        sparse_conv_weight=functools.partial(conv.sparse_conv_weight, arrangements),
        sparse_max_pool=reductions.sparse_max_pool,
        sparse_max_pool_backward=reductions.sparse_max_pool_backward,
        sparse_sum_pool=reductions.sparse_sum_pool,
        segment_sum=reductions.segment_sum,
        segment_max=reductions.segment_max,
        segment_expand=reductions.segment_expand,
        interpolate=gathers.interpolate,
        interpolate_backward=gathers.interpolate_backward,
        interpolate_weight=gathers.interpolate_weight,
        pack_rows=gathers.pack_rows,
        unpack_add=gathers.unpack_add,
        pack_boxes=gathers.pack_boxes,
        unpack_boxes=gathers.unpack_boxes,
    )


def _own_cache() -> None:
    """Triton loads what it finds in its cache: where that is another user's, or open to others, it gets another."""
    named = os.environ.get(_CACHE, "")
    folder = Path(named) if named else Path.home() / ".triton" / "cache"
    if folder.exists() or folder.is_symlink():
        chosen = own_folder(folder)
        if chosen != folder:
            os.environ[_CACHE] = str(chosen)
