"""The reference networks of ``profiler.models``, small."""

from __future__ import annotations

from benchmarks.networks.zoo.examples import Example
from profiler import models


def reference_cosmoflow() -> Example:
    """CosmoFlow (Mathuriya et al. 2018)."""
    return models.cosmoflow.cosmoflow(input_shape=(4, 2, 16, 16, 16), levels=2, width=4)


def reference_gnmt() -> Example:
    """GNMT (Wu et al. 2016)."""
    return models.gnmt.gnmt(input_shape=(4, 12), vocabulary=100, width=32, layers=4)


def reference_gpt() -> Example:
    """GPT-2 with a head of its own."""
    return models.gpt.gpt(input_shape=(4, 16), vocabulary=100, width=64, layers=2, heads=4, context=32)


def reference_mesh_tangling() -> Example:
    """Mesh-tangling (Dryden et al. 2019)."""
    return models.mesh_tangling.mesh_tangling_128(input_shape=(4, 18, 64, 64), width=1 / 16)


def reference_resnet50() -> Example:
    """ResNet-50 (He et al. 2016)."""
    return models.resnet.resnet50(input_shape=(8, 3, 64, 64), num_classes=10, width=8)


def reference_unet3d() -> Example:
    """3-D U-Net (Cicek et al. 2016)."""
    return models.unet3d.unet3d(input_shape=(4, 3, 16, 16, 16), num_classes=3, width=4, depth=2)


def reference_vgg16() -> Example:
    """VGG-16 (Simonyan and Zisserman 2015)."""
    return models.vgg.vgg16(input_shape=(4, 3, 32, 32), num_classes=10, width=8, hidden=32)
