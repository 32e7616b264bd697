"""What crosses between a card that is not there and the host is told, and faults that networks on it have shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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
from tests.devices.card import COPY, DEVICE, MADE, READ, ROOT, WAIT, Card, Crossings, card
from tests.devices.networks import BY_HOST, SEED, by_plan, decided
from tests.devices.ranks import hosted
from tests.zoo import ALL
from tests.zoo.entries import DATA


@pytest.fixture
def crossings() -> Crossings:
    return Crossings(allowed={})


@pytest.fixture
def own(crossings: Crossings) -> Iterator[Card]:
    """A rank's view of a card, within a step."""
    with card() as made, torch.autograd.set_multithreading_enabled(False):
        entered = made(crossings)
        with entered, entered.step():
            yield entered


def ours(body: str) -> Callable[[Tensor], object]:
    """What a line of the runtime would do to a tensor of the card."""
    names: dict[str, Callable[[Tensor], object]] = {}
    source = f"import torch\ndef crosses(there):\n    return {body}\n"
    exec(compile(source, str(ROOT / "runtime" / "made_up.py"), "exec"), names)
    return names["crosses"]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("there.cpu()", COPY),
        ("torch.empty(3).copy_(there)", COPY),
        ("there.sum().item()", READ),
        ("float(there[0])", READ),
        ("bool((there > 0).any())", READ),
        ("torch.equal(there, there)", READ),
        ("torch.zeros(3).to(there.device)", WAIT),
        ("there[torch.zeros(2, dtype=torch.int64)]", WAIT),
        ("torch.zeros(3)", MADE),
    ],
)
def test_what_crosses_within_a_step_is_a_fault_with_its_line(
    body: str, kind: str, own: Card, crossings: Crossings
) -> None:
    ours(body)(torch.ones(3, device=DEVICE))
    assert [fault for fault in crossings.faults if fault.startswith(f"{kind} (")] != []
    assert all(fault.endswith("at runtime/made_up.py:3, in crosses") for fault in crossings.faults)


@pytest.mark.every_case
@pytest.mark.parametrize(
    "body",
    [
        "there * 2 + torch.zeros_like(there)",
        "torch.ones(3, device=there.device).to(torch.float64)",
        "there.new_zeros(3).copy_(there)",
    ],
)
def test_what_stays_on_the_card_is_none(body: str, own: Card, crossings: Crossings) -> None:
    ours(body)(torch.ones(3, device=DEVICE))
    assert not crossings.faults


WITH_GRAPHS = "names:written"
"""A network whose graph has graphs inside, which its operators call."""
WITH_AUTOCAST = "wrapped:autocast_inside"


def network(name: str) -> tuple[LoadedModel, CapturedModule]:
    model = load_model(ALL[name].source, SEED)
    return model, capture(model)


def test_graphs_that_operators_call_go_to_the_card_with_their_stage() -> None:
    found = network(WITH_GRAPHS)
    crossings = Crossings()
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
    target = torch.tensor([0, 2, -100, 1])
    crossings = Crossings(allowed={})
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
    found = network(WITH_AUTOCAST)
    crossings = Crossings()
    decision = decided(ALL[WITH_AUTOCAST], BY_HOST, found[1])
    by_plan(found, BY_HOST, decision, crossings, evaluates=True)
    assert not crossings.faults
    assert crossings.counts["runtime/transport/frame.py", COPY] > 0
