"""Sparse 3-D networks for users: tensors, layers, losses, points to voxels, and networks to begin with.

    import halopipe.sparse as spnn

    coords, feats = spnn.sparse_collate(clouds, features)
    x = spnn.SparseTensor(feats, coords)
    net = torch.nn.Sequential(spnn.Conv3d(4, 32, 3), spnn.BatchNorm(32), spnn.ReLU(), spnn.GlobalAvgPool())

Names and their places follow torchsparse 2.1: with ``import halopipe.sparse as torchsparse`` its ``torchsparse.nn``,
``.nn.functional``, ``.utils.collate``, ``.utils.quantize``, ``.backbones`` and ``.tensor`` are here (docs/sparse.md has
them name by name).  Layers are both here and in ``nn``.

A factory that returns ``(network, (x, targets), loss)`` is profiled, planned and run as
any other; what a loss is a mean over should be samples (:class:`SiteCrossEntropy`).
"""

from __future__ import annotations

from cuda_ops.sparse.errors import SparseImplementationError, SparseInputError
from cuda_ops.sparse.nn import (
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
    PointTensor,
    Pointwise,
    ReLU,
    SampleMean,
    Sigmoid,
    SiLU,
    SiteCrossEntropy,
    SparseCrop,
    SparseTensor,
    Tanh,
    ToBEVConvolution,
    ToBEVHeightCompression,
    ToBEVReduction,
    ToDense,
    ToDenseBEVConvolution,
    cat,
    devoxelise,
    generative_add,
    initial_voxelize,
    point_to_voxel,
    sample_mean,
    site_cross_entropy,
    to_dense,
    voxel_to_point,
    voxelise,
)
from cuda_ops.sparse.quantize import sparse_collate, sparse_collate_fn, sparse_quantize
from halopipe.sparse import backbones, nn, operators, tensor, utils  # noqa: F401  # attributes, but not for `*`
from halopipe.sparse.nn import functional
from profiler.models.minkunet import MinkUNet
from profiler.models.sparse_resnet import SparseResNetClassifier as SparseResNet
from profiler.models.sparse_vgg import SparseVGG16

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
    "MinkUNet",
    "PointTensor",
    "Pointwise",
    "ReLU",
    "SampleMean",
    "SiLU",
    "Sigmoid",
    "SiteCrossEntropy",
    "SparseCrop",
    "SparseImplementationError",
    "SparseInputError",
    "SparseResNet",
    "SparseTensor",
    "SparseVGG16",
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
    "sparse_collate",
    "sparse_collate_fn",
    "sparse_quantize",
    "to_dense",
    "voxel_to_point",
    "voxelise",
]
