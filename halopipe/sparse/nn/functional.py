"""`torchsparse.nn.functional`: layers as functions, hashes, points to voxels and back, and its settings."""

from __future__ import annotations

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.nn.bev import spcrop
from cuda_ops.sparse.nn.functional import (
    avg_pool3d,
    batch_norm,
    conv3d,
    global_avg_pool,
    global_max_pool,
    group_norm,
    leaky_relu,
    max_pool3d,
    relu,
    sample_mean,
    silu,
    site_cross_entropy,
    to_dense,
)
from cuda_ops.sparse.nn.points import (
    calc_ti_weights,
    devoxelise,
    spcount,
    spdevoxelize,
    spdownsample,
    sphash,
    sphashquery,
    spvoxelize,
    voxelise,
)

__all__ = [
    "avg_pool3d",
    "batch_norm",
    "calc_ti_weights",
    "conv3d",
    "devoxelise",
    "global_avg_pool",
    "global_max_pool",
    "group_norm",
    "leaky_relu",
    "max_pool3d",
    "relu",
    "sample_mean",
    "set_conv_mode",
    "set_downsample_mode",
    "set_kmap_mode",
    "silu",
    "site_cross_entropy",
    "spcount",
    "spcrop",
    "spdevoxelize",
    "spdownsample",
    "sphash",
    "sphashquery",
    "spvoxelize",
    "to_dense",
    "voxelise",
]


def set_kmap_mode(kmap_mode: str) -> None:
    """Nothing: it chooses between ways of torchsparse's to make the same maps; there is one here."""
    _require("kmap mode", kmap_mode, ("hashmap", "hashmap_on_the_fly"))


def set_conv_mode(conv_mode: int) -> None:
    """Nothing: it chooses between kernels of torchsparse's; HALOPIPE_SPARSE chooses here."""
    _require("conv mode", conv_mode, (0, 1, 2))


def set_downsample_mode(downsample_mode: str) -> None:
    """Takes ``spconv``, torchsparse's default: a strided convolution makes every site whose field holds one.

    Raises:
        SparseInputError: ``minkowski``, which makes fewer, or another.
    """
    same = "a convolution whose kernel is its stride makes the same sites in either mode: give such ones, or spconv"
    _require("downsample mode", downsample_mode, ("spconv",), same)


def _require(name: str, setting: object, supported: tuple[object, ...], remedy: str = "delete the line") -> None:
    if setting not in supported:
        raise SparseInputError(
            name,
            where="torchsparse's settings",
            actual=setting,
            expected=" or ".join(map(str, supported)),
            remedy=remedy,
        )
