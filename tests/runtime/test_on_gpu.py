"""The same runtime with the stages on a GPU: schedules, replicas and recomputation equal one device, in float64."""

from __future__ import annotations

import copy
import multiprocessing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch.distributed as dist

from planner.ir.plan import Decision
from planner.layers.recomputed import cores_among
from profiler.capture.graph import capture
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule
from runtime.engine import Engine
from runtime.numerics.single_device import serial_step
from runtime.optim.ties import groups_of
from runtime.transport import InProcessTransport, Transport, open_gloo
from tests.runtime.plans import batch_of, decide, engine_of, model_of, sgd
from tests.runtime.ranks import on_ranks

pytestmark = pytest.mark.cuda

MICRO_BATCHES = (2, 1, 2)
STEPS = 2


@cache
def network() -> tuple[LoadedModel, LoadedModel, CapturedModule]:
    """On the CPU, for its batches, and on the GPU."""
    here = model_of("gpt:gpt", (4, 6), vocabulary=17, width=8, layers=2, heads=2)
    there = replace(
        copy.deepcopy(here),
        inputs=tuple(tensor.cuda() for tensor in here.inputs),
        targets=tuple(tensor.cuda() for tensor in here.targets),
    )
    there.module.cuda()
    return here, there, capture(there)


def plan(name: str) -> Decision:
    graph = network()[2].graph
    if name == "replicas":
        return decide(graph, [0.5], MICRO_BATCHES, [(0,), (1, 2)], [(1,), (2, 1)])
    decision = decide(graph, [0.5], MICRO_BATCHES, schedule=name if name not in ("recompute", "selective") else "1f1b")
    stages = tuple(replace(stage, recompute=name == "recompute") for stage in decision.stages)
    if name == "selective":
        spans = (cores_among(graph, decision.layers_of(number)) for number in range(len(stages)))
        stages = tuple(replace(stage, recomputed=own) for stage, own in zip(stages, spans, strict=True))
    return replace(decision, stages=stages)


def losses_of(engine: Engine) -> list[float | None]:
    here = network()[0]
    return [engine.step(*batch_of(here, sum(MICRO_BATCHES), step)).loss for step in range(STEPS)]


def expected() -> list[float]:
    here, there, _ = network()
    twin = copy.deepcopy(there)
    optimizer = sgd(twin.module.parameters())
    found = []
    for step in range(STEPS):
        tensors = (tuple(t.cuda() for t in each) for each in batch_of(here, sum(MICRO_BATCHES), step))
        found.append(serial_step(twin.loss, optimizer, *tensors, MICRO_BATCHES))
    return found


def losses_on(decision: Decision, transport: Transport) -> list[float | None]:
    model, captured = copy.deepcopy(network()[1:])
    return losses_of(engine_of(decision, model, captured, transport))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "recompute", "selective", "replicas"])
def test_stages_on_a_gpu_compute_what_one_device_computes(name: str) -> None:
    decision = plan(name)
    network()  # captured once, before the threads

    def work(end: InProcessTransport) -> list[float | None]:
        return losses_on(decision, end)

    found = on_ranks(decision.num_ranks, work, groups_of(decision, network()[2].graph), rendezvous=True)
    assert [max(x for x in step if x is not None) for step in zip(*found, strict=True)] == pytest.approx(
        expected(), rel=1e-10
    )


def worker(rank: int, path: str, name: str, results: multiprocessing.SimpleQueue) -> None:
    decision = plan(name)
    store = dist.FileStore(path, decision.num_ranks)
    transport = open_gloo(rank, decision.num_ranks, store, 60.0, groups_of(decision, network()[2].graph))
    results.put((rank, losses_on(decision, transport)))
    transport.barrier()
    transport.close()


@pytest.mark.parametrize("name", ["1f1b", "replicas"])
def test_processes_with_stages_on_one_gpu_exchange_over_the_cpu(name: str, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    ranks = range(plan(name).num_ranks)
    processes = [context.Process(target=worker, args=(rank, str(tmp_path / "store"), name, results)) for rank in ranks]
    for process in processes:
        process.start()
    found = dict(results.get() for _ in processes)
    for process in processes:
        process.join(60)
    steps = zip(*(found[rank] for rank in ranks), strict=True)
    assert [max(x for x in step if x is not None) for step in steps] == pytest.approx(expected(), rel=1e-10)
