"""The reference networks of ``profiler.models``, small."""

from __future__ import annotations

from profiler import models
from tests.zoo.packages.examples import registering

network, made = registering("profiler.models")


made("reference_cosmoflow", "CosmoFlow (Mathuriya et al. 2018)")(
    models.cosmoflow.cosmoflow, input_shape=(4, 2, 16, 16, 16), levels=2, width=4
)
made("reference_gnmt", "GNMT (Wu et al. 2016)")(
    models.gnmt.gnmt, input_shape=(4, 12), vocabulary=100, width=32, layers=4
)
made("reference_gpt", "GPT-2 with a head of its own")(
    models.gpt.gpt, input_shape=(4, 16), vocabulary=100, width=64, layers=2, heads=4, context=32
)
made("reference_mesh_tangling", "Mesh-tangling (Dryden et al. 2019)")(
    models.mesh_tangling.mesh_tangling_128, input_shape=(4, 18, 64, 64), width=1 / 16
)
made("reference_resnet50", "ResNet-50 (He et al. 2016)")(
    models.resnet.resnet50, input_shape=(8, 3, 64, 64), num_classes=10, width=8
)
made("reference_unet3d", "3-D U-Net (Cicek et al. 2016)")(
    models.unet3d.unet3d, input_shape=(4, 3, 16, 16, 16), num_classes=3, width=4, depth=2
)
made("reference_vgg16", "VGG-16 (Simonyan and Zisserman 2015)")(
    models.vgg.vgg16, input_shape=(4, 3, 32, 32), num_classes=10, width=8, hidden=32
)
