"""Ranks whose stages sleep for their cost: everything else is the runtime's own, its executor, messages and all.

    python -m benchmarks.devices.sleeping ORDER.json RANK        one rank; started by :mod:`benchmarks.fidelity`

A rank first measures the link with the transport that the executor uses (bytes, seconds from the start of a send to the
end of the receive), then runs its row of each case's program, and writes when each of its steps began and ended.  All
hosts of a testbed share one clock.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from planner.ir.graph import Graph, Layer, TensorSpec
from planner.ir.layout import Layout
from planner.ir.program import Program
from planner.ir.schedule import Action, Op, Pipeline, StageGraph
from planner.layers.boundary import Boundaries
from planner.passes import lower, validate
from planner.schedules import positions
from planner.schedules import schedule as schedule_named

SPIN_S = 3e-4
"""The end of each sleep is waited for actively: a sleeping thread is woken up to 0.1 ms late."""

WARMUP, REPETITIONS = 2, 9
DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Case:
    """A program of sleeping stages, one after another, ranks in turn.

    Attributes:
        seconds: of a forward, a backward for the input, a backward for the weights; stage ``s`` takes
            ``1 + tilt s`` times as long.
        activation_bytes: that a stage hands on for a micro-batch.
        skips: (s, t): stage t also reads what stage s made.
    """

    name: str
    schedule: str
    num_ranks: int
    num_stages: int
    num_microbatches: int
    seconds: tuple[float, float, float]
    activation_bytes: int
    tilt: float = 0.1
    skips: tuple[tuple[int, int], ...] = ()

    def action_s(self, action: Action) -> float:
        """What the action sleeps."""
        forward, inward, weight = self.seconds
        by_op = {
            Op.FORWARD: forward,
            Op.BACKWARD: inward + weight,
            Op.BACKWARD_INPUT: inward,
            Op.BACKWARD_WEIGHT: weight,
        }
        return by_op.get(action.op, 0.0) * (1 + self.tilt * action.stage)

    def boundaries(self) -> Boundaries:
        """One layer a stage; the loss is on the last."""
        width = self.activation_bytes // 4
        output = TensorSpec(("sample", "feature"), (1, width), "float32")
        layers = [
            Layer(
                f"l{s}",
                "pointwise",
                (f"l{s - 1}" if s else "x", *(f"l{src}" for src, dst in self.skips if dst == s)),
                (output,),
                attributes={"op": "aten.relu.default"},
            )
            for s in range(self.num_stages)
        ]
        last = (f"l{self.num_stages - 1}", "y")
        op = {"op": "aten.cross_entropy_loss.default"}
        layers.append(Layer("loss", "loss", last, (TensorSpec((), (), "float32"),), attributes=op))
        inputs = {"x": output, "y": TensorSpec(("sample",), (1,), "int64")}
        stage_of = {f"l{s}": s for s in range(self.num_stages)} | {"loss": self.num_stages - 1}
        ranks = [(position,) for position in self.positions()]
        return Boundaries.of(Graph(1, inputs, tuple(layers), {}, "loss"), stage_of, [Layout()] * len(ranks), ranks)

    def positions(self) -> tuple[int, ...]:
        """The rank of each stage."""
        return positions(self.schedule, self.num_ranks, self.num_stages // self.num_ranks)

    def program(self) -> Program:
        """Lowered and validated."""
        boundaries, micro_batches = self.boundaries(), (1,) * self.num_microbatches
        edges = boundaries.edges()
        stages = StageGraph(self.num_stages, self.num_microbatches, edges)
        order = schedule_named(self.schedule)(Pipeline(stages, self.positions()))
        messages = boundaries.routes(edges, micro_batches)
        program = lower(order, stages, boundaries.ranks, messages, self.num_ranks)
        validate(program)
        return program


@dataclass(frozen=True, slots=True)
class Order:
    """What all ranks of a job do.

    Attributes:
        store: a file that they find each other by.
        sizes: of messages, in bytes, that the link is measured with.
    """

    store: str
    num_ranks: int
    cases: tuple[Case, ...]
    sizes: tuple[int, ...]
    repetitions: int = REPETITIONS

    def write(self, path: Path) -> None:
        """For :func:`main`."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Order:
        """What :meth:`write` wrote."""
        record = json.loads(path.read_text(encoding="utf-8"))
        cases = tuple(
            Case(**{**case, "seconds": tuple(case["seconds"]), "skips": tuple(map(tuple, case["skips"]))})
            for case in record.pop("cases")
        )
        return cls(record["store"], record["num_ranks"], cases, tuple(record["sizes"]), record["repetitions"])


