"""The memory that ranks of one host share, as one of them has mapped it: blocks, announcements, waits.

Segments are anonymous files (``memfd_create``), opened through ``/proc``: they have no name that could be left behind,
whatever happens to the processes, and the size of /dev/shm, 64 MB in a container, does not limit them.  Pages stay with
a segment once they were used.  ``torch.multiprocessing`` and ``multiprocessing.shared_memory`` have names, trackers of
names and a file a tensor, and no way to wait; hence a small C++ source (``source/shared_memory.cpp``, which says how it
works), compiled at first use like the others.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from cuda_ops.device.compiling import CannotCompileError, LibrarySources, compiled
from cuda_ops.memory.counter import charge_address
from planner.ir.errors import OutOfMemoryError
from runtime.transport.base import MessageKey, Spec, is_plain
from runtime.transport.frame import HEADER_BYTES, Frame, FrameLayout, header_of, layout_for, views

HERE, LATE, GONE, OTHER, WRONG = range(5)
"""How a wait ends: it is here; the time is over; the peer has left; a watched channel had something else; it is here,
and of another size or dtype than expected."""

WATCHED = 1 << 63
"""Channels with this bit are watched."""

NOW_S = -1.0
"""The limit of a wait that only looks."""

_SHORT_BYTES = 64 << 10  # are copied before another thread would have Python's lock
_MOST_KEPT = 8192  # views of blocks, and frames
_TOKEN_BYTES = 16
_LEFT = 1  # in place of where something lies

_CONTEXT = ctypes.c_void_p
_RANK = ctypes.c_int32
_NUMBER = ctypes.c_uint64
_NANOSECONDS = ctypes.c_int64
_GUARD = ctypes.c_uint32
_PLACE = ctypes.POINTER(ctypes.c_uint64)
_MOST_DIMS = 16  # of a tensor that is described


class _Shape(ctypes.Structure):
    """What lies in a block, as DLPack describes it: from byte ``start`` on."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("start", "code", "bits", "dims")),
        ("extents", ctypes.c_int64 * _MOST_DIMS),
    )


_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "open": (_CONTEXT, (_RANK, _RANK, _NUMBER, ctypes.c_char_p)),
    "file": (_RANK, (_CONTEXT,)),
    "attach": (_RANK, (_CONTEXT, _RANK, _RANK, _RANK, ctypes.c_char_p)),
    "block": (_NUMBER, (_CONTEXT, _NUMBER, _RANK, _GUARD)),
    "put": (_NUMBER, (_CONTEXT, _RANK, _NUMBER, ctypes.c_void_p, _NUMBER, _GUARD)),
    "post": (_NUMBER, (_CONTEXT, _RANK, _NUMBER, ctypes.c_char_p, ctypes.c_void_p, _NUMBER)),
    "receive": (
        _RANK,
        (
            *(_CONTEXT, _RANK, _NUMBER, ctypes.c_char_p, ctypes.POINTER(_Shape), _NANOSECONDS, _NANOSECONDS),
            *(_PLACE, _PLACE, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p),
        ),
    ),
    "put_rows": (_NUMBER, (_CONTEXT, _RANK, _NUMBER, ctypes.c_void_p, _NUMBER, _NUMBER, _NUMBER, _GUARD)),
    "fetch": (
        _RANK,
        (_CONTEXT, _RANK, _NUMBER, ctypes.c_void_p, _NUMBER, _GUARD, _NANOSECONDS, _NANOSECONDS, _PLACE, _PLACE),
    ),
    "announce": (None, (_CONTEXT, _RANK, _NUMBER, _NUMBER)),
    "poll": (_RANK, (_CONTEXT, _RANK, _NUMBER, _PLACE)),
    "wait": (_RANK, (_CONTEXT, _RANK, _NUMBER, _NANOSECONDS, _NANOSECONDS, _PLACE, _PLACE)),
    "taken": (_NUMBER, (_CONTEXT, _RANK)),
    "wait_taken": (_RANK, (_CONTEXT, _RANK, _NUMBER, _NANOSECONDS, _NANOSECONDS, _PLACE)),
    "has_left": (_RANK, (_CONTEXT, _RANK)),
    "bytes": (_NUMBER, (_CONTEXT, _RANK, _NUMBER)),
    "guard": (_GUARD, (_CONTEXT, _RANK, _NUMBER)),
    "let_go": (None, (_CONTEXT, _RANK, _NUMBER)),
    "base": (ctypes.c_void_p, (_CONTEXT, _RANK)),
    "size": (_NUMBER, (_CONTEXT, _RANK)),
    "top": (_NUMBER, (_CONTEXT,)),
    "looked": (_NANOSECONDS, (_CONTEXT,)),
    "close": (None, (_CONTEXT,)),
    "free": (None, (_CONTEXT,)),
}

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@functools.cache
def library() -> tuple[Any, Any]:
    """The compiled functions by name: those that may wait, called without Python's lock, and those that never do.

    Raises:
        CannotCompileError: they cannot be had.
    """
    try:
        path = str(compiled(dict(os.environ), LibrarySources("shared_memory", Path(__file__).parent / "source")))
        loaded = ctypes.CDLL(path, use_errno=True), ctypes.PyDLL(path, use_errno=True)
    except OSError as error:
        raise CannotCompileError(f"shared memory's library cannot be had: {error}") from error
    return _Functions(loaded[0]), _Functions(loaded[1])


