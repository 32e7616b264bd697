"""A message: a frame, that is a header of 64 bytes and tensors aligned to 64, and large tensors that travel alone.

    | magic version kind count | step | src dst mb | checksum | bytes | dtypes | number taken guard | tensor 0 .. |

gloo's messages have no frame of their own: a message of another shape or dtype than expected would pass silently.
``number`` counts the messages from one rank to another, ``taken`` those that came back the other way: it tells the
receiver which of its own messages have arrived, so that their buffers can be used again.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from planner.ir.errors import TransportError
from runtime.transport.base import MessageKey, Spec

ALIGNMENT_BYTES = 64
"""Of the header and of each tensor: a cache line, and what torch's own CPU allocator gives."""

_HEADER = struct.Struct("<4sHcBqiiiIQ12sIII")
_STAMP = struct.Struct("<III")  # what the header ends with: number, taken, guard
HEADER_BYTES = _HEADER.size  # 64
_STAMP_MASK = 0xFFFFFFFF
_MAGIC = b"HALO"
_VERSION = 2
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.complex128,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_TAG_BITS = {"src_stage": 7, "dst_stage": 7, "microbatch": 10}
_STEP_SHIFT = 24
_KIND_SHIFT = 26


@dataclass(frozen=True, slots=True, eq=False)  # one object for equal specs, hence compared and hashed by identity
class FrameLayout:
    """Where the tensors of a message lie.

    Attributes:
        specs: shape and dtype of each tensor.
        alone: those of the tensors that travel alone.
        spans: first and last byte (exclusive) of each tensor in the frame; None for one that travels alone.
        total_bytes: of the frame, header included.
        payload_bytes: of all tensors, with what aligns them.
        checksum: of all shapes and dtypes.
        dtypes: a code for each of the first 12 tensors, so that an error can name what came.
    """

    specs: tuple[Spec, ...]
    alone: tuple[Spec, ...]
    spans: tuple[tuple[int, int] | None, ...]
    total_bytes: int
    payload_bytes: int
    checksum: int
    dtypes: bytes

    @property
    def count(self) -> int:
        """Number of tensors, as the header has it."""
        return min(len(self.specs), 255)


def layout_of(specs: Sequence[Spec], alone_bytes: int | None = None) -> FrameLayout:
    """The layout of a message with these tensors; those of ``alone_bytes`` and more travel alone, None: no tensor."""
    return _layout_of(specs if isinstance(specs, tuple) else tuple(specs), alone_bytes)


def layout_for(tensors: Sequence[Tensor], alone_bytes: int | None = None) -> FrameLayout:
    """The layout of a message with tensors like these."""
    return _layout_of(tuple([(tensor.shape, tensor.dtype) for tensor in tensors]), alone_bytes)


@lru_cache(maxsize=4096)
def _layout_of(specs: tuple[Spec, ...], alone_bytes: int | None) -> FrameLayout:
    specs = tuple((tuple(shape), dtype) for shape, dtype in specs)
    end = ALIGNMENT_BYTES
    alone: list[Spec] = []
    alone_size = 0
    spans: list[tuple[int, int] | None] = []
    for shape, dtype in specs:
        num_bytes = prod(shape) * dtype.itemsize
        if alone_bytes is not None and num_bytes >= alone_bytes:
            spans.append(None)
            alone.append((shape, dtype))
            alone_size += num_bytes
            continue
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = start + num_bytes
        spans.append((start, end))
    dtypes = bytes(_DTYPES.index(dtype) + 1 if dtype in _DTYPES else 255 for _, dtype in specs[:12])
    payload_bytes = end - ALIGNMENT_BYTES + alone_size
    return FrameLayout(
        specs, tuple(alone), tuple(spans), end, payload_bytes, zlib.crc32(repr(specs).encode()), dtypes.ljust(12, b"\0")
    )


class Frame:
    """A header and those tensors of a message that do not travel alone, in one buffer of bytes on the CPU.

    Args:
        layout: of the message.
        message: the buffer; a new one if None.
        spare_bytes: room after the frame in a new buffer, in which a wrong, longer message can be judged.

    Attributes:
        tensors: views of the buffer, in order; without those that travel alone.
    """

    __slots__ = ("_header", "layout", "message", "tensors")

    def __init__(self, layout: FrameLayout, message: Tensor | None = None, spare_bytes: int = 0) -> None:
        self.layout = layout
        self.message = torch.empty(layout.total_bytes + spare_bytes, dtype=torch.uint8) if message is None else message
        self.tensors = views(self.message, layout)
        self._header = self.message.numpy().data[:HEADER_BYTES]

    def write(self, key: MessageKey, tensors: Iterable[Tensor], number: int = 0, acknowledged: int = 0) -> None:
        """Copy the tensors in, under the name ``key``; those that travel alone are left out."""
        self._header[:] = header_of(key, self.layout, number, acknowledged)
        for slot, tensor in zip(self.tensors, tensors, strict=True):
            slot.copy_(tensor.detach() if tensor.requires_grad else tensor)

    def check(self, key: MessageKey, source: int) -> tuple[int, int]:
        """``number`` and ``taken`` of the message that came from rank ``source``.

        Raises:
            TransportError: it is another message than ``key`` with this layout.
        """
        return check(self._header, key, source, self.layout)


def views(message: Tensor, layout: FrameLayout) -> list[Tensor]:
    """The tensors inside a frame, in order."""
    return [
        message[span[0] : span[1]].view(dtype).view(shape)
        for (shape, dtype), span in zip(layout.specs, layout.spans, strict=True)
        if span is not None
    ]


