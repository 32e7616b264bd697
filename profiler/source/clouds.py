"""Sparse networks: a factory's SparseTensor as a model on tensors, whose maps are inputs.

The network is run once, with its loss, on the factory's clouds: :mod:`cuda_ops.sparse.recipe` notes which maps it asks
for.  From then on they are prepared ahead of the features, and numbers of sites are sizes that vary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.nn.tensor import SparseTensor
from cuda_ops.sparse.preparation import Preparation, padded
from cuda_ops.sparse.recipe import PreparedNetwork, Recipe, record
from planner.ir.errors import FactoryError, UnsupportedModelError
from profiler.source.losses import TrainedLoss, mean_of_squares, own_loss
from profiler.source.model import LoadedModel, PreparedExample
from profiler.source.structure import BatchStructure, Nest

_PAIR = 2


def is_clouds(network: nn.Module, inputs: Any) -> bool:
    """Whether a factory's inputs are a batch of clouds: a SparseTensor, or coordinates, features and counts.

    Three such tensors are clouds for a network that has sparse layers.
    """
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    if any(isinstance(each, SparseTensor) for each in values):
        return True
    return (
        len(values) == 3
        and all(isinstance(each, Tensor) for each in values)
        and [each.ndim for each in values] == [3, 3, 1]
        and values[0].dtype == torch.int32
        and any(type(module).__module__.startswith(_SPARSE_LAYERS) for module in network.modules())
    )


_SPARSE_LAYERS = "cuda_ops.sparse.nn"


def load_clouds(
    factory: str, network: nn.Module, inputs: Any, aims: Any, loss: TrainedLoss
) -> tuple[LoadedModel, Mapping[str, Any]]:
    """The model, and what varies in it.

    Args:
        factory: its name, for people.
        inputs: a SparseTensor (or a tuple of just that), and ``aims``, the targets, one a sample, or one a point in the
            order that the points were given in; or coordinates, features and counts with samples first
            (:mod:`cuda_ops.sparse.preparation`), and targets with samples first as well.

    Raises:
        FactoryError: the network takes something beside clouds, or cannot be run on them.
        UnsupportedModelError: it is loaded without values.
    """
    if torch.get_default_device().type == "meta":
        raise UnsupportedModelError(
            "a sparse network has no shapes without its points",
            [f"{factory} takes a SparseTensor"],
            ["profile it where it runs: leave out --on; a cluster file tells the planner of other devices"],
        )
    values = inputs if isinstance(inputs, tuple) else (inputs,)
    nest, targets = Nest.of(aims, f"{factory}: targets")
    if isinstance(values[0], SparseTensor) and len(values) == 1:
        cloud = values[0]
        per_site = tuple(len(target) == len(cloud) != cloud.num_samples for target in targets)
        raw = samples_first(cloud, targets, per_site)
    elif any(isinstance(each, SparseTensor) for each in values):
        raise FactoryError(
            f"{factory} returned a SparseTensor among other inputs",
            [f"{len(values)} inputs"],
            ["a network that takes one SparseTensor; further numbers can be features of its sites"],
        )
    else:
        raw = (*values, *targets)
        per_site = tuple(each.ndim > 1 and each.shape[1] == values[0].shape[1] for each in targets)
    if len(raw[2]) < _PAIR:  # one is special to the capture
        raw = tuple(torch.cat([tensor] * _PAIR) for tensor in raw)
    cloud_loss = replace(loss, function=_on_features if loss.function is own_loss else loss.function)
    try:
        preparation = _preparation(network, raw, per_site, cloud_loss, nest)
    except SparseInputError as error:
        raise FactoryError(f"{factory} returned a network that does not take its clouds", [str(error)]) from error
    example = PreparedExample(preparation, raw[:_NUM_INPUTS], raw[_NUM_INPUTS:])
    prepared, compared = example.prepared(example.inputs, example.targets)
    structure = replace(BatchStructure.plain(_NUM_INPUTS, 0), targets=nest)
    prepared_network = PreparedNetwork(network, preparation.recipe)
    model = LoadedModel(prepared_network, prepared, compared, cloud_loss, clouds=example, structure=structure)
    return model, _varying(preparation)


_NUM_INPUTS = 3


def _preparation(
    network: nn.Module, raw: tuple[Tensor, ...], per_site: tuple[bool, ...], loss: TrainedLoss, nest: Nest
) -> Preparation:
    """What the network and its loss ask for, by running them once."""
    clouds = Preparation(Recipe((), ()), per_site).clouds(raw)
    targets = tuple(clouds.tensor(f"target_{index}") for index in range(len(per_site)))
    example = SparseTensor.on(clouds.geometry, clouds.tensor("features"))
    return Preparation(record(lambda x: loss(network(x), nest.filled(targets)), example, network), per_site)


def samples_first(example: SparseTensor, targets: tuple[Tensor, ...], per_site: tuple[bool, ...]) -> tuple[Tensor, ...]:
    """Coordinates, features, counts and targets, samples first and padded.

    Args:
        targets: one a sample, or one a point in the order that the points were given in, as ``per_site`` says.
    """
    segments = example.segments
    cuts = [slice(s, s + n) for s, n in zip(segments.starts.tolist(), segments.lengths.tolist(), strict=True)]
    first = padded([example.coords[cut, 1:] for cut in cuts], [example.feats[cut] for cut in cuts])
    ordered_targets = []
    for target, is_per_site in zip(targets, per_site, strict=True):
        if is_per_site:
            ordered = target if example.order is None else target[example.order]
            target = target.new_zeros(len(cuts), first[0].shape[1], *target.shape[1:])
            for index, cut in enumerate(cuts):
                target[index, : cut.stop - cut.start] = ordered[cut]
        ordered_targets.append(target)
    return (*first, *ordered_targets)


def _varying(preparation: Preparation) -> Mapping[str, Any]:
    names = BatchStructure.plain(preparation.num_inputs, len(preparation.per_site)).names
    of = dict(zip(preparation.names, names, strict=True))
    return {word: [(of[name], dim) for name, dim in places] for word, places in preparation.varying.items()}


def _on_features(output: Any, targets: Any = ()) -> Tensor:
    return mean_of_squares(output.feats) if isinstance(output, SparseTensor) else own_loss(output)
