"""A rank of a stream: it works on one request after another, until it is told that there are no more.

    script                                            each rank
    connection: REQUEST, the tensors that it reads --> announces messages, works, updates
                                                  <-- ANSWER, its parts of the module's output
    connection: END                               --> finishes what is there, and waits for the next call

A connection is a socket in the job's own folder, which nobody else may open.  A frame is a header of JSON and the bytes
of tensors behind it.  Of inputs that a rank does not read it is told the shape alone; targets that nobody gave are
zeros.
"""

from __future__ import annotations

import dataclasses
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
from planner.ir.box import Box, Interval
from planner.ir.errors import TransportError
from planner.ir.graph import TensorSpec, producer
from runtime.pipeline.microbatches import InputSpecs
from runtime.pipeline.routing import Piece
from runtime.pipeline.stream import Answered, RequestStream
from runtime.stage.index_ranges import IndexRange

READY, REQUEST, ANSWER, END = "ready", "request", "answer", "end"
HERE, ZEROS, SHAPE = "here", "zeros", "shape"
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
    tensors, whole = [], bytearray(frame)
    for shape, name in header.pop("tensors"):
        dtype: torch.dtype = getattr(torch, name)
        count = math.prod(shape)
        # A copy of its own: tensors of a frame need not be aligned to their elements.
        flat = torch.frombuffer(whole, dtype=torch.uint8, count=count * dtype.itemsize, offset=place) if count else None
        place += count * dtype.itemsize
        tensors.append(torch.empty(shape, dtype=dtype) if flat is None else flat.clone().view(dtype).reshape(shape))
    return header, tensors


def described(inputs: InputSpecs) -> dict[str, Any]:
    """What a model takes, as JSON."""
    return {
        "specs": {name: [list(spec.dims), list(spec.shape), spec.dtype] for name, spec in inputs.specs.items()},
        "captured": inputs.captured,
        "free": sorted(map(list, inputs.free)),
        "ranges": {name: [dataclasses.asdict(each) for each in limits] for name, limits in inputs.ranges.items()},
    }


def inputs_of(header: Mapping[str, Any]) -> InputSpecs:
    """What :func:`described` told."""
    specs = {
        name: TensorSpec(tuple(dims), tuple(shape), dtype) for name, (dims, shape, dtype) in header["specs"].items()
    }
    ranges = {
        name: tuple(IndexRange(**{**each, "cut": tuple(map(tuple, each["cut"]))}) for each in limits)
        for name, limits in header["ranges"].items()
    }
    return InputSpecs(specs, header["captured"], frozenset((name, dim) for name, dim in header["free"]), ranges)


def serve_stream(execution: Execution, arguments: Mapping[str, Any]) -> int:
    """Works on what comes over the script's socket until it ends; the number of requests.

    Args:
        arguments: the socket's ``path``, whether stages ``learn``, and whether they run as in ``training``.

    Raises:
        UsageError: the plan does not learn by local losses alone; nothing was begun.
    """
    stream = execution.stream(learns=arguments["learns"], training=arguments["training"])
    with _joined(arguments["path"]) as link:
        answers = _Answers(execution, stream)
        link.send_bytes(encoded({"what": READY, "rank": execution.rank, **answers.description}))
        return _loop(execution, stream, answers, link)


def _joined(path: str) -> Connection:
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with short_name(path) as name:
        end.connect(name)
    return Connection(end.detach())


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


def _loop(execution: Execution, stream: RequestStream, answers: _Answers, link: Connection) -> int:
    count, is_over = 0, False
    while True:
        while not is_over and stream.has_room and (not stream.num_offered or link.poll(0)):
            if not stream.num_offered:
                execution.activity.deadline_s = FOREVER_S
                execution.activity.begin("waiting for a request")
            try:
                header, tensors = decoded(link.recv_bytes())
            except (EOFError, ConnectionError) as error:
                raise TransportError("the script has left the stream", [str(error)]) from error
            is_over = header["what"] == END
            if not is_over:
                stream.offer(stream.batch(_filled(header["inputs"], tensors)), probes=header["probes"])
                count += not header["probes"]
        if not stream.num_offered:
            stream.settle()
            return count
        frame = answers.frame(stream.run())
        if frame:
            link.send_bytes(frame)


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


class _Answers:
    """What this rank tells of each request.

    Attributes:
        description: of itself, when it is ready.
    """

    def __init__(self, execution: Execution, stream: RequestStream) -> None:
        context, setting = execution.context, stream.setting
        graph, decision, rank = context.graph, context.decision, execution.rank
        values = graph.values()
        stages = [decision.layers[producer(value)].stage for value in setting.answers]
        has_loss = rank in decision.stages[context.loss_stage].ranks
        self._speaks = any(rank in decision.stages[stage].ranks for stage in stages) or (setting.learns and has_loss)
        specs = [values[value] for value in setting.answers]
        self.description: dict[str, Any] = {
            "answers": self._speaks,
            "reads": list(setting.reads),
            "inputs": described(context.inputs),
            "planned": list(decision.micro_batches),
            "fixed": 0 if context.takes_any else context.inputs.captured,
            "values": [
                [value, list(spec.dims), spec.dtype] for value, spec in zip(setting.answers, specs, strict=True)
            ],
        }

    def frame(self, answered: Answered) -> bytes:
        """Empty where nobody waits for this rank's word."""
        if not self._speaks:
            return b""
        pieces, tensors = [], []
        for m, outputs in answered.outputs.items():
            for value, (box, tensor) in outputs.items():
                pieces.append([m, value, [[each.start, each.stop] for each in box]])
                tensors.append(tensor)
        header = {
            "what": ANSWER,
            "rows": list(answered.rows),
            "losses": answered.losses,
            "busy_s": sum(span.stop_s - span.start_s for span in answered.spans),
            "pieces": pieces,
        }
        return encoded(header, tensors)


@dataclass(frozen=True, slots=True)
class StreamDescription:
    """What ranks said of themselves when they were ready.

    Attributes:
        speakers: ranks that answer.
        reads: by rank, graph inputs of which it needs the numbers.
        values: of the module's output: the value, its dims and dtype.
        fixed: samples that a micro-batch must have; 0: any number.
    """

    inputs: InputSpecs
    planned: tuple[int, ...]
    fixed: int
    values: tuple[tuple[str, tuple[str, ...], str], ...]
    speakers: frozenset[int]
    reads: Mapping[int, frozenset[str]]

    @classmethod
    def of(cls, headers: Mapping[int, Mapping[str, Any]]) -> StreamDescription:
        """Of what :class:`_Answers` of each rank tells."""
        first = headers[0]
        return cls(
            inputs_of(first["inputs"]),
            tuple(first["planned"]),
            first["fixed"],
            tuple((value, tuple(dims), dtype) for value, dims, dtype in first["values"]),
            frozenset(rank for rank, each in headers.items() if each["answers"]),
            {rank: frozenset(each["reads"]) for rank, each in headers.items()},
        )


def pieces_of(header: Mapping[str, Any], tensors: Sequence[Tensor]) -> dict[tuple[int, str], list[Piece]]:
    """What an answer holds, by micro-batch and value."""
    by_value: dict[tuple[int, str], list[Piece]] = {}
    for (m, value, place), tensor in zip(header["pieces"], tensors, strict=True):
        box: Box = tuple(Interval(start, stop) for start, stop in place)
        by_value.setdefault((m, value), []).append((box, tensor))
    return by_value