@dataclass(slots=True)
class SleepingStage:
    """What the executor asks of a resident stage and of its program, with a sleep in place of each computation."""

    case: Case
    stage: int
    received: tuple[str, ...]
    handed_on: tuple[str, ...]
    output: Any

    @property
    def program(self) -> SleepingStage:
        """Itself: there is nothing more to it."""
        return self

    def feed(self, batch: object, microbatch: int) -> dict[str, Any]:
        """No graph inputs."""
        return {}

    def forward(self, microbatch: int, values: Mapping[str, Any], version: int = 0) -> dict[str, Any]:
        """Sleeps; the output is the same each time."""
        self._sleep(Op.FORWARD)
        return {f"l{self.stage}": self.output}

    def backward(self, microbatch: int, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Sleeps for both halves."""
        return self._gradients(Op.BACKWARD)

    def backward_input(self, microbatch: int, gradients: Mapping[str, Any]) -> dict[str, Any]:
        """Sleeps for the first half."""
        return self._gradients(Op.BACKWARD_INPUT)

    def backward_weight(self, microbatch: int) -> None:
        """Sleeps for the second half."""
        self._sleep(Op.BACKWARD_WEIGHT)

    def nothing(self, *_: object) -> None:
        """There are no gradients to sum, no weights to update and nothing to forget."""

    reset = expect_last = reduce_gradients = update = forget_gradients = nothing

    def _gradients(self, op: Op) -> dict[str, Any]:
        self._sleep(op)
        return dict.fromkeys(self.received, self.output)

    def _sleep(self, op: Op) -> None:
        end_s = time.perf_counter() + self.case.action_s(Action(self.stage, op, 0))
        time.sleep(max(0.0, end_s - time.perf_counter() - SPIN_S))
        while time.perf_counter() < end_s:
            pass


def main(arguments: Sequence[str]) -> int:
    """Be one rank."""
    path, rank = Path(arguments[0]), int(arguments[1])
    order = Order.read(path)
    from cuda_ops.device.host import prepare_process

    prepare_process(None)
    import torch.distributed as dist

    from runtime.transport import open_gloo

    transport = open_gloo(rank, order.num_ranks, dist.FileStore(order.store, order.num_ranks), DEADLINE_S)
    found = {
        "link": [_message(transport, number, size) for number, size in enumerate(order.sizes)] if order.sizes else [],
        "steps": {case.name: _steps(transport, case, order.repetitions) for case in order.cases},
    }
    path.with_name(f"rank-{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    transport.barrier()
    transport.close()
    return 0


def _message(transport: Any, number: int, num_bytes: int) -> list[tuple[float, float]]:
    """When rank 0 began to send and was free again (there); when rank 1 had received (there, twice); several times."""
    import torch

    from runtime.transport import Key

    tensor, moments = torch.zeros(num_bytes // 4), []
    for repetition in range(REPETITIONS):
        key = Key(repetition, "F", 0, 1, number)
        if transport.rank == 1:
            transport.post_receive(key, 0, [(tuple(tensor.shape), tensor.dtype)])
        transport.barrier()
        time.sleep(2e-3)  # both are there, and the link is idle
        if transport.rank == 0:
            start = time.perf_counter()
            transport.send(key, 1, (tensor,))
            moments.append((start, time.perf_counter()))
        elif transport.rank == 1:
            transport.receive(key, 0)
            moments.append((time.perf_counter(),) * 2)
        transport.flush()
    return moments


def _steps(transport: Any, case: Case, repetitions: int) -> list[tuple[float, float]]:
    """Begin and end of each step on this rank."""
    import torch

    from planner.ir.plan import Decision, Stage
    from runtime.pipeline.executor import Executor
    from runtime.pipeline.routing import Routing
    from runtime.pipeline.specialize import Specialization
    from runtime.rank import RankContext
    from runtime.stage.local_stage import LocalStage

    program, boundaries, rank = case.program(), case.boundaries(), transport.rank
    rows = (1,) * case.num_microbatches
    stages = {
        stage: SleepingStage(
            case,
            stage,
            tuple(value for edge in program.stages.into(stage) for value in edge.values),
            (f"l{stage}",) if program.stages.out_of(stage) else (),
            torch.zeros(1, case.activation_bytes // 4),
        )
        for stage, ranks in enumerate(program.ranks)
        if rank in ranks
    }
    routing = Routing([boundaries] * len(rows), program, rows, rank)
    specialization = Specialization(rows, program, routing, cast("Mapping[int, LocalStage]", stages))
    cores = tuple(Stage(ranks, tuple(f"n{each}/cpu0" for each in ranks)) for ranks in program.ranks)
    decision = Decision("by hand", rows, cores, {}, ())
    context = RankContext(decision, torch.optim.SGD, deadline_s=DEADLINE_S, transport=transport)
    context.program = program
    executor = Executor(specialization, context)
    found = []
    for step in range(WARMUP + repetitions):
        executor.prepare(step, step, cast("Any", None))
        start = time.perf_counter()
        ran = executor.run()
        found.append((start, start + ran.spans[-1].stop_s))
    return found[WARMUP:]


def step_s(by_rank: Sequence[Sequence[tuple[float, float]]]) -> list[float]:
    """Seconds of each step, from when the first rank began to when the last had done its row."""
    return [max(stop for _, stop in each) - min(start for start, _ in each) for each in zip(*by_rank, strict=True)]


Points = tuple[tuple[int, float], ...]


def link_points(sizes: Sequence[int], by_rank: Sequence[Mapping[str, Any]]) -> tuple[Points, Points]:
    """(bytes, median seconds) until a message has arrived, and until its sender is free again."""
    arrival, sending = [], []
    for size, sent, received in zip(sizes, by_rank[0]["link"], by_rank[1]["link"], strict=True):
        arrival.append(
            (size, statistics.median(there[0] - here[0] for here, there in zip(sent, received, strict=True)))
        )
        sending.append((size, statistics.median(free - start for start, free in sent)))
    return tuple(arrival), tuple(sending)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
