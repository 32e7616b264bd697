"""The rule that puts shared layers in place of sparse operators, on a stage whose ranks share out sites."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx

from cuda_ops.calls import arguments_of
from cuda_ops.sparse import operators
from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import MIXES_SAMPLES, Graph, Layer, is_sites
from runtime.sparse.halo import SampleSums, shared_conv, with_halo
from runtime.sparse.share import SiteShare
from runtime.spatial.exchange import PeerGroup
from runtime.stage.modes import MicrobatchShard

_OPS = torch.ops.halopipe


class SharedSites:
    """The layers over sites of one stage on one rank of several.

    Args:
        value_of_node: the graph's value that a node is, by name.
        peers: the ranks of the stage.
    """

    def __init__(self, value_of_node: Mapping[str, str], peers: PeerGroup) -> None:
        self.peers = peers
        self._value_of_node = value_of_node
        self._now: SiteShare | None = None

    def at(self, microbatch_shard: MicrobatchShard) -> None:
        """What is run next."""
        self._now = cast("SiteShare | None", microbatch_shard.sites)

    def begin(self, microbatch: int) -> None:
        """A backward needs to be told nothing."""

    def rule(self, node: fx.Node) -> Callable[..., Any] | None:
        """See :data:`runtime.stage.cut.NodeRule`."""
        entry = self._forms.get(node.target)
        if entry is None:
            return None
        form, place = entry
        return partial(form, self._value_of_node[arguments_of(node)[place].name])

    @property
    def _forms(self) -> dict[Any, tuple[Callable[..., Any], str]]:
        """By operator, what is called in its place, and the argument that says which map or segments are meant."""
        return {
            _OPS.sparse_conv.default: (self._conv, "neighbours"),
            _OPS.sparse_sum_pool.default: (self._sum_pool, "neighbours"),
            _OPS.sparse_max_pool.default: (self._max_pool, "neighbours"),
            _OPS.segment_sum.default: (self._segment_sum, "starts"),
            _OPS.segment_max.default: (self._segment_max, "starts"),
            _OPS.segment_grid.default: (self._segment_grid, "starts"),
            _OPS.segment_expand.default: (self._segment_expand, "starts"),
        }

    @property
    def _sites(self) -> SiteShare:
        if self._now is None:
            raise ValueError("a stage that shares sites was not told which")
        return self._now

    def _conv(self, name: str, x: Tensor, weight: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
        return shared_conv(x, weight, self._sites.map(name, x.device), self.peers)

    def _sum_pool(self, name: str, x: Tensor, neighbours: Tensor, reverse: Tensor) -> Tensor:
        local = self._sites.map(name, x.device)
        return operators.sparse_sum_pool(with_halo(x, local, self.peers), local.neighbours, local.reverse)

    def _max_pool(self, name: str, x: Tensor, neighbours: Tensor, reverse: Tensor) -> tuple[Tensor, Tensor]:
        local = self._sites.map(name, x.device)
        return operators.sparse_max_pool(with_halo(x, local, self.peers), local.neighbours, local.reverse)

    def _segment_sum(self, name: str, x: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
        own = self._sites.segments(name, x.device)
        return self._sums.sum(operators.segment_sum(x, own.starts, own.lengths))

    def _segment_max(self, name: str, x: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        own = self._sites.segments(name, x.device)
        largest, rows = operators.segment_max(x, own.starts, own.lengths)
        has_rows = (own.lengths > 0)[:, None]
        return self._sums.largest(torch.where(has_rows, largest, -torch.inf)), rows

    def _segment_grid(
        self, name: str, x: Tensor, cells: Tensor, starts: Tensor, lengths: Tensor, num_cells: int
    ) -> Tensor:
        own = self._sites.segments(name, x.device)
        return self._sums.sum(operators.segment_grid(x, cells, own.starts, own.lengths, num_cells))

    def _segment_expand(self, name: str, y: Tensor, starts: Tensor, lengths: Tensor, num_rows: int) -> Tensor:
        own = self._sites.segments(name, y.device)
        return operators.segment_expand(self._sums.whole(y), own.starts, own.lengths, int(own.lengths.sum()))

    @property
    def _sums(self) -> SampleSums:
        return SampleSums(self._sites.shares, self.peers)

    def finish(self) -> None:
        """A backward is over: nothing was put off."""

    def reset(self) -> None:
        """What is under way came to nothing."""
        self._now = None


def require_shareable(graph: Graph, layers: frozenset[str], stage: int) -> None:
    """Raises :class:`UnsupportedModelError` unless every layer of the stage can be run on a part of the sites."""
    values = graph.values()
    for layer in graph.layers:
        if layer.name not in layers or not any(values[name].has_sites for name in layer.inputs):
            continue
        if layer.kind not in _REDUCE_SITES and not _keeps_sites(layer, [values[name].dims for name in layer.inputs]):
            raise UnsupportedModelError(
                f"stage {stage} cannot share out sites: layer {layer.name} needs those of all ranks",
                [f"{_operator(layer)} over {' x '.join(values[layer.inputs[0]].dims)}"],
                [
                    "put that layer on a stage of one rank",
                    "a loss that is a mean over samples of the mean over their sites (SiteCrossEntropy)",
                ],
            )


_KEEP_SITES = frozenset(
    {"pointwise", "batch_norm", "linear", "concat", "sparse_conv", "sparse_pool", "softmax"}
    | {"layer_norm", "slice", "loss", "segment_expand", "reduce", "reshape"}
)
_REDUCE_SITES = frozenset({"segment"})
_OPAQUE = "opaque"


def _keeps_sites(layer: Layer, read: Sequence[tuple[str, ...]]) -> bool:
    """Whether what the layer makes at a site follows from what it reads there (or through a map)."""
    kind = layer.kind
    attributes = layer.attributes
    if kind not in _KEEP_SITES and (kind != _OPAQUE or attributes.get(MIXES_SAMPLES)):
        return False
    along: Any = attributes.get("dims" if kind == "reduce" else "dim") if kind in _ALONG_A_DIM else ()
    dims = layer.outputs[0].dims if kind == "concat" else read[0]  # stacked tensors have the dim only then
    if any(is_sites(dims[dim]) for dim in (along if isinstance(along, tuple) else (along,))):
        return False
    leading = len(layer.outputs[0].dims) if kind in _ANYWHERE else 1
    return all(any(map(is_sites, spec.dims[:leading])) for spec in layer.outputs)


_ALONG_A_DIM = frozenset({"softmax", "concat", "slice", "reduce"})
_ANYWHERE = frozenset({"pointwise", "reduce", "reshape"})
"""Kinds that keep sites apart whichever dim they are on; others take the first for rows."""


def _operator(layer: Layer) -> str:
    return str(layer.attributes.get("op", layer.kind))
