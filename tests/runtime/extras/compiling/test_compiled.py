"""torch.compile on divided stages: one graph, exchanges inside, the numbers of one device, in whole steps too."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from planner.ir.box import whole
from planner.ir.errors import UnsupportedModelError
from planner.ir.plan import Placement
from planner.layers.division import Division
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from runtime.extras.compiling.collective import CollectivePeerGroup, open_collectives
from runtime.extras.compiling.compiled import compiled, refuse_draws
from runtime.optim.ties import groups_of
from runtime.pipeline.routing import slices
from runtime.spatial.convolution import layer
from runtime.spatial.decompose import DividedStage
from runtime.spatial.deferred import DeferredGradients
from runtime.spatial.exchange import PeerGroup
from runtime.stage.functions import StageCut
from runtime.stage.modes import MicrobatchShard
from tests.runtime.divided import by_stage
from tests.runtime.engines import trained
from tests.runtime.plans import Trained, assert_equal, batch_of, engine_of
from tests.runtime.spatial.test_pipelines import HEIGHT, MICRO_BATCHES, network, serial
from tests.runtime.transport.conftest import run_in_processes

UNEVEN = {"height": (0, 4, 9)}
FIRST_ONLY = {"height": (0, 9, 9)}  # the other rank has an empty part


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x))))


@functools.cache
def model():
    torch.manual_seed(0)
    net = Net().double()
    x, y = batch(2)
    loaded = LoadedModel(net, (x,), (y,), lambda out, targets: nn.functional.mse_loss(out, *targets))
    return net, capture(loaded)


def batch(samples):
    rng = torch.Generator().manual_seed(samples)
    return tuple(torch.randn(samples, channels, 9, 6, dtype=torch.float64, generator=rng) for channels in (3, 2))


def alone(samples):
    """What one device computes: loss, running variance, gradients."""
    net = copy.deepcopy(model()[0])
    x, y = batch(samples)
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    return [loss.detach(), net.norm.running_var, *(each.grad for each in net.parameters())]


class Divided:
    """The net and its loss on one rank of two; layers from ``second`` on are cut by ``late``."""

    def __init__(self, peers, late=UNEVEN):
        _, captured = model()
        self.graph = captured.graph
        self.peers = peers
        names = [layer.name for layer in self.graph.layers]
        is_late = names.index("second")
        decision = SimpleNamespace(
            layers={name: Placement(0, late if at >= is_late else UNEVEN) for at, name in enumerate(names)},
            layers_of=lambda stage: names,
            stages=[SimpleNamespace(ranks=(0, 1), blocks=())],
        )
        self.stage = DividedStage(captured, names, peers, DeferredGradients())
        cut = StageCut(captured, frozenset(names), (self.graph.loss,))
        self.function = cut.function(self.stage.rule(lambda node: None))
        self.divisions = {samples: Division.of(self.graph, decision, 0, samples) for samples in (2, 4)}
        self.now = None

    def run(self, function, samples):
        """This rank's loss, its running variance, and its gradients, which an empty part may not have."""
        self.now = self.divisions[samples]
        self.stage.at(MicrobatchShard(0, samples, 0, samples, (), self.now))
        values = dict(zip(self.graph.inputs, batch(samples), strict=True))
        mine = [
            values[name][slices(self.now.held(name)[self.peers.position], whole(tuple(values[name].shape)))]
            for name in function.inputs
        ]
        state = {
            name: nn.Parameter(each.detach().clone()) if name in function.parameters else each.clone()
            for name, each in function.attributes.items()
        }
        (loss,) = function.function(samples, *mine, *state.values())
        loss.backward()
        self.stage.later.run()  # weight gradients that were put off
        trained = [state[name] for name, _ in model()[0].named_parameters()]
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
        return [loss.detach(), state["norm.running_var"], *gradients]