class _Functions:
    def __init__(self, loaded: ctypes.CDLL) -> None:
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(loaded, f"halopipe_shared_{name}")
            function.restype = result
            function.argtypes = arguments
            setattr(self, name, function)


@dataclass(frozen=True, slots=True)
class Address:
    """Where peers find the segment of a rank.

    Attributes:
        host: of the rank in the plan: ranks of different ones do not share, whatever machine they run on.
        boot: of the system that the machine runs.
        cores: that the rank may use.
    """

    host: str
    boot: str
    process: int
    file: int
    token: str
    cores: tuple[int, ...]

    def text(self) -> str:
        """For a store."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Address:
        """The address that :meth:`text` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "cores": tuple(fields["cores"])})


class ByteRange(NamedTuple):
    """Bytes of this process that follow one another: what is sent, or where what comes goes.

    Attributes:
        guard: of size and dtype, equal at both ends.
    """

    address: int
    num_bytes: int
    guard: int


class SharedSegments:
    """The segment of ``rank``, and those of the peers that it has attached.

    A block is an offset into its owner's segment.  Its data begins at a multiple of 64 bytes.

    Raises:
        CannotCompileError: the library cannot be had.
        OSError: nor can a segment.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._boot = boot_id()
        self._waits, self._calls = library()
        self.rank = rank
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._context = self._calls.open(rank, world_size, _machine_bytes(), self._token)
        if not self._context:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._offset = ctypes.c_uint64()
        self._last_counts = ctypes.c_uint64()
        self._view = ctypes.c_void_p()
        self._memory: dict[int, Tensor] = {rank: self._all_of(rank)}
        self._kept: dict[tuple[int, int, Spec], Tensor] = {}
        self._frames: dict[tuple[int, FrameLayout], Frame] = {}
        self._charge: int | None = None
        self.count_memory()

    def address(self, host: str) -> Address:
        """Of this rank, which the plan has on ``host``."""
        file = self._calls.file(self._context)
        return Address(host, self._boot, os.getpid(), file, self._token.hex(), tuple(sorted(os.sched_getaffinity(0))))

    def attach(self, rank: int, address: Address) -> str:
        """Maps the segment of ``rank``; why not, or nothing."""
        token = bytes.fromhex(address.token)
        fault = self._calls.attach(self._context, rank, address.process, address.file, token)
        if fault:
            why = "it is another process there" if fault == errno.ESTALE else os.strerror(fault)
            return f"/proc/{address.process}/fd/{address.file}: {why}"
        self._memory[rank] = self._all_of(rank)
        return ""

    def block(self, num_bytes: int, readers: int = 1, guard: int = 0) -> int:
        """A new one of this rank's.

        Raises:
            OutOfMemoryError: there is no room.
        """
        offset: int = self._calls.block(self._context, num_bytes, readers, guard)
        if not offset:
            raise self._is_full(num_bytes)
        return offset

    def put(self, place: ByteRange, rank: int, channel: int) -> None:
        """Announces a copy of what lies at ``place`` to one rank.

        Raises:
            OutOfMemoryError: there is no room.
        """
        address, num_bytes, guard = place
        calls = self._calls if num_bytes < _SHORT_BYTES else self._waits
        if not calls.put(self._context, rank, channel, address, num_bytes, guard):
            raise self._is_full(num_bytes)

    def put_cut(self, tensor: Tensor, rank: int, channel: int, guard: int) -> bool:
        """As :meth:`put` of what is cut out of a tensor along one dim; nothing, and False, if it lies otherwise.

        Raises:
            OutOfMemoryError: there is no room.
        """
        rows = rows_of(tensor.shape, tensor.stride(), tensor.itemsize)
        if rows is not None:
            self.put_rows(tensor.data_ptr(), rows, rank, channel, guard)
        return rows is not None

    def put_rows(self, address: int, rows: StridedRows, rank: int, channel: int, guard: int) -> None:
        """As :meth:`put` of stretches of memory, the first of them at ``address``.

        Raises:
            OutOfMemoryError: there is no room.
        """
        num_bytes = rows[0] * rows[1]
        calls = self._calls if num_bytes < _SHORT_BYTES else self._waits
        if not calls.put_rows(self._context, rank, channel, address, *rows, guard):
            raise self._is_full(num_bytes)

    def fetch(self, place: ByteRange, rank: int, channel: int, limit_s: float, spin_s: float, watches: bool) -> int:
        """How the wait for a block ended that is copied to ``place``.

        Args:
            limit_s, watches: as of :meth:`wait`.
        """
        address, num_bytes, guard = place
        calls = self._waits if limit_s >= 0 or num_bytes >= _SHORT_BYTES else self._calls
        ended: int = calls.fetch(
            self._context,
            rank,
            channel,
            address,
            num_bytes,
            guard,
            int(limit_s * 1e9),
            int(spin_s * 1e9),
            self._offset,
            self._last_counts if watches else None,
        )
        return ended

    def _is_full(self, num_bytes: int) -> OutOfMemoryError:
        size = self._calls.size(self._context, self.rank)
        return OutOfMemoryError(
            f"rank {self.rank} has no room for a message of {num_bytes} bytes",
            [f"its segment of {size} bytes is full of messages that nobody has let go of"],
            ["fewer micro-batches in flight", "--transport gloo"],
        )

    def tensor(self, owner: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A block's data for a moment, by its owner or while it has a reader; not to be handed on."""
        place = (owner, offset, (shape, dtype))
        view = self._kept.get(place)
        if view is None:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            num_bytes = dtype.itemsize
            for size in shape:
                num_bytes *= size
            view = self._kept[place] = self._memory[owner][offset : offset + num_bytes].view(dtype).view(shape)
        return view

    def send(self, rank: int, channel: int, key: MessageKey, tensors: Sequence[Tensor]) -> bool:
        """Announces a message to one rank: a frame of copies of the tensors, on any device and of any strides.

        Returns:
            False if nothing was done, as the rank has left.

        Raises:
            OutOfMemoryError: there is no room.
        """
        layout = layout_for(tensors)
        tensor = tensors[0] if len(tensors) == 1 else None
        if tensor is not None and layout.payload_bytes < _SHORT_BYTES and is_plain(tensor):
            header = header_of(key, layout, 0, 0)
            sent: int = self._calls.post(self._context, rank, channel, header, tensor.data_ptr(), layout.payload_bytes)
            if not sent:
                raise self._is_full(layout.total_bytes)
            return sent != _LEFT
        if self.has_left(rank):
            return False
        offset = self.block(layout.total_bytes)
        frame = self._frames.get((offset, layout))
        if frame is None:
            if len(self._frames) >= _MOST_KEPT:
                self._frames.clear()
            message = self._memory[self.rank][offset : offset + layout.total_bytes]
            frame = self._frames[offset, layout] = Frame(layout, message)
        frame.write(key, tensors)
        self.announce(rank, channel, offset)
        return True

    def receive(
        self, rank: int, channel: int, header: bytes, layout: FrameLayout, limit_s: float, spin_s: float, watches: bool
    ) -> int:
        """How the wait for a message that begins with ``header`` ended; where it is here, :meth:`taken` gives it.

        Args:
            limit_s, watches: as of :meth:`wait`.
        """
        calls = self._calls if limit_s < 0 else self._waits
        ended: int = calls.receive(
            self._context,
            rank,
            channel,
            header,
            _shape_of(layout),
            int(limit_s * 1e9),
            int(spin_s * 1e9),
            self._offset,
            self._last_counts if watches else None,
            self._view,
            self._charge,
        )
        return ended

    def taken(self, layout: FrameLayout) -> tuple[Tensor, ...]:
        """The tensors of the message that was received last, where its sender wrote them.

        Its block goes back when the last of them, and of their views, is gone; until then it counts as memory of this
        rank's tensors, where somebody counts.
        """
        message: Tensor = from_dlpack(_new_capsule(self._view, b"dltensor", None))
        return (message,) if _shape_of(layout).start else tuple(views(message, layout))

    def header(self, owner: int, offset: int) -> memoryview:
        """What a message begins with."""
        return self._memory[owner][offset : offset + HEADER_BYTES].numpy().data

    def count_memory(self) -> None:
        """Messages count from now on, if an allocator counts by now."""
        self._charge = charge_address()

    def announce(self, rank: int, channel: int, offset: int = 0) -> None:
        """Tells ``rank`` of a block, or, without one, just that."""
        self._calls.announce(self._context, rank, channel, offset)

    def poll(self, rank: int, channel: int) -> bool:
        """Whether ``rank`` has announced another block on ``channel``: then :attr:`block_offset` is where it lies."""
        return bool(self._calls.poll(self._context, rank, channel, self._offset))

    @property
    def block_offset(self) -> int:
        """The block that was waited for last."""
        return self._offset.value

    def wait(self, rank: int, channel: int, limit_s: float, spin_s: float, watches: bool) -> int:
        """How the wait for the next announcement ended; where it is here, :attr:`block_offset` is its block.

        Args:
            limit_s: ``NOW_S``: only what is there already counts.
            spin_s: so long it looks before it sleeps.
            watches: whether something on a watched channel ends the wait as well.
        """
        last_counts = self._last_counts if watches else None
        limit_ns = int(limit_s * 1e9)
        spin_ns = int(spin_s * 1e9)
        ended: int = self._waits.wait(self._context, rank, channel, limit_ns, spin_ns, self._offset, last_counts)
        return ended

    def num_taken(self, rank: int) -> int:
        """How many messages ``rank`` has taken."""
        count: int = self._calls.taken(self._context, rank)
        return count

    def wait_taken(self, rank: int, count: int, limit_s: float, spin_s: float, watches: bool) -> int:
        """How the wait until ``rank`` has taken ``count`` messages ended."""
        last_counts = self._last_counts if watches else None
        ended: int = self._waits.wait_taken(
            self._context, rank, count, int(limit_s * 1e9), int(spin_s * 1e9), last_counts
        )
        return ended

    def has_left(self, rank: int) -> bool:
        """Whether ``rank`` has closed its segment or ended."""
        return bool(self._calls.has_left(self._context, rank))

    def about(self, owner: int, offset: int) -> tuple[int, int]:
        """(bytes, guard) of a block."""
        return self._calls.bytes(self._context, owner, offset), self._calls.guard(self._context, owner, offset)

    def let_go(self, owner: int, offset: int) -> None:
        """One reader of the block fewer."""
        self._calls.let_go(self._context, owner, offset)

    @property
    def looked_s(self) -> float:
        """Seconds in which waits of this rank looked for what was not there yet, before they slept."""
        looked_ns: int = self._calls.looked(self._context)
        return looked_ns / 1e9

    @property
    def used_bytes(self) -> int:
        """The most that messages have taken at once, with what lay between them."""
        used: int = self._calls.top(self._context)
        return used

    def leave(self) -> None:
        """Peers that wait for this rank learn that nothing comes any more."""
        self._calls.close(self._context)

    def close(self) -> None:
        """Leave, and let go of all memory but what taken tensors still show."""
        if self._context:
            self.leave()
            for kept in (self._kept, self._frames, self._memory):
                kept.clear()
            self._calls.free(self._context)
            self._context = None

    def _all_of(self, rank: int) -> Tensor:
        base = self._calls.base(self._context, rank)
        size = self._calls.size(self._context, rank)
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(base), dtype=torch.uint8)


