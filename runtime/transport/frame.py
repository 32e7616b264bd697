"""One message = one buffer of bytes: a header of 64 bytes, then each tensor's bytes, aligned to 64.

    | magic version kind count | step | src dst mb | checksum | payload bytes | dtypes | tensor 0 .. | tensor 1 .. |

gloo's messages have no frame of their own: a message of another shape or dtype than expected would pass silently.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch

from planner.ir.errors import TransportError
from runtime.transport.base import Key, Spec

ALIGNMENT_BYTES = 64
"""Of the header and of each tensor: a cache line, and what torch's own CPU allocator gives."""

_HEADER = struct.Struct("<4sHcBqiiiIQ24s")
_MAGIC = b"HALO"
_VERSION = 1
_DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_TAG_BITS = {"step": 2, "src_stage": 7, "dst_stage": 7, "microbatch": 10}


@dataclass(frozen=True, slots=True, eq=False)  # one object for equal specs, hence compared and hashed by identity
class Layout:
    """Where the tensors of a message lie.

    Attributes:
        specs: shape and dtype of each tensor.
        spans: first and last byte (exclusive) of each tensor in the message.
        total_bytes: the whole message, header included.
        checksum: of all shapes and dtypes.
        dtypes: a code for each of the first 24 tensors, so that an error can name what came.
    """

    specs: tuple[Spec, ...]
    spans: tuple[tuple[int, int], ...]
    total_bytes: int
    checksum: int
    dtypes: bytes


def layout_of(specs: Sequence[Spec]) -> Layout:
    """The layout of a message with these tensors."""
    return _layout_of(tuple((tuple(shape), dtype) for shape, dtype in specs))


@lru_cache(maxsize=4096)
def _layout_of(specs: tuple[Spec, ...]) -> Layout:
    end = ALIGNMENT_BYTES
    spans = []
    for shape, dtype in specs:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        end = start + prod(shape) * dtype.itemsize
        spans.append((start, end))
    dtypes = bytes(_DTYPES.index(dtype) + 1 if dtype in _DTYPES else 255 for _, dtype in specs[:24])
    return Layout(specs, tuple(spans), end, zlib.crc32(repr(specs).encode()), dtypes.ljust(24, b"\0"))


class Frame:
    """One message in one buffer: what it carries, as views of it, and its header.

    Args:
        layout: of the message.
        message: the buffer, bytes on the CPU; a new one if None.
        spare_bytes: room behind the message in a new buffer, in which a wrong, longer message can be judged.
    """

    __slots__ = ("_header", "layout", "message", "tensors")

    def __init__(self, layout: Layout, message: torch.Tensor | None = None, spare_bytes: int = 0) -> None:
        self.layout = layout
        self.message = torch.empty(layout.total_bytes + spare_bytes, dtype=torch.uint8) if message is None else message
        self.tensors = tuple(
            self.message[start:end].view(dtype).view(shape)
            for (shape, dtype), (start, end) in zip(layout.specs, layout.spans, strict=True)
        )
        self._header = memoryview(self.message.numpy())[: _HEADER.size]

    def write(self, key: Key, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the tensors in, under the name ``key``."""
        self._header[:] = _header(key, self.layout)
        with torch.no_grad():
            for slot, tensor in zip(self.tensors, tensors, strict=True):
                slot.copy_(tensor)

    def read(self, key: Key, source: int) -> tuple[torch.Tensor, ...]:
        """The tensors of the message that came from rank ``source``, as views.

        Raises:
            TransportError: it is another message than ``key`` with this layout.
        """
        _check(self._header, key, source, self.layout)
        return self.tensors


def unpack(message: torch.Tensor, key: Key, source: int, layout: Layout) -> tuple[torch.Tensor, ...]:
    """The tensors of a message in somebody else's buffer, which may be of any size; as :meth:`Frame.read`."""
    _check(memoryview(message.numpy())[: _HEADER.size], key, source, layout)
    return Frame(layout, message).tensors


def layout_for(tensors: Sequence[torch.Tensor]) -> Layout:
    """The layout of a message with tensors like these."""
    return _layout_of(tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors))


def tag(key: Key) -> int:
    """The key as a number below 2**31, so that matching does not depend on the order of messages.

    Two bits for the step: messages of four successive steps may be in flight together.  Kinds take 1 to 26 of the
    upper five bits; 0 and 27 to 31 are free for a transport's own use.

    Raises:
        TransportError: the kind is not one capital letter, or a number is too large for its bits.
    """
    if len(key.kind) != 1 or not "A" <= key.kind <= "Z":
        raise TransportError(f"{key}: the kind is {key.kind!r}, expected one letter from A to Z")
    number = ord(key.kind) - ord("A") + 1
    for field, bits in _TAG_BITS.items():
        value = getattr(key, field)
        if field == "step":
            value %= 1 << bits
        if not 0 <= value < 1 << bits:
            raise TransportError(f"{key}: {field} is {value}, expected 0 to {(1 << bits) - 1}")
        number = number << bits | value
    return number


def _header(key: Key, layout: Layout) -> bytes:
    count, payload_bytes = min(len(layout.specs), 255), layout.total_bytes - ALIGNMENT_BYTES
    name = (key.step, key.src_stage, key.dst_stage, key.microbatch)
    kind = key.kind.encode()
    return _HEADER.pack(_MAGIC, _VERSION, kind, count, *name, layout.checksum, payload_bytes, layout.dtypes)


def _check(header: memoryview, key: Key, source: int, layout: Layout) -> None:
    """Raises :class:`TransportError` naming each field of the header that differs, what was expected and what came."""
    expected = _header(key, layout)
    if header != expected:
        faults = _faults(key, _HEADER.unpack(expected), _HEADER.unpack(header))
        raise TransportError(f"{key}: rank {source} sent another message than expected", faults)


def _faults(key: Key, expected: tuple[bytes | int, ...], came: tuple[bytes | int, ...]) -> list[str]:
    """One line for each part of the header that differs; nothing behind a wrong magic number can be trusted."""
    if came[:2] != expected[:2]:
        return [f"magic and version: expected {expected[:2]}, came {came[:2]}"]
    kind, step, src_stage, dst_stage, microbatch = came[2], *came[4:8]
    sender = Key(step, str(kind, "latin-1"), src_stage, dst_stage, microbatch)
    pairs = (
        ("key", key, sender),
        ("number of tensors", expected[3], came[3]),
        ("dtypes", _names(expected[10]), _names(came[10])),
        ("payload bytes", expected[9], came[9]),
        ("checksum of shapes and dtypes", f"{expected[8]:08x}", f"{came[8]:08x}"),
    )
    return [f"{what}: expected {wanted}, came {found}" for what, wanted, found in pairs if wanted != found]


def _names(dtypes: bytes | int) -> str:
    codes = dtypes if isinstance(dtypes, bytes) else b""
    return ", ".join(
        str(_DTYPES[code - 1]).removeprefix("torch.") if code <= len(_DTYPES) else "other" for code in codes if code
    )
