"""Engines of all ranks as threads, for tests that capture a network once and ask for more than training steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from cuda_ops.dense.recurrent import autocast
from planner.ir.plan import Decision
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from runtime.engine import Engine, EvaluationResult
from runtime.numerics.single_device import LossOfStep
from runtime.optim.ties import groups_of
from runtime.stage.cut import cut_stage
from runtime.stage.random.streams import CounterRng, RandomNodes
from runtime.transport import InProcessTransport
from tests.captures import capture
from tests.runtime.plans import Trained, batch_of, engine_of, model_of
from tests.runtime.ranks import on_ranks

T = TypeVar("T")
Network = tuple[LoadedModel, CapturedModule]
Tensors = tuple[Tensor, ...]


def network_of(factory: str, shape: tuple[int, ...], arguments: Mapping[str, object]) -> Network:
    """A reference network in float64 with its graph; what torch draws next is the same each time."""
    torch.manual_seed(1)
    model = model_of(factory, shape, **arguments)
    return model, capture(model)


def on_engines(
    network: Network,
    decision: Decision,
    work: Callable[[Engine], T],
    *,
    transport: type[InProcessTransport] = InProcessTransport,
    **options: object,
) -> list[T]:
    """What ``work`` gives on each rank, on a copy of the network of its own."""
    copies = [copy.deepcopy(network) for _ in range(decision.num_ranks)]

    def run(end: InProcessTransport) -> T:
        model, captured = copies[end.rank]
        return work(engine_of(decision, model, captured, end, **options))

    groups = groups_of(decision, network[1].graph)
    return on_ranks(decision.num_ranks, run, groups, rendezvous=True, transport=transport)


def trained(network: Network, decision: Decision, steps: int = 2, **options: object) -> Trained:
    """What some steps on batches of the example give; what ranks share must be the same on each of them."""
    batches = [batch_of(network[0], decision.global_batch, step) for step in range(steps)]
    return trained_on(network, decision, lambda engine: [engine.step(*batch).loss for batch in batches], **options)


def trained_on(
    network: Network, decision: Decision, work: Callable[[Engine], Sequence[float | None]], **options: object
) -> Trained:
    """As :func:`trained`, by ``work``, which gives the losses."""
    found = on_engines(
        network,
        decision,
        lambda engine: (work(engine), engine.gradients(), engine.state_dict()),
        **options,
    )
    gradients: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for _, *of_rank in found:
        for whole, more in zip((gradients, state), of_rank, strict=True):
            for name, tensor in more.items():
                assert torch.equal(whole.setdefault(name, tensor), tensor), f"ranks differ in {name}"
    losses = [{loss for loss in step if loss is not None} for step in zip(*(each for each, *_ in found), strict=True)]
    assert all(len(each) == 1 for each in losses)
    return Trained([each.pop() for each in losses], gradients, state)


def evaluated(network: Network, decision: Decision, inputs: Tensors, targets: Tensors) -> tuple[float, Tensor]:
    """The loss, and the rows that the loss is computed from, put together in the order of the batch."""
    ranks = decision.stages[-1].ranks
    found = on_engines(network, decision, lambda engine: engine.evaluate(inputs, targets))
    (loss,) = {found[rank].loss for rank in ranks}
    assert all(each.loss is None and not each.outputs for rank, each in enumerate(found) if rank not in ranks)
    count = len(found[ranks[0]].outputs)
    rows = [_output(found[rank], m) for m in range(count) for rank in ranks]
    assert {each.num_samples for each in found} == {len(inputs[0])}
    return loss, torch.cat(rows)


def _output(evaluation: EvaluationResult, microbatch: int) -> Tensor:
    """The first value that the loss reads; others may be the targets as it takes them."""
    return next(iter(evaluation.outputs[microbatch].values()))[1]


def drawing_loss(model: CapturedModule, draw: CounterRng) -> LossOfStep:
    """The loss by the captured graph, whose random numbers are those that a plan draws."""
    whole = cut_stage(
        model.graph_module,
        [layer.name for layer in model.graph.layers],
        model.layer_of_node,
        model.node_of_value,
        (model.graph.loss,),
        RandomNodes(model).rule(draw),
        model.sizes,
    )
    state = tuple(whole.attributes.values())

    def loss_of(inputs: Tensors, targets: Tensors) -> torch.Tensor:
        given = dict(zip(model.graph.inputs, (*inputs, *targets), strict=True))
        sizes = (given[name].shape[dim] for name, dim in (model.sizes[size] for size in whole.sizes))
        device = inputs[0].device.type
        with autocast(device, model.autocast):
            (loss,) = whole.function(draw.total, *sizes, *(given[name] for name in whole.inputs), *state)
        return loss

    return loss_of
