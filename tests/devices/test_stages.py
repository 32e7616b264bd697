"""Faults that networks on a card that is not there have shown, each with what it takes to show it alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from cuda_ops.dense.data_dependent import is_unit
from cuda_ops.device.placing import on_device
from profiler.source.model import LoadedModel
from profiler.source.source import load_model
from runtime.captured import CapturedModule
from runtime.rank import RankContext
from runtime.stage.alone import lone_stages
from runtime.stage.cut import StageFunction
from runtime.stage.functions import StageCall, StageCalls
from runtime.stage.modes import MicrobatchShard
from runtime.stage.sample_weights import weight_of_targets
from tests.captures import capture
from tests.devices.card import COPY, DEVICE, Crossings, card
from tests.devices.networks import BY_HOST, SEED, by_plan, decided
from tests.devices.ranks import hosted
from tests.zoo import ALL
from tests.zoo.entries import DATA

WITH_GRAPHS = "names:written"
"""A network whose graph has graphs inside, which its operators call."""
WITH_AUTOCAST = "wrapped:autocast_inside"


def network(name: str) -> tuple[LoadedModel, CapturedModule]:
    model = load_model(ALL[name].source, SEED)
    return model, capture(model)


def test_graphs_that_operators_call_go_to_the_card_with_their_stage() -> None:
    found, crossings = network(WITH_GRAPHS), Crossings()
    assert any(isinstance(each, fx.GraphModule) for each in found[1].graph_module.children())
    by_plan(found, DATA, decided(ALL[WITH_GRAPHS], DATA, found[1]), crossings, evaluates=True)
    assert not crossings.faults


def test_a_stage_with_a_graph_inside_is_timed_alone_on_its_card() -> None:
    found = network(WITH_GRAPHS)
    decision = decided(ALL[WITH_GRAPHS], DATA, found[1])
    crossings = Crossings()
    with card() as made, torch.autograd.set_multithreading_enabled(False):
        own = made(crossings)
        model, captured = hosted(own, found)
        with own:
            context = RankContext(decision, torch.optim.SGD, device=DEVICE, model=captured)
            stages, why = lone_stages(context, captured, model.tensors)
            assert not why
            assert [stage.pass_s() > 0 for stage in stages] == [True]
    assert not crossings.faults


def test_autocast_in_the_user_s_code_is_that_of_the_device() -> None:
    graph = network(WITH_AUTOCAST)[1].graph_module
    for device in ("cuda", "cpu"):
        there = on_device(graph, torch.device(device))
        assert [node.args[0] for node in _regions(there)] == [device] * len(_regions(graph))
    assert _regions(graph)
    assert _regions(on_device(graph, torch.device("meta")))[0].args[0] == "cpu"  # it has no autocast


def _regions(graph: fx.GraphModule) -> list[fx.Node]:
    graphs = [graph, *(node.target.module for node in graph.graph.nodes if is_unit(node))]
    return [node for each in graphs for node in each.graph.nodes if "wrap_with_autocast" in str(node.target)]


def test_a_stage_under_autocast_may_begin_with_a_graph() -> None:
    inner = fx.symbolic_trace(nn.Tanh())
    function = StageFunction(
        lambda samples, called: (called(torch.ones(2)),), (), ("y",), {"inner": inner}, frozenset()
    )
    call = StageCall(MicrobatchShard(0, 1, 0, 1), (), (inner,))
    assert StageCalls(function, torch.bfloat16, None, []).run(call)["y"].shape == (2,)


@pytest.mark.every_case
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)])
def test_the_weights_of_targets_are_summed_on_the_card_without_a_wait(weight: Tensor | None) -> None:
    target, crossings = torch.tensor([0, 2, -100, 1]), Crossings(allowed={})
    expected = 3.0 if weight is None else 7.0
    assert weight_of_targets(torch.zeros(4, 3), target, weight, -100).item() == expected
    with card() as made:
        own = made(crossings)
        with own:
            there = [None if each is None else each.to(DEVICE) for each in (torch.zeros(4, 3), target, weight)]
            with own.step():
                assert weight_of_targets(*there, -100).device == DEVICE
                assert weight_of_targets(there[0], torch.zeros(4, 3, device=DEVICE), None, -100).device == DEVICE
    assert not crossings.faults


def test_a_pipeline_runs_as_planned_where_ranks_exchange_by_way_of_the_host() -> None:
    """And what goes over the host is counted, so that nothing else does unseen."""
    found, crossings = network(WITH_AUTOCAST), Crossings()
    decision = decided(ALL[WITH_AUTOCAST], BY_HOST, found[1])
    by_plan(found, BY_HOST, decision, crossings, evaluates=True)
    assert not crossings.faults
    assert crossings.counts["runtime/transport/frame.py", COPY] > 0
