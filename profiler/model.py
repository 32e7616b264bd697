"""A model with its example and its loss, as a factory describes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cuda_ops.recurrent import autocast
from cuda_ops.sparse.preparation import Preparation


@dataclass(frozen=True, slots=True)
class Loss:
    """The user's loss function, called the same way whether it wants one target or a tuple.

    Attributes:
        function: as the factory gave it.
        unpacked: the factory gave a bare tensor of targets, so that is what ``function`` gets.
    """

    function: Callable[..., Tensor]
    unpacked: bool = False

    def __call__(self, output: Any, targets: tuple[Tensor, ...]) -> Tensor:
        return self.function(output, targets[0] if self.unpacked else targets)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model, ready to train: ``loss_fn(module(*inputs), targets)`` is the loss of its example.

    Attributes:
        module: each part in the mode that it is trained in.
        inputs, targets: the example; samples first.
        loss_fn: takes the module's output and the tuple of targets; a mean over samples.
        varying: the places, (tensor, dim), of each size that varies from batch to batch, by name.
        autocast: the dtype that operators run in where torch's autocast says so; None: no autocast.
        elementwise: operators (``mylib::op``) of which the user says that they treat every element by itself.
        clouds: of a sparse network, how ``inputs`` and ``targets`` are made of batches of clouds.
    """

    module: nn.Module
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    loss_fn: Callable[[Any, tuple[Tensor, ...]], Tensor]
    varying: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    elementwise: frozenset[str] = frozenset()
    clouds: CloudExample | None = None

    def loss(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        """The loss of a batch as a step is given it, under autocast if that is asked for."""
        return self.loss_of_taken(*self.taken(inputs, targets))

    def loss_of_taken(self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Tensor:
        """The same of what :meth:`taken` made of it."""
        with self.precision():
            return self.loss_fn(self.module(*inputs), targets)

    def precision(self) -> AbstractContextManager[Any]:
        """The context in which forward passes run."""
        return autocast(self.inputs[0].device.type, self.autocast)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The example's inputs and targets, by the names that the graph has for them."""
        names = graph_inputs(len(self.inputs), len(self.targets))
        return dict(zip(names, (*self.inputs, *self.targets), strict=True))

    @property
    def fed(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The example as a step is given it, inputs and targets: samples first."""
        return (self.inputs, self.targets) if self.clouds is None else (self.clouds.inputs, self.clouds.targets)

    def taken(
        self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What ``module`` and ``loss_fn`` take, of a batch as a step is given it; where the model's example is."""
        found = (inputs, targets) if self.clouds is None else self.clouds.prepared(inputs, targets)
        device = self.inputs[0].device
        return tuple(tensor.to(device) for tensor in found[0]), tuple(tensor.to(device) for tensor in found[1])

    @property
    def extents(self) -> dict[str, int]:
        """The example's extent of each size that varies."""
        return {name: self.tensors[places[0][0]].shape[places[0][1]] for name, places in self.varying.items()}

    @property
    def samples(self) -> int:
        """Number of samples of the example."""
        return self.inputs[0].shape[0] if self.inputs[0].ndim else 1


@dataclass(frozen=True, slots=True)
class CloudExample:
    """The example of a sparse network as its user's batches are.

    Attributes:
        preparation: makes of them what the network is given.
        inputs: coordinates, features and counts, samples first, padded to the largest cloud.
        targets: samples first; (samples, points, ...) where there is one a site.
    """

    preparation: Preparation
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]

    def prepared(
        self, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Inputs and targets of the network, for a batch of clouds."""
        tensors = tuple(self.preparation.clouds((*inputs, *targets)).tensors().values())
        return tensors[: self.preparation.num_inputs], tensors[self.preparation.num_inputs :]

    def to(self, dtype: torch.dtype) -> CloudExample:
        """With features, and targets that are no integers, of ``dtype``."""
        inputs, targets = (
            tuple(tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors)
            for tensors in (self.inputs, self.targets)
        )
        return replace(self, inputs=inputs, targets=targets)

    def of_fewer_points(self, divisor: int) -> CloudExample:
        """With a part of the points of each cloud, at least one where there are some."""
        points = -(-self.inputs[0].shape[1] // divisor)
        coordinates, features, counts = self.inputs
        targets = tuple(
            target[:, :points] if is_per_site else target
            for target, is_per_site in zip(self.targets, self.preparation.per_site, strict=True)
        )
        inputs = coordinates[:, :points], features[:, :points], counts.clamp(max=points)
        return replace(self, inputs=inputs, targets=targets)

    @property
    def without_samples(self) -> frozenset[str]:
        """The graph's inputs whose first dim is not the samples, whatever its extent."""
        preparation = self.preparation
        names = graph_inputs(preparation.num_inputs, len(preparation.per_site))
        kinds = ("neighbours_", "reverse_", "features")
        return frozenset(name for name, own in zip(names, preparation.names, strict=True) if own.startswith(kinds))

    @property
    def named(self) -> dict[str, Tensor]:
        """Inputs and targets by name."""
        names = ("coordinates", "features", "counts", *graph_inputs(0, len(self.targets)))
        return dict(zip(names, (*self.inputs, *self.targets), strict=True))


def graph_inputs(num_inputs: int, num_targets: int) -> tuple[str, ...]:
    """Names of the tensors that a step is given, inputs and targets."""
    counts = (("inputs", num_inputs), ("targets", num_targets))
    return tuple(name if index == 0 else f"{name}_{index + 1}" for name, count in counts for index in range(count))


def mean_of_squares(output: Any, targets: tuple[Tensor, ...] = ()) -> Tensor:
    """The loss where a factory gives none: for each float tensor of ``output`` the mean of its squares, summed."""
    floats = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if not floats:
        raise TypeError("the module's output holds no float tensor, so a loss function is needed")
    total = floats[0].square().mean()
    for tensor in floats[1:]:
        total = total + tensor.square().mean()
    return total
