"""Sparse networks in the words of torchsparse: tensors, layers, losses, and points to voxels and back.

A tensor is `SparseTensor(feats, coords)` with coords int32 (sites, 4), batch first; modules go together as torch's do:
`Sequential(Conv3d(4, 32, 3), BatchNorm(32), ReLU(), GlobalAvgPool())(x)` is (samples, 32).

Modules:

    bev          Parts of clouds, sums of clouds, and clouds seen from above: what detectors do between a sparse and a
                 dense network
    functional   The layers and losses as functions of sparse tensors; :mod:`cuda_ops.sparse.nn` wraps them in modules
    layers       The modules, named and shaped as torchsparse's (`torchsparse/nn/modules/` of 2.1)
    points       From points to voxels and back, and the functions of torchsparse that this is made of there
    tensor       A sparse tensor: features on the sites of one set, and the geometry that all tensors of one input share
"""

from __future__ import annotations

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.nn import functional
from cuda_ops.sparse.nn.bev import (
    SparseCrop,
    ToBEVConvolution,
    ToBEVHeightCompression,
    ToBEVReduction,
    ToDenseBEVConvolution,
    generative_add,
    spcrop,
)
from cuda_ops.sparse.nn.functional import sample_mean, site_cross_entropy, to_dense
from cuda_ops.sparse.nn.layers import (
    ELU,
    GELU,
    AvgPool3d,
    BatchNorm,
    Conv3d,
    Dropout,
    GlobalAvgPool,
    GlobalMaxPool,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LeakyReLU,
    Linear,
    MaxPool3d,
    Pointwise,
    ReLU,
    SampleMean,
    Sigmoid,
    SiLU,
    SiteCrossEntropy,
    Tanh,
    ToDense,
)
from cuda_ops.sparse.nn.points import (
    PointTensor,
    devoxelise,
    initial_voxelize,
    point_to_voxel,
    voxel_to_point,
    voxelise,
)
from cuda_ops.sparse.nn.tensor import SparseTensor, cat

__all__ = [
    "ELU",
    "GELU",
    "AvgPool3d",
    "BatchNorm",
    "Conv3d",
    "Dropout",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MaxPool3d",
    "PointTensor",
    "Pointwise",
    "ReLU",
    "SampleMean",
    "SiLU",
    "Sigmoid",
    "SiteCrossEntropy",
    "SparseCrop",
    "SparseInputError",
    "SparseTensor",
    "Tanh",
    "ToBEVConvolution",
    "ToBEVHeightCompression",
    "ToBEVReduction",
    "ToDense",
    "ToDenseBEVConvolution",
    "cat",
    "devoxelise",
    "functional",
    "generative_add",
    "initial_voxelize",
    "point_to_voxel",
    "sample_mean",
    "site_cross_entropy",
    "spcrop",
    "to_dense",
    "voxel_to_point",
    "voxelise",
]
