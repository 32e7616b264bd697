"""State dicts of other libraries: which of their entries is which of ours, and in what order its numbers lie.

A convolution's kernel is ours as (offsets, in, out), x slowest and z fastest, odd sizes centred and even ones from
their site on (:mod:`cuda_ops.sparse.keys`). Each library is a :class:`WeightLayout`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.geometry import Triple
from cuda_ops.sparse.nn import Conv3d

WeightChange = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """How a library keeps what a module of ours keeps.

    Attributes:
        library: its name.
        rename: (module of ours, name of its entry) to the entry's name in the library, below the module's own.
        to_ours, to_theirs: (kernel or bias of the library or ours, convolution, name of the entry) to the other's.
    """

    library: str
    rename: Callable[[nn.Module, str], str]
    to_ours: Callable[[Tensor, Conv3d, str], Tensor]
    to_theirs: Callable[[Tensor, Conv3d, str], Tensor]


def load(module: nn.Module, state: Mapping[str, Tensor], layout: WeightLayout, *, strict: bool = True) -> None:
    """Loads a state dict of the library into ``module``.

    Raises:
        SparseInputError: entries are missing, too many (unless not ``strict``), or of another shape.
    """
    named = dict(_entries(module, layout))
    if strict:
        _require_same_names(set(named.values()), set(state), layout.library)
    owners = _owners(module)
    converted = {}
    for ours, theirs in named.items():
        if theirs in state:
            owner, name = owners[ours]
            value = state[theirs]
            converted[ours] = layout.to_ours(value, owner, name) if isinstance(owner, Conv3d) else value
    expected = module.state_dict()
    for name, value in converted.items():
        if value.shape != expected[name].shape:
            raise SparseInputError(
                f"shape of {named[name]}",
                where=f"state dict of {layout.library}",
                actual=list(value.shape),
                expected=f"{list(expected[name].shape)}, of {name} here",
                remedy="build the network with the channels and kernels of the checkpoint",
            )
    module.load_state_dict(converted, strict=False)


def dump(module: nn.Module, layout: WeightLayout) -> dict[str, Tensor]:
    """The state dict of ``module`` as the library keeps it."""
    state = module.state_dict()
    owners = _owners(module)
    exported = {}
    for ours, theirs in _entries(module, layout):
        owner, name = owners[ours]
        exported[theirs] = layout.to_theirs(state[ours], owner, name) if isinstance(owner, Conv3d) else state[ours]
    return exported


def turned(kernel: Tensor, sizes: Triple) -> Tensor:
    """(offsets, in, out) in the other order of the axes: x slowest to x fastest."""
    channels = kernel.shape[-2:]
    return kernel.reshape(*sizes, *channels).permute(2, 1, 0, 3, 4).reshape(-1, *channels).contiguous()


def _entries(module: nn.Module, layout: WeightLayout) -> list[tuple[str, str]]:
    """(our name, the library's) of every entry of the state dict."""
    owners = _owners(module)
    pairs = []
    for ours in module.state_dict():
        owner, name = owners[ours]
        pairs.append((ours, ours.removesuffix(name) + layout.rename(owner, name)))
    return pairs


def _owners(module: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """By the name of an entry: the module that holds it, and its name there."""
    modules = dict(module.named_modules())
    return {name: (modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in module.state_dict()}


def _require_same_names(expected: set[str], actual: set[str], library: str) -> None:
    missing = sorted(expected - actual)
    unknown = sorted(actual - expected)
    if missing or unknown:
        raise SparseInputError(
            "names of a state dict",
            where=f"state dict of {library}",
            actual=f"{len(unknown)} unknown: {', '.join(unknown[:3]) or 'none'}",
            expected=f"{len(missing)} missing: {', '.join(missing[:3]) or 'none'}",
            remedy="build the network of the checkpoint, or give strict=False to load what is common",
        )
