"""Ranks that answer a stream: processes of this host, or threads, asked as a script does; and what is said before."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, InvalidStateError
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import halopipe as hp
from halopipe.extras.serving.options import ServeOptions
from halopipe.extras.serving.rank_loop import (
    ANSWER,
    END,
    HERE,
    READY,
    REQUEST,
    RankDescription,
    decoded,
    encoded,
    pieces_of,
)
from halopipe.extras.serving.rank_loop import stream as answer_requests
from halopipe.extras.serving.serving import RequestAnswer, Serving, _PendingRequest
from halopipe.training.evaluate import joined
from halopipe.training.session import Execution
from planner.ir.codec import dump
from planner.ir.errors import BusyError, UsageError, WorkerError
from planner.ir.graph import TensorSpec
from planner.ir.plan import Plan
from planner.ir.profile import ModelSource
from profiler.source.source import load_model
from runtime.pipeline.microbatches import InputSpecs
from runtime.stage.index_ranges import IndexRange
from tests.halopipe import learners
from tests.halopipe.planning.test_options import require_options
from tests.halopipe.plans import plan_of
from tests.halopipe.training.sessions import batch as samples
from tests.halopipe.training.sessions import together
from tests.runtime import test_local_losses

NUM_REQUESTS = 5


class Outputs:
    """A metric that keeps what the loss reads."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def update(self, prediction: Tensor, target: Tensor) -> None:
        self.parts.append(prediction.clone())

    def compute(self) -> float:
        return 0.0


def evaluation(execution: Execution, number: int) -> Tensor:
    outputs = Outputs()
    execution.evaluate(samples(6, number), metric=lambda: outputs)
    return torch.cat(outputs.parts)


def asked(door: socket.socket, num_ranks: int) -> list[Tensor]:
    """The outputs for the requests, all of which are sent before an answer is looked at."""
    links = [Connection(door.accept()[0].detach()) for _ in range(num_ranks)]
    ready = [decoded(link.recv_bytes())[0] for link in links]
    assert {header["what"] for header in ready} == {READY}
    told = [RankDescription.read(header["description"]) for header in ready]
    for number in range(NUM_REQUESTS):
        tensors = samples(6, number)
        specs = [(HERE, list(each.shape), str(each.dtype).removeprefix("torch.")) for each in tensors]
        for link in links:
            link.send_bytes(encoded({"what": REQUEST, "probes": False, "inputs": specs}, tensors))
    for link in links:
        link.send_bytes(encoded({"what": END}))
    outputs = []
    for _ in range(NUM_REQUESTS):
        pieces: dict[tuple[int, str], list[object]] = {}
        for link, own in zip(links, told, strict=True):
            if own.answers:
                header, tensors = decoded(link.recv_bytes())
                assert header["what"] == ANSWER
                for key, parts in pieces_of(header, tensors).items():
                    pieces.setdefault(key, []).extend(parts)
        outputs.append(torch.cat([joined(pieces[key], torch.float64) for key in sorted(pieces)]))
    return outputs


@pytest.mark.parametrize("plan", [learners.plan, learners.replicas], ids=["two stages", "two ranks a stage"])
def test_a_request_is_answered_with_what_an_evaluation_gives(plan: object, tmp_path: Path) -> None:
    made: Plan = plan()
    path = tmp_path / "stream"
    answers = list[Tensor]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(path))
        door.listen(made.decision.num_ranks)
        script = threading.Thread(target=lambda: answers.extend(asked(door, made.decision.num_ranks)))
        script.start()

        def run(execution: Execution) -> list[Tensor]:
            expected = [evaluation(execution, number) for number in range(NUM_REQUESTS)]
            answer_requests(execution, str(path), learns=False, training=False)
            assert execution.num_steps == 0
            return expected

        expected = together(made, run, answers=True)[0]
        script.join()
    assert len(answers) == NUM_REQUESTS
    for answer, output in zip(answers, expected, strict=True):
        assert torch.equal(answer, output)