_CODES = {torch.bool: 6, torch.uint8: 1, torch.bfloat16: 4, torch.complex64: 5, torch.complex128: 5} | {
    **dict.fromkeys((torch.int8, torch.int16, torch.int32, torch.int64), 0),
    **dict.fromkeys((torch.float16, torch.float32, torch.float64), 2),
}
"""DLPack's kinds of numbers."""


@functools.lru_cache(maxsize=_MOST_KEPT)
def _shape_of(layout: FrameLayout) -> _Shape:
    """A message of one tensor is that tensor; one of several is bytes, of which views are made."""
    (shape, dtype), *others = layout.specs or (((), torch.uint8),)
    if others or not layout.specs or len(shape) > _MOST_DIMS or dtype not in _CODES:
        return _Shape(0, _CODES[torch.uint8], 8, 1, (layout.total_bytes,))
    return _Shape(HEADER_BYTES, _CODES[dtype], 8 * dtype.itemsize, len(shape), shape)


StridedRows = tuple[int, int, int]
"""How many stretches of memory, bytes of each, bytes from one to the next."""


@functools.lru_cache(maxsize=1024)
def rows_of(shape: torch.Size, strides: tuple[int, ...], itemsize: int) -> StridedRows | None:
    """The stretches that make up such a tensor; None: it is no such.

    Elements of a stretch follow one another, and stretches are equally far apart.
    """
    each = 1
    rows = 1
    pitch = 0
    for size, stride in reversed([one for one in zip(shape, strides, strict=True) if one[0] > 1]):
        if not pitch and stride == each:
            each *= size
        elif not pitch and stride > each:
            rows = size
            pitch = stride
        elif pitch and stride == rows * pitch:
            rows *= size
        else:
            return None
    return rows, each * itemsize, (pitch or each) * itemsize


def boot_id() -> str:
    """Of the system that this machine runs; containers of one machine have the same.

    Raises:
        OSError: there is no /proc, by which ranks find one another's memory as well.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _machine_bytes() -> int:
    """No rank can have more in flight than the machine has memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
