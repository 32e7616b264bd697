"""A rank of a stream: it works on one request after another, until it is told that there are no more.

    script                                            each rank
    connection: REQUEST, the tensors that it reads --> announces messages, works, updates
                                                  <-- ANSWER, its parts of the module's output
    connection: END                               --> finishes what is there, and waits for the next call

A connection is a socket in the job's own folder, which nobody else may open.  A frame is a header of JSON and the bytes
of tensors after it.  Of inputs that a rank does not read it is told the shape alone; targets that nobody gave are
zeros.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from halopipe.training.session import Execution
from halopipe.training.steps import RankSteps
from planner.ir.box import Box, Interval
from planner.ir.codec import from_json, plain
from planner.ir.errors import TransportError
from planner.ir.graph import producer
from runtime.engine import StepResult
from runtime.extras.streams.stream import Answered, RequestStream, Setting
from runtime.pipeline.microbatches import Batch, InputSpecs
from runtime.pipeline.routing import Piece

READY = "ready"
REQUEST = "request"
ANSWER = "answer"
END = "end"
HERE = "here"
ZEROS = "zeros"
SHAPE = "shape"
"""Of a tensor of a request: its numbers are in the frame; they are zeros; it is not read by this rank."""

FOREVER_S = 1e9
_LENGTH = struct.Struct("<I")


def encoded(header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> bytes:
    """A frame."""
    plain = [tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    specs = [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in plain]
    text = json.dumps({**header, "tensors": specs}).encode()
    numbers: list[Any] = [tensor.flatten().view(torch.uint8).numpy() for tensor in plain if tensor.numel()]
    return b"".join([_LENGTH.pack(len(text)), text, *(memoryview(each) for each in numbers)])


def decoded(frame: bytes) -> tuple[dict[str, Any], list[Tensor]]:
    """The header and the tensors of a frame."""
    (length,) = _LENGTH.unpack_from(frame)
    place = _LENGTH.size + length
    header: dict[str, Any] = json.loads(frame[_LENGTH.size : place])
    tensors = []
    whole = bytearray(frame)
    for shape, name in header.pop("tensors"):
        dtype: torch.dtype = getattr(torch, name)
        count = math.prod(shape)
        # A copy of its own: tensors of a frame need not be aligned to their elements.
        flat = torch.frombuffer(whole, dtype=torch.uint8, count=count * dtype.itemsize, offset=place) if count else None
        place += count * dtype.itemsize
        tensors.append(torch.empty(shape, dtype=dtype) if flat is None else flat.clone().view(dtype).reshape(shape))
    return header, tensors


@dataclass(frozen=True, slots=True)
class RankDescription:
    """What a rank says of itself when it is ready.

    Attributes:
        answers: whether it tells of each request.
        reads: graph inputs of which it needs the numbers.
        inputs: what the model takes.
        planned: samples of each micro-batch of a full request.
        fixed: samples that a micro-batch must have; 0: any number.
        values: of the module's output: the value, its dims and dtype.
    """

    rank: int
    answers: bool
    reads: frozenset[str]
    inputs: InputSpecs
    planned: tuple[int, ...]
    fixed: int
    values: tuple[tuple[str, tuple[str, ...], str], ...]

    @classmethod
    def read(cls, text: str) -> RankDescription:
        """What ``text`` spells."""
        return from_json(text, cls)

    @property
    def text(self) -> str:
        """As JSON."""
        return json.dumps(plain(self), default=list)


def stream(execution: Execution, path: str, **setting: bool) -> None:
    """Works on what comes over the script's socket until it ends.

    Args:
        path: of the socket.
        setting: whether stages ``learns``, and whether they run as in ``training``.

    Raises:
        UsageError: the plan does not learn by local losses alone; nothing was begun.
    """
    requests: RequestStream = execution.stream(**setting)
    description = _description(execution, requests.setting)
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    is_over = False
    with short_name(path) as name:
        end.connect(name)

    def take(_: int) -> Batch | None:
        """Offers what has come, as far as there is room; the batch to be answered next."""
        nonlocal is_over
        while not is_over and requests.has_room and (not requests.num_offered or link.poll(0)):
            if not requests.num_offered:
                execution.activity.deadline_s = FOREVER_S
                execution.activity.begin("waiting for a request")
            try:
                header, tensors = decoded(link.recv_bytes())
            except (EOFError, ConnectionError) as error:
                raise TransportError("the script has left the stream", [str(error)]) from error
            is_over = header["what"] == END
            if not is_over:
                requests.offer(requests.batch(_filled(header["inputs"], tensors)), probes=header["probes"])
        return requests.upcoming

    def answer(_: int, batch: Batch) -> StepResult:
        answered = requests.run()
        if description.answers:  # else nobody waits for this rank's word
            link.send_bytes(_frame(answered))
        return StepResult(answered.losses / max(1, sum(batch.rows)), 0.0, answered.spans)

    with Connection(end.detach()) as link:
        link.send_bytes(encoded({"what": READY, "description": description.text}))
        steps = RankSteps(execution.engine, take, answer)
        while steps.step(execution.num_steps) is not None:
            pass
        requests.settle()


_MOST_NAME_BYTES = 90
"""Of ``sun_path``, which has 108 on Linux, less elsewhere."""


@contextmanager
def short_name(path: str) -> Iterator[str]:
    """A name of a socket's file that has no more bytes than there is room for: through its folder, opened.

    Raises:
        OSError: the folder is not there.
    """
    if len(os.fsencode(path)) <= _MOST_NAME_BYTES:
        yield path
        return
    folder, file = os.path.split(path)
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{opened}/{file}"
    finally:
        os.close(opened)


def _filled(inputs: Sequence[Sequence[Any]], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a request, in the order of the graph's inputs."""
    remaining = iter(tensors)
    filled = []
    for how, shape, name in inputs:
        dtype: torch.dtype = getattr(torch, name)
        if how == HERE:
            filled.append(next(remaining))
        else:
            filled.append(torch.zeros(shape, dtype=dtype, device="cpu" if how == ZEROS else "meta"))
    return filled


def _description(execution: Execution, setting: Setting) -> RankDescription:
    context = execution.context
    rank = execution.rank
    decision = context.decision
    values = context.graph.values()
    stages = {decision.layers[producer(value)].stage for value in setting.answers}
    stages |= {context.loss_stage} if setting.learns else set()
    return RankDescription(
        rank,
        any(rank in decision.stages[stage].ranks for stage in stages),
        frozenset(setting.reads),
        context.inputs,
        decision.micro_batches,
        0 if context.takes_any else context.inputs.captured,
        tuple((value, values[value].dims, values[value].dtype) for value in setting.answers),
    )


def _frame(answered: Answered) -> bytes:
    parts = [(m, *row) for m, outputs in answered.outputs.items() for row in outputs.items()]
    header = {
        "what": ANSWER,
        "rows": list(answered.rows),
        "losses": answered.losses,
        "pieces": [[m, value, [[each.start, each.stop] for each in box]] for m, value, (box, _) in parts],
    }
    return encoded(header, [tensor for _, _, (_, tensor) in parts])


def pieces_of(header: Mapping[str, Any], tensors: Sequence[Tensor]) -> dict[tuple[int, str], list[Piece]]:
    """What an answer holds, by micro-batch and value."""
    by_value: dict[tuple[int, str], list[Piece]] = {}
    for (m, value, place), tensor in zip(header["pieces"], tensors, strict=True):
        box: Box = tuple(Interval(start, stop) for start, stop in place)
        by_value.setdefault((m, value), []).append((box, tensor))
    return by_value
