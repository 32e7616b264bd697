"""Sparse networks: a factory's SparseTensor as a model on tensors, whose maps are inputs.

The network is run once, with its loss, on the factory's clouds: :mod:`cuda_ops.sparse.recipe` notes which maps it asks
for.  From then on they are prepared ahead of the features, and numbers of sites are sizes that vary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.nn.tensor import SparseTensor
from cuda_ops.sparse.preparation import Preparation, padded
from cuda_ops.sparse.recipe import PreparedNetwork, record
from planner.ir.errors import FactoryError
from profiler.model import CloudExample, LoadedModel, Loss, graph_inputs, mean_of_squares

_PAIR = 2


def is_clouds(inputs: Any) -> bool:
    """Whether a factory's inputs are a batch of clouds."""
    return isinstance(inputs, SparseTensor) or (
        isinstance(inputs, tuple) and any(isinstance(each, SparseTensor) for each in inputs)
    )


def load_clouds(
    factory: str, network: nn.Module, inputs: Any, targets: tuple[Tensor, ...], loss: Loss
) -> tuple[LoadedModel, Mapping[str, Any]]:
    """The model, and what varies in it.

    Args:
        factory: its name, for people.
        inputs: a SparseTensor of coordinates and features, or a tuple of just that.
        targets: one a sample, or one a point in the order that the points were given in.

    Raises:
        FactoryError: the network takes something beside clouds, or cannot be run on them.
    """
    example = inputs[0] if isinstance(inputs, tuple) and len(inputs) == 1 else inputs
    if not isinstance(example, SparseTensor):
        raise FactoryError(
            f"{factory} returned a SparseTensor among other inputs",
            [f"{len(inputs)} inputs"],
            ["a network that takes one SparseTensor; further numbers can be features of its sites"],
        )
    raw = _samples_first(example, targets)
    if example.num_samples < _PAIR:  # one is special to the capture
        raw = tuple(torch.cat([tensor] * _PAIR) for tensor in raw)
    per_site = tuple(len(target) == len(example) != example.num_samples for target in targets)
    function = loss.function

    def run(clouds: SparseTensor) -> Tensor:
        return function_of(
            network(clouds), tuple(target if not site else target[clouds_order] for target, site in both)
        )

    clouds_order = torch.arange(len(example)) if example.order is None else example.order
    both = tuple(zip(targets, per_site, strict=True))
    function_of = Loss(_on_features if function is mean_of_squares else function, loss.unpacked)
    try:
        recipe = record(run, example, network)
    except SparseInputError as error:
        raise FactoryError(f"{factory} returned a network that does not take its clouds", [str(error)]) from error
    preparation = Preparation(recipe, per_site)
    found = CloudExample(preparation, raw[:3], raw[3:])
    prepared, aims = found.prepared(found.inputs, found.targets)
    model = LoadedModel(PreparedNetwork(network, recipe), prepared, aims, function_of, clouds=found)
    return model, _varying(preparation)


def _samples_first(example: SparseTensor, targets: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Coordinates, features, counts and targets, samples first and padded."""
    coordinates, segments = example.coords, example.segments
    rows = [range(s, s + n) for s, n in zip(segments.starts.tolist(), segments.lengths.tolist(), strict=True)]
    cut = [slice(each.start, each.stop) for each in rows]
    first = padded([coordinates[each, 1:] for each in cut], [example.feats[each] for each in cut])
    points = first[0].shape[1]
    found = []
    for target in targets:
        if len(target) == len(example) != example.num_samples:
            ordered = target if example.order is None else target[example.order]
            whole = target.new_zeros(len(cut), points, *target.shape[1:])
            for index, each in enumerate(cut):
                whole[index, : each.stop - each.start] = ordered[each]
            target = whole
        found.append(target)
    return (*first, *found)


def _varying(preparation: Preparation) -> Mapping[str, Any]:
    names = graph_inputs(preparation.num_inputs, len(preparation.per_site))
    of = dict(zip(preparation.names, names, strict=True))
    return {word: [(of[name], dim) for name, dim in places] for word, places in preparation.varying.items()}


def _on_features(output: Any, targets: tuple[Tensor, ...] = ()) -> Tensor:
    return mean_of_squares(output.feats if isinstance(output, SparseTensor) else output, targets)