def alone_buffer(spec: Spec, spare_bytes: int, device: str | torch.device = "cpu") -> Tensor:
    """Room for a tensor that travels alone, and after it at most ``spare_bytes`` for a wrong, longer one."""
    num_bytes = prod(spec[0]) * spec[1].itemsize
    return torch.empty(num_bytes + min(num_bytes // 8, spare_bytes), dtype=torch.uint8, device=device)


def whole(layout: FrameLayout, inside: Iterable[Tensor], buffers: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """All tensors of a message: those inside the frame, and those that came alone, from their buffers."""
    here = iter(inside)
    apart = iter(buffers)
    return tuple(
        [
            next(apart)[: prod(shape) * dtype.itemsize].view(dtype).view(shape) if span is None else next(here)
            for (shape, dtype), span in zip(layout.specs, layout.spans, strict=True)
        ]
    )


def unpack(message: Tensor, key: MessageKey, source: int, layout: FrameLayout) -> tuple[Tensor, ...]:
    """The tensors of a frame in somebody else's buffer, which may be of any size.

    Raises:
        TransportError: as :meth:`Frame.check`.
    """
    check(message.numpy().data[:HEADER_BYTES], key, source, layout)
    return tuple(views(message, layout))


def check(header: memoryview, key: MessageKey, source: int, layout: FrameLayout) -> tuple[int, int]:
    """``number`` and ``acknowledged`` in the header of a message from rank ``source``.

    Raises:
        TransportError: it is another message than ``key`` with this layout; the text names what differs.
    """
    number, acknowledged, _ = _STAMP.unpack_from(header, HEADER_BYTES - _STAMP.size)
    expected = header_of(key, layout, number, acknowledged)
    if header != expected:
        raise another(header, expected, key, source)
    return number, acknowledged


def another(header: memoryview, expected: bytes, key: MessageKey, source: int) -> TransportError:
    """The error of a message from rank ``source`` that begins with ``header``; the text names what differs."""
    faults = _faults(key, _HEADER.unpack(expected), _HEADER.unpack(header))
    return TransportError(f"{key}: rank {source} sent another message than expected", faults)


def tag(key: MessageKey) -> int:
    """The key as a number below 2**31, so that matching does not depend on the order of messages.

    Two bits for the step: messages of four successive steps may be in flight together.  Kinds take 1 to 26 of the
    upper five bits; 0 and 27 to 31 are free for a transport's own use.

    Raises:
        TransportError: the kind is not one capital letter, or a number is too large for its bits.
    """
    return _numbered(key.kind, key.src_stage, key.dst_stage, key.microbatch) | key.step % 4 << _STEP_SHIFT


@lru_cache(maxsize=1 << 16)
def _numbered(kind: str, src_stage: int, dst_stage: int, microbatch: int) -> int:
    """The tag of step 0."""
    name = f"{kind} {src_stage}->{dst_stage} mb {microbatch}"
    if len(kind) != 1 or not "A" <= kind <= "Z":
        raise TransportError(f"{name}: the kind is {kind!r}, expected one letter from A to Z")
    number = 0
    for (field, bits), value in zip(_TAG_BITS.items(), (src_stage, dst_stage, microbatch), strict=True):
        if not 0 <= value < 1 << bits:
            raise TransportError(f"{name}: {field} is {value}, expected 0 to {(1 << bits) - 1}")
        number = number << bits | value
    return number | ord(kind) - ord("A") + 1 << _KIND_SHIFT


def header_of(key: MessageKey, layout: FrameLayout, number: int, acknowledged: int) -> bytes:
    """The header of a message."""
    step, kind, src_stage, dst_stage, microbatch = key
    ends = (src_stage, dst_stage, microbatch)
    of_tensors = (layout.checksum, layout.payload_bytes, layout.dtypes)
    stamp = number, acknowledged, ~(number ^ acknowledged) & _STAMP_MASK
    return _HEADER.pack(_MAGIC, _VERSION, kind.encode(), layout.count, step, *ends, *of_tensors, *stamp)


def _faults(key: MessageKey, expected: tuple[Any, ...], received: tuple[Any, ...]) -> list[str]:
    """One line for each part of the header that differs; nothing after a wrong magic number can be trusted."""
    if received[:2] != expected[:2]:
        return [f"magic and version: expected {expected[:2]}, came {received[:2]}"]
    kind = received[2]
    step, src_stage, dst_stage, microbatch = received[4:8]
    sender = MessageKey(step, str(kind, "latin-1"), src_stage, dst_stage, microbatch)
    pairs = (
        ("key", key, sender),
        ("number of tensors", expected[3], received[3]),
        ("dtypes", _names(expected[10]), _names(received[10])),
        ("payload bytes", expected[9], received[9]),
        ("checksum of shapes and dtypes", f"{expected[8]:08x}", f"{received[8]:08x}"),
        ("guard of the message's numbers", f"{expected[13]:08x}", f"{received[13]:08x}"),
    )
    return [f"{what}: expected {wanted}, came {actual}" for what, wanted, actual in pairs if wanted != actual]


def _names(dtypes: bytes | int) -> str:
    codes = dtypes if isinstance(dtypes, bytes) else b""
    return ", ".join(
        str(_DTYPES[code - 1]).removeprefix("torch.") if code <= len(_DTYPES) else "other" for code in codes if code
    )
