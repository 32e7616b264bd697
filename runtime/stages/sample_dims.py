"""Where samples lie in what the nodes of a captured graph make, nodes inside a layer included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from planner.ir.errors import UnsupportedModelError
from planner.ir.graph import INTERLEAVES_SAMPLES, SAMPLE
from runtime.stages.captured import CapturedModel


class SampleDims:
    """The dim of each node's result that samples lie along, by the symbols that stand for their number."""

    def __init__(self, model: CapturedModel) -> None:
        self._symbols = _symbols_of_samples(model)
        interleaving = {layer.name for layer in model.graph.layers if layer.attributes.get(INTERLEAVES_SAMPLES)}
        self._interleaved: set[str] = set()
        for node in model.graph_module.graph.nodes:
            mixed = model.layer_of_node.get(node.name) in interleaving
            mixed = mixed or any(each.name in self._interleaved for each in node.all_input_nodes)
            if mixed and any(factor != 1 for _, factor in self._found(node)):
                self._interleaved.add(node.name)

    def of(self, node: fx.Node, layer: str, num_ranks: int) -> int | None:
        """The dim; None if the result is the same for all samples, or no share of them is an interval of it.

        Raises:
            UnsupportedModelError: the latter, and several ranks have the samples.
        """
        found = self._found(node)
        reason = ""
        if not self._symbols:
            reason = "the model was captured for one number of samples"
        elif len(found) > 1 or any(factor is None for _, factor in found) or node.name in self._interleaved:
            reason = "a share of the samples is no interval of what it draws"
        if reason and num_ranks > 1:
            raise cannot_share(layer, reason)
        return found[0][0] if found and not reason else None

    def _found(self, node: fx.Node) -> list[tuple[int, Any]]:
        """Dims that depend on the number of samples, and the factor that each is of it; None: it is no multiple."""
        value = node.meta.get("val")
        if isinstance(value, (tuple, list)):  # a recurrent layer: its output comes first
            value = next((each for each in value if isinstance(each, Tensor)), None)
        if not isinstance(value, Tensor):
            return []
        return [
            (dim, _factor(size.node.expr, self._symbols))
            for dim, size in enumerate(value.shape)
            if isinstance(size, torch.SymInt) and self._symbols & size.node.expr.free_symbols
        ]


def _factor(expression: Any, symbols: frozenset[Any]) -> Any:
    samples = next(iter(symbols))
    expression = expression.xreplace(dict.fromkeys(symbols, samples))
    factor = expression.coeff(samples)
    return factor if factor != 0 and (expression - factor * samples).expand() == 0 else None


def _symbols_of_samples(model: CapturedModel) -> frozenset[Any]:
    """Every input may have a symbol of its own."""
    nodes = {node.target: node for node in model.graph_module.graph.nodes if node.op == "placeholder"}
    sizes = [
        nodes[name].meta["val"].shape[spec.dims.index(SAMPLE)]
        for name, spec in model.graph.inputs.items()
        if SAMPLE in spec.dims
    ]
    return frozenset(
        symbol for size in sizes if isinstance(size, torch.SymInt) for symbol in size.node.expr.free_symbols
    )


def cannot_share(layer: str, reason: str) -> UnsupportedModelError:
    """The error of a layer that several ranks cannot draw for."""
    return UnsupportedModelError(
        f"layer {layer} draws random numbers, and cannot on several ranks as on one",
        [reason],
        ["put the layer on a stage of one rank", "train without it (a dropout of 0)"],
    )
