"""Where in its passes a stage uses its parameters, and the hooks by which ZeRO-2 and ZeRO-3 follow a pass.

Every operator of the stage that makes tensors is called through :meth:`ShardedPasses.rule`: before it, forward is told
its place in the captured graph; what it made is hooked, so that before its backward runs, backward is told the same.
Modes differ in what stands at a place (:mod:`runtime.stage.functions`), never in places: ranks without rows, and those
that evaluate, gather in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from cuda_ops._torch import tree_leaves
from cuda_ops.calls import writes
from cuda_ops.dense.state_writes import attributes_viewed, written
from runtime.captured import CapturedModule
from runtime.optim.pass_shards import PassShards, UsePlaces
from runtime.stage.cut import NodeRule, without_gradient
from runtime.stage.modes import MicrobatchShard


class ShardedPasses:
    """Tells the shards of a stage where its passes are.

    Args:
        layers: of the stage.

    Attributes:
        shards: given once the stage's optimiser is made; None: parameters are whole, and nobody is told.
    """

    shards: PassShards | None = None

    def __init__(self, model: CapturedModule, layers: Collection[str]) -> None:
        graph = model.graph_module.graph
        viewed = attributes_viewed(graph)
        self._place = {
            node.name: place
            for place, node in enumerate(graph.nodes)
            if node.op == "call_function" and model.layer_of_node.get(node.name) in layers
        }
        self._handed_on = {
            node.name
            for node in graph.nodes
            if node.name in self._place
            and node in viewed
            and any(model.layer_of_node.get(user.name) not in layers for user in node.users)
        }
        self._writing = {
            node.name
            for node in graph.nodes
            if node.name in self._place and writes(node.target) and written(node, viewed)
        }

    def places(
        self, model: CapturedModule, parameters: Collection[str], received: Collection[str]
    ) -> dict[str, UsePlaces]:
        """The places of ``parameters`` of the stage, by name, in the order of their first use.

        Args:
            model: that the stage is of.
            received: values that other stages make, whose gradients flow on.
        """
        graph = model.graph_module.graph
        viewed = attributes_viewed(graph)
        made = {model.node_of_value[value] for value in received}
        flows = {node for node in graph.nodes if viewed.get(node) in parameters or node.name in made}
        uses: dict[str, list[tuple[int, bool]]] = {}
        for node in graph.nodes:
            place = self._place.get(node.name)
            if place is None:
                continue
            if any(argument in flows for argument in node.all_input_nodes):
                flows.add(node)
            for name in dict.fromkeys(viewed[each] for each in node.all_input_nodes if each in viewed):
                if name in parameters:
                    uses.setdefault(name, []).append((place, node in flows))
        by_name = {}
        for name, at in uses.items():
            every = [place for place, _ in at]
            back = [place for place, differs in at if differs]
            by_name[name] = UsePlaces((every[0], every[-1]), (back[0], back[-1]))
        everywhere = (0, len(graph.nodes))
        return by_name | {name: UsePlaces(everywhere, everywhere) for name in parameters if name not in by_name}

    def rule(self, replace: NodeRule) -> NodeRule:
        """``replace``, with every operator of the stage called so that passes are followed."""

        def found(node: fx.Node) -> Callable[..., Any] | None:
            function = replace(node)
            place = self._place.get(node.name)
            if place is None:
                return function
            target: Any = node.target
            if function is None:
                function = partial(without_gradient, target) if node.name in self._writing else target
            return partial(self._call, place, self._copying(function) if node.name in self._handed_on else function)

        return found

    def _copying(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Of a view of a parameter that another stage reads: a copy, as the parameter is gone when it is sent."""

        def found(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            is_lent = self.shards is not None and self.shards.gathers and isinstance(result, Tensor)
            return result.clone() if is_lent else result

        return found

    def at(self, microbatch_shard: MicrobatchShard) -> None:
        """A pass forward is next."""
        if self.shards is not None:
            self.shards.begin_forward()

    def begin(self, microbatch: int) -> None:
        """The backward of a micro-batch is next."""
        if self.shards is not None:
            self.shards.begin_backward()

    def finish(self) -> None:
        """A backward is over."""
        if self.shards is not None:
            self.shards.end_backward()

    def reset(self) -> None:
        """Without effect: what is under way are passes, each of which begins anew."""

    def _call(self, place: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.shards is None:
            return function(*args, **kwargs)
        self.shards.forward_at(place)
        result = function(*args, **kwargs)
        self.shards.forward_at(place + 0.5)
        if torch.is_grad_enabled():
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(partial(_told, self.shards, place))
        return result


def _told(shards: PassShards, place: int, gradients: tuple[Tensor, ...]) -> None:
    shards.backward_at(place)