HOME = Path(__file__).resolve().parents[4]
OF_STREAM = "tests.runtime.extras.streams.test_stream"
RECURRENT = ModelSource(f"{OF_STREAM}:recurrent", {}, (4, 5), "float64")
LOCAL = ModelSource("tests.runtime.test_local_losses:local", {}, (4, 6), "float64")
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


def batch(number: int, rows: int = 2, width: int = 5) -> Tensor:
    return torch.randn(rows, width, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool])
def test_frames_keep_tensors_to_the_last_bit(dtype: torch.dtype) -> None:
    tensors = [torch.arange(6).reshape(2, 3).to(dtype), torch.ones((), dtype=dtype), torch.empty(0, 4, dtype=dtype)]
    header, found = decoded(encoded({"what": "answer", "odd": [1]}, tensors))
    assert header == {"what": "answer", "odd": [1]}
    for one, other in zip(found, tensors, strict=True):
        assert one.dtype == dtype
        assert torch.equal(one, other)


def test_what_a_model_takes_is_told_whole() -> None:
    spec = TensorSpec(("sample", "time"), (4, 6), "float64")
    ranges = {"x": (IndexRange("words", 50, cut=((1, 0, 3),)), IndexRange("loss", 7, -100))}
    inputs = InputSpecs({"x": spec}, 4, frozenset({("x", 1)}), ranges)
    values = (("y", ("sample",), "float64"),)
    told = RankDescription(1, True, frozenset({"x"}), inputs, (2, 2), 0, values)
    assert RankDescription.read(told.text) == told