def recording(graphs, partition):
    """A backend that runs what it is given, and notes the collectives in it."""

    def keep(graph_module, _):
        names = [str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"]
        graphs.append([name.split(".")[1] for name in names if name.startswith("_c10d_functional")])
        return make_boxed_func(graph_module.forward)

    return aot_autograd(fw_compiler=keep, partition_fn=partition)


def require_equal(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("late", "partition", "sizes", "fewest"),
    [
        (UNEVEN, default_partition, (2, 4, 2, 4, 2), 0),
        (UNEVEN, default_partition, (2, 4, 2, 4, 2), layer.FEWEST),
        (FIRST_ONLY, default_partition, (2, 2), 0),
        (FIRST_ONLY, min_cut_rematerialization_partition, (2, 2), 0),
    ],
    ids=["sizes", "halos fetched first", "one rank only sends", "so in inductor's split"],
)
def test_compiled_stage_equals_messages_and_one_device(late, partition, sizes, fewest, tmp_path, monkeypatch):
    monkeypatch.setattr(layer, "FEWEST", fewest)
    model()  # captured once, before the processes are forked

    def program(transport):
        torch.set_num_threads(1)
        collectives = open_collectives({0: (0, 1)}, timeout_s=30.0)[0]
        eager = Divided(PeerGroup(transport, (0, 1)), late)
        divided = Divided(CollectivePeerGroup(collectives, (0, 1)), late)
        graphs = []
        function = compiled(divided.function, lambda: divided.now, recording(graphs, partition), collectives)
        counters.clear()
        for samples in sizes:  # the first run of each size is not compiled
            found = divided.run(function, samples)
            require_equal(found, eager.run(eager.function, samples))
            for place, term in enumerate(found):
                if place != 1:  # the running variance is the same on both ranks
                    transport.all_reduce(term, (0, 1))
            require_equal(found, alone(samples))
        return dict(counters["graph_break"]), counters["stats"]["unique_graphs"], graphs

    found = run_in_processes(2, program, (), tmp_path / "store")
    assert [graphs for _, _, graphs in found] == [found[0][2]] * 2
    for breaks, num_graphs, graphs in found:
        assert not breaks
        assert num_graphs == len(set(sizes))
        forward = backward = ["all_to_all_single", "wait_tensor"] * 2  # statistics, and the second convolution's input
        assert graphs == [forward, backward] * len(set(sizes))


def test_a_stage_of_one_rank_needs_no_collectives():
    _, captured = model()
    net = model()[0]
    x, y = batch(4)
    names = [layer.name for layer in captured.graph.layers]
    function = StageCut(captured, frozenset(names), (captured.graph.loss,)).function(lambda node: None)
    values = {"x": x, "y": y}
    mine = [values[name] if name in values else (x, y)[index] for index, name in enumerate(function.inputs)]
    state = [each.detach().clone() for each in function.attributes.values()]
    run = compiled(function, lambda: None, "eager")
    losses = [run.function(4, *mine, *state)[0] for _ in range(2)]
    assert torch.equal(*losses)
    assert torch.allclose(losses[0], nn.functional.mse_loss(net(x), y), rtol=1e-12)


def test_layers_that_draw_are_refused():
    refuse_draws(1, ["conv", "relu"], ["drop"])
    with pytest.raises(UnsupportedModelError, match="stage 1 cannot be compiled") as caught:
        refuse_draws(1, ["conv", "drop"], ["drop"])
    assert "drop" in caught.value.details[0]


@pytest.mark.parametrize("cuts", [HEIGHT, {"channel": (0, 1, 2)}], ids=["height", "channel"])
def test_compiled_stages_train_as_one_device_does(cuts, tmp_path):
    """Takes 7 s: two processes compile their stages, forward and backward."""
    decision = by_stage(network()[1].graph, [], [cuts], MICRO_BATCHES)
    expected = serial()

    def program(transport):
        torch.set_num_threads(1)
        engine = engine_of(decision, *network(), transport, compiler="aot_eager")
        batches = [batch_of(network()[0], sum(MICRO_BATCHES), step) for step in range(2)]
        losses = [engine.step(*batch).loss for batch in batches]
        kept = [
            {name: each.detach() for name, each in some().items()} for some in (engine.gradients, engine.state_dict)
        ]
        return losses, *kept

    for found in run_in_processes(2, program, groups_of(decision, network()[1].graph), tmp_path / "store"):
        assert_equal(Trained(*found), expected)


def test_a_stage_that_computes_spans_again_is_refused() -> None:
    first, second, *_ = network()[1].graph.by_name()
    whole = by_stage(network()[1].graph, [], [HEIGHT], MICRO_BATCHES)
    decision = replace(whole, stages=(replace(whole.stages[0], recomputed=((first,), (second,))),))
    with pytest.raises(UnsupportedModelError, match="2 spans of layers again"):
        trained(network(), decision, 1, compiler="eager")
