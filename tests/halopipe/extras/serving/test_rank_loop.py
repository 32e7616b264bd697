"""Ranks of a stream: what they answer; the test is the script that asks, ranks are threads."""

from __future__ import annotations

import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

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
from halopipe.training.evaluate import joined
from halopipe.training.session import Execution
from planner.ir.plan import Plan
from tests.halopipe import learners
from tests.halopipe.training.sessions import batch, together

NUM_REQUESTS = 5


class Outputs:
    """A metric that keeps what the loss reads."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def update(self, prediction: Tensor, target: Tensor) -> None:
        self.parts.append(prediction.clone())

    def compute(self) -> float:
        return 0.0


def evaluated(execution: Execution, number: int) -> Tensor:
    outputs = Outputs()
    execution.evaluate(batch(6, number), metric=lambda: outputs)
    return torch.cat(outputs.parts)


def asked(door: socket.socket, num_ranks: int) -> list[Tensor]:
    """The outputs for the requests, all of which are sent before an answer is looked at."""
    links = [Connection(door.accept()[0].detach()) for _ in range(num_ranks)]
    ready = [decoded(link.recv_bytes())[0] for link in links]
    assert {header["what"] for header in ready} == {READY}
    told = [RankDescription.read(header["description"]) for header in ready]
    for number in range(NUM_REQUESTS):
        tensors = batch(6, number)
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
    path, answers = tmp_path / "stream", list[Tensor]()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(str(path))
        door.listen(made.decision.num_ranks)
        script = threading.Thread(target=lambda: answers.extend(asked(door, made.decision.num_ranks)))
        script.start()

        def run(execution: Execution) -> list[Tensor]:
            expected = [evaluated(execution, number) for number in range(NUM_REQUESTS)]
            answer_requests(execution, str(path), learns=False, training=False)
            assert execution.num_steps == 0
            return expected

        expected = together(made, run, answers=True)[0]
        script.join()
    assert len(answers) == NUM_REQUESTS
    for answer, output in zip(answers, expected, strict=True):
        assert torch.equal(answer, output)