def test_requests_are_answered_in_order_by_ranks_that_keep_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts two processes, once for all that is asked of them; they load torch: 8 s.

    The job's folder has a longer name than a socket may have.
    """
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    module = load_model(RECURRENT).module
    with torch.no_grad():
        module.head[0].weight.mul_(1.5)  # the ranks begin with the script's weights, not with the factory's
    twin = copy.deepcopy(module)
    plan = plan_of(RECURRENT, ["head.0"], (2,), schedule="forward")
    with hp.serve(plan, module, room=3) as serving:
        assert serving.checked.startswith("the first answer is one device's")
        with torch.no_grad():
            for number, output in enumerate(serving.map(batch(n) for n in range(9))):
                for name, tensor in twin(batch(number)).items():
                    torch.testing.assert_close(output[name], tensor, **TOLERANCE)
        assert serving.counts.requests == 9
        assert serving.counts.samples == 18
        owned = [serving.submit(batch(n)) for n in (20, 21, 22)]
        with contextlib.suppress(SystemExit):  # raised here where the answer is there already
            owned[0].add_done_callback(lambda _: sys.exit("a callback"))
        assert not owned[0].cancel()
        with contextlib.suppress(InvalidStateError):
            owned[1].set_result(None)  # type: ignore[arg-type]
        with torch.no_grad():
            expected = [twin(batch(n))["scores"] for n in (20, 21, 22)]
        torch.testing.assert_close(owned[2].result(60).output["scores"], expected[2], **TOLERANCE)
        with pytest.raises(UsageError, match="has shape"):
            serving.submit(torch.zeros(2, 4, dtype=torch.float64))  # the stream is as it was
        with pytest.raises(UsageError, match="3 samples"):
            serving.submit(torch.zeros(3, 5, dtype=torch.float64))
        slow = serving.run.ranks.processes[1]
        fast = serving.run.ranks.processes[0]
        os.kill(slow, signal.SIGSTOP)
        futures = [serving.submit(batch(n)) for n in range(9, 12)]
        with pytest.raises(BusyError, match="3 requests are on their way"):
            serving.submit(batch(12), block=False)
        os.kill(slow, signal.SIGCONT)
        with torch.no_grad():
            for number, future in enumerate(futures, 9):
                expected = twin(batch(number))["scores"]
                torch.testing.assert_close(future.result().output["scores"], expected, **TOLERANCE)
        os.kill(fast, signal.SIGKILL)
        future = serving.submit(batch(13))
        with pytest.raises(WorkerError) as lost:
            future.result(60)
        with pytest.raises(WorkerError):
            serving.close()
    assert lost.value.exit_code == 5
    assert "rank 0" in lost.value.title


def test_a_thread_that_ends_before_the_stream_says_so_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = object.__new__(Serving)
    future: Future[RequestAnswer] = Future()
    serving._waiting = {0: _PendingRequest(future, 1, 0.0, False, {0})}
    serving._lock = threading.Lock()
    serving._slots = threading.BoundedSemaphore(1)
    serving._is_over = False
    serving.failure = None
    assert serving._slots.acquire()
    monkeypatch.setattr(Serving, "_answer_all", lambda self: sys.exit("gone"))
    serving._listen()
    assert isinstance(serving.failure, WorkerError)
    with pytest.raises(WorkerError, match="SystemExit: gone"):
        future.result(0)
    assert serving._slots.acquire(blocking=False)


@pytest.mark.exhaustive("three processes that load torch, 15 s; the engine's own test learns in threads")
def test_stages_learn_from_requests_and_what_they_learnt_is_saved(tmp_path: Path) -> None:
    model = load_model(LOCAL)
    plan = replace(plan_of(LOCAL, [0.5], (4,)), decision=test_local_losses.decision_of(2, "1f1b", (4,)))
    module = model.module
    twin = copy.deepcopy(model.module)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9)
    with hp.serve(plan, module, learn=True) as serving:
        for number in range(4):
            x = batch(number, 4, 6)
            targets = batch(100 + number, 4, 4)
            answer = serving.submit(x, targets).result()
            outputs = twin(x)
            loss = sum((nn.functional.mse_loss(each, targets) for each in outputs), torch.zeros(()))
            for one, other in zip(answer.output, outputs, strict=True):
                torch.testing.assert_close(one, other, **TOLERANCE)
            assert answer.loss == pytest.approx(loss.item(), rel=1e-10)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        serving.finish()
        serving.run.save(tmp_path / "ckpt")
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, **TOLERANCE)
    with hp.serve(plan, checkpoint=tmp_path / "ckpt") as serving:
        found = serving.submit(batch(7, 4, 6)).result().output
        torch.testing.assert_close(found[-1], twin(batch(7, 4, 6))[-1], **TOLERANCE)


@pytest.mark.exhaustive("an interpreter and two processes that load torch, 20 s")
def test_sigterm_drains_a_stream_of_lines_and_ends_with_0(tmp_path: Path) -> None:
    plan = plan_of(RECURRENT, ["head.0"], (2,), schedule="forward")
    dump(plan, tmp_path / "plan.json")
    command = [sys.executable, "-m", "halopipe", "serve", str(tmp_path / "plan.json"), "--stdin", "json"]
    environment = {**os.environ, "PYTHONPATH": str(HOME)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=HOME, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(3):
            process.stdin.write(json.dumps({"inputs": batch(number).tolist()}).encode() + b"\n")
        process.stdin.flush()
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.send_signal(signal.SIGTERM)
        started_s = time.monotonic()
        assert process.wait(60) == 0, process.stderr and process.stderr.read()
        assert time.monotonic() - started_s < 60
    twin = load_model(RECURRENT).module
    with torch.no_grad():
        for number, line in enumerate(lines):
            expected = twin(batch(number))["scores"]
            torch.testing.assert_close(
                torch.tensor(line["output"]["scores"], dtype=torch.float64), expected, **TOLERANCE
            )


def test_every_option_is_one_of_the_command_line_with_its_help_default_and_limits() -> None:
    require_options("serve", ServeOptions)


@pytest.mark.parametrize("streams", ["--stdin json <&-", "--stdin npy >&-"])
def test_a_shell_that_closes_what_programs_rely_on_is_told(tmp_path: Path, streams: str) -> None:
    line = f"cd '{tmp_path}'; PYTHONPATH='{HOME}' timeout 60 '{sys.executable}' -m halopipe serve plan.json {streams}"
    result = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert result.returncode == 3, result.stderr
    assert result.stderr.startswith("error[H301] standard input or output is closed")
    assert "Traceback" not in result.stderr


def test_a_class_is_no_module() -> None:
    with pytest.raises(UsageError, match="dict is a class, not a module"):
        hp.serve(learners.plan(), dict)
