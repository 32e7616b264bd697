"""What the executor itself costs: CPU time per action, beside torch.distributed.pipelining in the same run.

Two processes on this machine, gloo, a network so small that its own operators hardly count.  The same network, the same
micro-batches and the same schedule run under halopipe's engine and under torch's; the time of a step is divided by
its actions (forwards, backwards, sends and receives, counted alike), microseconds per action of the busier rank.
``bare`` is the same forwards and backwards called directly, with no runtime and no messages: what remains above it is
overhead.  Main-thread CPU alone flatters a runtime whose messages are moved by gloo's thread, hence two more clocks.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from benchmarks.report import Row, at_most, run
from cuda_ops.host import core_of, prepare_process
from planner.ir.plan import Decision, Placement, Stage
from planner.ir.profile import ModelSource
from planner.ir.schedule import Pipeline, StageGraph
from planner.layers.boundary import Boundaries
from planner.passes import lower
from planner.schedules import schedule
from profiler import capture, load_model
from runtime import Engine
from runtime.transport.gloo import open_gloo

WIDTH, ROWS, NUM_MICROBATCHES = 16, 2, 16
TORCH_SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
GOAL_US = 100.0
CLOCKS: dict[str, Callable[[], float]] = {
    "main-thread CPU": time.thread_time,
    "process CPU": time.process_time,  # gloo's own thread counted as well
    "wall": time.perf_counter,
}


def tiny() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.MSELoss]:
    """Two linear layers; the first is stage 0, the second stage 1."""
    batch = ROWS * NUM_MICROBATCHES
    return (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
        (torch.randn(batch, WIDTH), torch.randn(batch, WIDTH)),
        nn.MSELoss(),
    )


def measure(quick: bool) -> list[Row]:
    """Rows for each schedule: microseconds of CPU per action, median over steps, the busier rank."""
    steps = 30 if quick else 200
    rows = []
    for name in TORCH_SCHEDULES:
        with tempfile.TemporaryDirectory() as folder:
            results = mp.get_context("spawn").SimpleQueue()
            mp.spawn(_worker, args=(f"{folder}/store", name, steps, results), nprocs=2)
            found = [results.get() for _ in range(2)]
        for clock in CLOCKS:
            ours, theirs, bare = (max(result[key][clock] for result in found) for key in ("halopipe", "torch", "bare"))
            rows += [
                at_most(f"{name}, {clock}: halopipe", ours, "us", GOAL_US)
                if clock == "main-thread CPU"
                else Row(f"{name}, {clock}: halopipe", ours, "us"),
                Row(f"{name}, {clock}: torch.distributed.pipelining", theirs, "us"),
                Row(f"{name}, {clock}: bare forwards and backwards", bare, "us"),
                at_most(f"{name}, {clock}: halopipe / torch", ours / theirs, "ratio", 1.0),
            ]
    return rows


def _worker(rank: int, store_path: str, name: str, steps: int, results: Any) -> None:
    prepare_process(core_of(rank))
    store = dist.FileStore(store_path, 2)
    transport = open_gloo(rank, 2, store, timeout_s=60.0)
    actions = 4 * NUM_MICROBATCHES  # of each rank: a forward, a backward, a send and a receive for each micro-batch
    seconds = {
        "halopipe": _halopipe(rank, name, steps, transport),
        "torch": _torch(rank, name, steps),
        "bare": _bare(rank, steps),
    }
    results.put({key: {clock: s / actions * 1e6 for clock, s in value.items()} for key, value in seconds.items()})
    dist.barrier()
    transport.close()


def _halopipe(rank: int, name: str, steps: int, transport: Any) -> dict[str, float]:
    model = load_model(ModelSource("benchmarks.executor:tiny"))
    captured = capture(model)
    layers = [layer.name for layer in captured.graph.layers]
    stage_of = {layer: int(index > 0) for index, layer in enumerate(layers)}
    micro_batches = (ROWS,) * NUM_MICROBATCHES
    placements = {layer: Placement(stage) for layer, stage in stage_of.items()}
    stages = (Stage((0,), ("host/cpu0",)), Stage((1,), ("host/cpu1",)))
    draft = Decision(name, micro_batches, stages, placements, ())
    boundaries = Boundaries.of_decision(captured.graph, draft)
    edges = boundaries.edges()
    graph = StageGraph(2, NUM_MICROBATCHES, edges)
    program = lower(schedule(name)(Pipeline(graph)), graph, ((0,), (1,)), boundaries.routes(edges, micro_batches), 2)
    decision = Decision(
        name, micro_batches, stages, placements, tuple(tuple(str(action) for action in row) for row in program.rows)
    )
    engine = Engine(
        decision,
        captured.graph,
        captured.graph_module,
        captured.layer_of_node,
        captured.node_of_value,
        model.module,
        transport,
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
    )

    def step() -> None:
        engine.step(model.inputs, model.targets)

    return _median(step, steps)


def _torch(rank: int, name: str, steps: int) -> dict[str, float]:
    module, (inputs, targets), loss_fn = tiny()
    stage_module = module[rank]
    stage = PipelineStage(stage_module, rank, 2, torch.device("cpu"))
    schedule_ = TORCH_SCHEDULES[name](stage, NUM_MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(stage_module.parameters(), lr=0.0)

    def step() -> None:
        dist.barrier()  # as the engine does
        optimizer.zero_grad()
        if rank == 0:
            schedule_.step(inputs)
        else:
            schedule_.step(target=targets, losses=[])
        optimizer.step()

    return _median(step, steps)


def _bare(rank: int, steps: int) -> dict[str, float]:
    module, (inputs, targets), loss_fn = tiny()
    stage, last = module[rank], rank == 1
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        for rows, wanted in zip(inputs.split(ROWS), targets.split(ROWS), strict=True):
            output = stage(rows.requires_grad_(last))
            (loss_fn(output, wanted) if last else output).backward(None if last else wanted)
        optimizer.step()

    return _median(step, steps)


def _median(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Median seconds of ``step`` on each clock."""
    for _ in range(5):
        step()
    seconds: dict[str, list[float]] = {name: [] for name in CLOCKS}
    for _ in range(steps):
        before = {name: clock() for name, clock in CLOCKS.items()}
        step()
        for name, clock in CLOCKS.items():
            seconds[name].append(clock() - before[name])
    return {name: statistics.median(values) for name, values in seconds.items()}


if __name__ == "__main__":
    raise SystemExit(run(f"Executor overhead, 2 ranks, {NUM_MICROBATCHES} micro-batches", measure))
