"""Sparse 3-D networks for users: tensors, layers, losses, points to voxels, and networks to begin with.

    import halopipe.sparse as spnn

    coords, feats = spnn.sparse_collate(clouds, features)
    x = spnn.SparseTensor(feats, coords)
    net = torch.nn.Sequential(spnn.Conv3d(4, 32, 3), spnn.BatchNorm(32), spnn.ReLU(), spnn.GlobalAvgPool())

Names follow torchsparse 2.1.  A factory that returns ``(network, (x, targets), loss)`` is profiled, planned and run as
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
    Pointwise,
    ReLU,
    SampleMean,
    Sigmoid,
    SiLU,
    SiteCrossEntropy,
    SparseTensor,
    Tanh,
    ToDense,
    cat,
    devoxelise,
    functional,
    sample_mean,
    site_cross_entropy,
    to_dense,
    voxelise,
)
from cuda_ops.sparse.quantize import sparse_collate, sparse_collate_fn, sparse_quantize
from profiler.models.minkunet import MinkUNet
from profiler.models.sparse_resnet import SparseResNet
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
    "Pointwise",
    "ReLU",
    "SampleMean",
    "SiLU",
    "Sigmoid",
    "SiteCrossEntropy",
    "SparseImplementationError",
    "SparseInputError",
    "SparseResNet",
    "SparseTensor",
    "SparseVGG16",
    "Tanh",
    "ToDense",
    "cat",
    "devoxelise",
    "functional",
    "sample_mean",
    "site_cross_entropy",
    "sparse_collate",
    "sparse_collate_fn",
    "sparse_quantize",
    "to_dense",
    "voxelise",
]
