"""Captured graphs on another device: one without memory stands for a GPU, as it refuses to be mixed with the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from cuda_ops.device.placing import move, on_device, tensors_of
from tests.without_memory import META, on_meta


class Positions(nn.Module):
    """Makes tensors from nothing, and has a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))
        self.constant = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(4, 4, dtype=torch.bool, device=x.device).triu(1)
        places = torch.arange(4, device=x.device) + self.constant
        y = (x * self.weight + self.shift + places).unsqueeze(1).expand(-1, 4, -1)
        return y.masked_fill(mask, 0.0).to(x.device, torch.float64).sum()


def captured() -> fx.GraphModule:
    graph: fx.GraphModule = torch.export.export(Positions(), (torch.ones(2, 4),)).module()
    for node in list(graph.graph.nodes):
        if node.op == "call_module" or "assert" in str(node.target):  # as the profiler's capture drops them
            graph.graph.erase_node(node)
    return graph


def test_a_graph_runs_where_it_was_placed_and_not_where_it_was_captured() -> None:
    there = on_meta(captured())
    (loss,) = run(there)
    assert loss.device == META
    loss.backward()
    assert all(parameter.grad.device == META for parameter in there.parameters())


def test_operators_that_were_not_placed_mix_devices() -> None:
    graph = captured()
    there = on_meta(graph)
    for before, after in zip(graph.graph.nodes, there.graph.nodes, strict=True):
        after.kwargs = {**after.kwargs, **{n: v for n, v in before.kwargs.items() if isinstance(v, torch.device)}}
    with pytest.raises(RuntimeError, match="device"):
        run(there)


def test_parameters_stay_the_same_objects_and_nodes_keep_their_names() -> None:
    graph = captured()
    there = on_device(graph, META)
    assert there.get_parameter("weight") is graph.get_parameter("weight")
    assert there.get_buffer("shift") is graph.get_buffer("shift")
    assert [node.name for node in there.graph.nodes] == [node.name for node in graph.graph.nodes]


def test_what_is_there_already_is_not_moved() -> None:
    tensor = torch.ones(3)
    address = tensor.data_ptr()
    move([tensor], torch.device("cpu"))
    assert tensor.data_ptr() == address


@pytest.mark.cuda
def test_tensors_are_moved_in_place_with_all_who_have_them() -> None:
    graph, device = captured(), torch.device("cuda:0")
    weight = graph.get_parameter("weight")
    there = on_device(graph, device)
    move(tensors_of(there), device)
    assert graph.get_parameter("weight") is weight
    assert isinstance(weight, nn.Parameter)
    assert {tensor.device for tensor in tensors_of(graph)} == {device}
    (loss,) = run(there, device)
    loss.backward()
    assert weight.grad.device == device


def test_the_graph_that_was_captured_is_left_as_it_was() -> None:
    graph = captured()
    before = str(graph.graph)
    on_device(graph, META)
    assert str(graph.graph) == before


def run(graph: fx.GraphModule, device: torch.device = META) -> tuple[Tensor, ...]:
    return fx.Interpreter(graph).run(torch.ones(2, 4, device=device))
