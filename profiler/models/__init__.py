"""The reference networks: plain `torch.nn.Module` files that know nothing of planning.

A network is given to halopipe as `pkg.mod:factory`, and a factory returns

    (module, (inputs, targets), loss_fn)

- `inputs` and `targets` are each a tensor or a tuple of tensors, with the sample dim first, and
  `output = module(inputs)` (or `module(*inputs)` of a tuple);
- `loss_fn(output, targets)` is a mean over the samples, so that the loss of a batch is the size-weighted mean of the
  losses of its parts;
- the keyword `input_shape` (sample dim first, what `--input 8,3,64,64` gives) sizes the example; the others shrink the
  network, for tests and demonstrations.

Parameters are drawn from the global generator (`torch.manual_seed` before the call fixes them), examples from
generators of their own. Parameters and examples lie on torch's default device, `with torch.device("meta")` included,
and have its default dtype. A shape that a network cannot take raises `ValueError`.

| factory | network | input dims | parameters |
|---|---|---|---|
| `profiler.models.resnet:resnet50`, `resnet18` | He et al. 2016 | sample, channel, height, width | 25.6 M, 11.7 M |
| `profiler.models.vgg:vgg16` | Simonyan and Zisserman 2015 | sample, channel, height, width | 138.4 M |
| `profiler.models.gnmt:gnmt` | Wu et al. 2016 | sample, time (source and target) | 193.8 M |
| `profiler.models.gpt:gpt` | Radford et al. 2019 | sample, time | 163.0 M |
| `profiler.models.llama:llama` | after Touvron et al. 2023 | sample, time | 56.4 M |
| `profiler.models.parareal:parareal` | Lee, Park and Lee 2022 | sample, channel, height, width | 0.2 M |
| `profiler.models.unet2d:unet2d` | after Ronneberger et al. 2015 | sample, channel, height, width (both vary) | 35 k |
| `profiler.models.unet3d:unet3d` | Cicek et al. 2016 | sample, channel, depth, height, width | 19.1 M |
| `profiler.models.cosmoflow:cosmoflow` | after Mathuriya et al. 2018 | sample, channel, depth, height, width | 5.2 M |
| `profiler.models.mesh_tangling:mesh_tangling_1k` | Dryden et al. 2019 | sample, channel, height, width | 34.4 M |
| `profiler.models.mesh_tangling:mesh_tangling_2k` | Dryden et al. 2019 | sample, channel, height, width | 12.4 M |
| `profiler.models.mesh_tangling:mesh_tangling_128` | Dryden et al. 2019 | sample, channel, height, width | 4.2 M |
| `profiler.models.minkunet:minkunet` | Choy et al. 2019 | sample, site, channel | 21.7 M |
| `profiler.models.sparse_resnet:sparse_resnet` | as in torchsparse | sample, site, channel | 2.7 M |
| `profiler.models.sparse_vgg:sparse_vgg16` | Zhai et al. 2022 (SparsePipe) | sample, site, channel | 63.2 M |
| `profiler.models.sparse_backbones:sparse_resunet42` | as in torchsparse | sample, site, channel | 21.7 M |
| `profiler.models.sparse_backbones:sparse_resnet21d` | as in torchsparse, from above | sample, site, channel | 5.2 M |

The last five take sparse tensors: their example is a `SparseTensor` of generated surfaces, and `input_shape` says how
many sites each sample has.  Networks of sampled graphs, `profiler.models.graphs:sage` and `gat`, take seeds.

All of them pass `torch.export.export(..., strict=False)` in training mode with a dynamic sample dim.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = [
    "cosmoflow",
    "gnmt",
    "gpt",
    "llama",
    "mesh_tangling",
    "minkunet",
    "parareal",
    "resnet",
    "sparse_backbones",
    "sparse_resnet",
    "sparse_vgg",
    "unet2d",
    "unet3d",
    "vgg",
]


def __getattr__(name: str) -> ModuleType:
    """A network's module is imported when it is first asked for."""
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
