"""Numbers that came from elsewhere: JSON and numpy's arrays, read into no more memory than they and their tensors take.

    {"inputs": [[1, 2], [3, 4]]}     a tensor by name: nested lists of equal lengths, read a piece at a time
    an array of numpy.save           its header first: what it says is looked at before room is made for its numbers

Whoever calls names the dtype that the model takes.  What cannot be kept in it is refused, with the input's name and
both dtypes (:func:`halopipe.extras.serving.examples.cast`).  No list of Python objects is made of a whole body:
``[],[],...`` or ``1,1,...`` would take twenty times its bytes.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from halopipe.extras.serving.examples import cast
from planner.ir.errors import FormatError, UsageError

_PIECE_BYTES = 2**16
MOST_DIMS = 64
_MOST_HEADER_BYTES = 10_000
"""As numpy's own ``max_header_size``."""

_BLANK = rb"[ \t\r\n]*"
_OBJECT = re.compile(_BLANK + rb"\{" + _BLANK)
_NAME = re.compile(rb'("(?:[^"\\\x00-\x1f]|\\.){0,1000}")' + _BLANK + rb":" + _BLANK)
_NEXT = re.compile(_BLANK + rb"," + _BLANK)
_END = re.compile(_BLANK + rb"\}" + _BLANK + rb"\Z")
_BRACKETS = re.compile(rb"[\[ \t\r\n]*")
_MISPLACED = re.compile(rb"[0-9a-z.]" + _BLANK + rb"\[|\]" + _BLANK + rb"[-+0-9a-z.]|\[" + _BLANK + rb"\]")
_BETWEEN = b"[], \t\r\n"
_NUMBER = b"0123456789+-.eE" + b"truefals"


def tensors_of_json(text: bytes, dtypes: Mapping[str, torch.dtype], most_bytes: int) -> dict[str, Tensor]:
    """The tensors of ``{"name": nested lists, ...}`` by name; one that is not known is there without numbers.

    Args:
        most_bytes: that the tensors may take together.

    Raises:
        FormatError: it is no such text, or holds what cannot be kept.
    """
    start = _OBJECT.match(text)
    if start is None:
        raise _no_request("an object is wanted, and this is none", dtypes)
    tensors: dict[str, Tensor] = {}
    place = start.end()
    while True:
        key = _NAME.match(text, place)
        if key is None:
            raise _no_request(f"byte {place}: a name in quotation marks and a colon are wanted", dtypes)
        name = _parsed(key[1], "a name")
        if name in tensors:
            raise _no_request(f"{name} is there twice", dtypes)
        place = key.end()
        end = min((each for each in (text.find(b'"', place), text.find(b"}", place)) if each >= 0), default=len(text))
        is_last = text[end : end + 1] != b'"'
        stop = end if is_last else text.rfind(b",", place, end)
        if stop < 0 or (not is_last and _NEXT.match(text, stop, end) is None):
            raise _no_request(f"{name}: text where numbers in nested lists are wanted", dtypes)
        if name not in dtypes:
            return {name: torch.empty(0)}
        tensors[name] = _numbers(text, place, stop, name, dtypes[name], most_bytes)
        most_bytes -= tensors[name].nbytes
        if is_last:
            if _END.match(text, end) is None:
                raise _no_request(f"byte {end}: the object does not end there", dtypes)
            return tensors
        place = end


def read_npy(stream: IO[bytes], name: str, wanted: torch.dtype, most_bytes: int) -> Tensor | None:
    """The next array of a stream, which may be a pipe, in the dtype ``wanted``; None at its end.

    Raises:
        FormatError: it is none, larger than ``most_bytes`` here or as it comes, or holds what cannot be kept.
    """
    magic = stream.read(8)
    if not magic:
        return None
    dtype, shape, is_turned = _header(magic, stream, name)
    count = math.prod(shape)
    most = max(dtype.itemsize, wanted.itemsize) * count
    if most > most_bytes:
        raise FormatError(
            f"{name} is too large", [f"{dtype} of shape {shape}: {most} bytes, at most {most_bytes}"], LARGER
        )
    array = np.empty(count, dtype)
    room = memoryview(array.view(np.uint8).data) if count else memoryview(b"")
    while room:
        length = stream.readinto(room)  # type: ignore[attr-defined]  # of every binary stream
        if not length:
            raise FormatError(
                f"{name} ends too soon", [f"{dtype} of shape {shape}, {len(room)} bytes are missing"], _SAVED
            )
        room = room[length:]
    native = array.astype(dtype.newbyteorder("="), copy=False)
    try:
        shaped = native.reshape(shape[::-1]).T if is_turned else native.reshape(shape)
    except ValueError as error:  # an extent beyond those of memory, beside one of 0
        raise FormatError(f"{name} is no tensor", [f"shape {str(shape)[:100]}: {error}"], _SAVED) from None
    return _kept(torch.from_numpy(shaped), name, wanted)


def read_npz(path: Path, dtypes: Mapping[str, torch.dtype], most_bytes: int) -> dict[str, Tensor]:
    """The arrays of a file of ``numpy.savez`` by name; one that is not known is there without numbers.

    Args:
        dtypes: that the model takes, by name.
        most_bytes: that the arrays may take together.

    Raises:
        FormatError: as of :func:`read_npy`.
        zipfile.BadZipFile: it is no such file.
    """
    tensors: dict[str, Tensor] = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = member.filename.removesuffix(".npy")
            if name not in dtypes:
                return {name: torch.empty(0)}
            if name in tensors:
                raise FormatError("this is no request", [f"{name} is there twice"], ["numpy.savez(FILE, NAME=array)"])
            # Others than these two are unpacked without a limit, and numpy writes none of them.
            require_packed(member, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            with archive.open(member) as stream:
                tensor = read_npy(stream, name, dtypes[name], most_bytes)
            if tensor is not None:
                tensors[name] = tensor
                most_bytes -= tensor.nbytes
    return tensors


_SAVED = ("numpy.save(FILE, array)",)
LARGER = ("a smaller one", "--max-request SIZE")


def _header(magic: bytes, stream: IO[bytes], name: str) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Dtype, shape, and whether dims lie in Fortran's order; a dtype that a tensor cannot have is refused."""
    versions = {
        b"\1\0": (2, np.lib.format.read_array_header_1_0),
        b"\2\0": (4, np.lib.format.read_array_header_2_0),
    }
    if magic[:6] != np.lib.format.MAGIC_PREFIX or magic[6:] not in versions:
        raise FormatError("this is no array", ["it does not begin as numpy.save begins one"], _SAVED)
    num_length_bytes, read = versions[magic[6:]]
    announced = stream.read(num_length_bytes)
    length = int.from_bytes(announced, "little")
    if length > _MOST_HEADER_BYTES:  # numpy would look at the length once it has read as much
        fault = f"its header has {length} bytes, at most {_MOST_HEADER_BYTES}"
        raise FormatError("this is no array", [fault], _SAVED)
    try:
        header = io.BytesIO(announced + stream.read(length))
        shape, is_turned, dtype = read(header, max_header_size=_MOST_HEADER_BYTES)
        if not all(extent >= 0 for extent in shape):
            raise ValueError(f"shape {shape}")
    except Exception as error:  # noqa: BLE001  # a header that somebody made may raise anything
        raise FormatError("this is no array", [*str(error).splitlines()[:1], "its header"], _SAVED) from None
    try:
        if len(shape) > MOST_DIMS or dtype.subdtype is not None:
            raise TypeError
        torch.from_numpy(np.empty(0, dtype.newbyteorder("=")))
    except TypeError:
        text = str(dtype)[:100]
        raise FormatError(f"{name} is {text} of {len(shape)} dims, and no tensor is", [], _SAVED) from None
    return dtype, shape, bool(is_turned)


def require_packed(member: zipfile.ZipInfo, *ways: int) -> None:
    """Raises :class:`FormatError` unless a file of an archive is packed in one of these ways, and not encrypted."""
    if member.compress_type not in ways or member.flag_bits & 1:
        raise FormatError("it is packed in a way of its own", [ascii(member.filename)[:100]])


def _numbers(text: bytes, start: int, stop: int, name: str, wanted: torch.dtype, most_bytes: int) -> Tensor:
    """The tensor of the nested lists from ``start`` to ``stop``."""
    count = text.count(b",", start, stop) + 1
    if count * wanted.itemsize > most_bytes:
        fault = f"{count} numbers of {_text(wanted)} take more than the {most_bytes} bytes of a request"
        raise FormatError(f"{name} is too large", [fault], LARGER)
    opened = _BRACKETS.match(text, start, stop)
    depth = text.count(b"[", start, start if opened is None else opened.end())
    if depth > MOST_DIMS:
        raise FormatError(f"{name} is no tensor", [f"lists in lists, {depth} of them"], [])
    shape = _shape(b",".join(_skeleton(piece, name) for piece in _pieces(text, start, stop, name)), depth, name)
    flat = torch.empty(count, dtype=wanted)
    filled = 0
    for piece in _pieces(text, start, stop, name):
        values = _parsed(b"[" + piece.translate(None, b"[]") + b"]", name)
        flat[filled : filled + len(values)] = _of_values(values, name, wanted)
        filled += len(values)
    if filled != count:
        raise FormatError(f"{name} is no tensor", [f"{count} numbers are wanted, {filled} are there"], [])
    return flat.reshape(shape)


def _of_values(values: list[Any], name: str, wanted: torch.dtype) -> Tensor:
    kinds = {type(value) for value in values}
    is_whole = not (wanted.is_floating_point or wanted.is_complex)
    allowed: set[type]
    dtype: Any
    if wanted == torch.bool:
        allowed = {bool}
        dtype = np.bool_
    elif is_whole:
        allowed = {int}
        dtype = np.uint64 if wanted == torch.uint64 else np.int64
    else:
        allowed = {int, float}
        dtype = np.float64
    if kinds - allowed:
        refused_kinds = ", ".join(sorted(kind.__name__ for kind in kinds - allowed))
        raise FormatError(
            f"{name} holds {refused_kinds}, the model takes {_text(wanted)}", [], [f"give it as {_text(wanted)}"]
        )
    try:
        array = np.array(values, dtype)
    except OverflowError:
        raise FormatError(
            f"{name} holds a number that no {np.dtype(dtype)} is", [f"the model takes {_text(wanted)}"], []
        ) from None
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise FormatError(
            f"{name} holds a number beyond those of float64", [f"the model takes {_text(wanted)}"], ["a smaller number"]
        )
    return _kept(torch.from_numpy(array), name, wanted)


def _kept(tensor: Tensor, name: str, wanted: torch.dtype) -> Tensor:
    """``tensor`` in the dtype ``wanted``; what came from elsewhere and cannot be kept is no request."""
    try:
        return cast(tensor, name, wanted)
    except UsageError as error:
        raise FormatError(error.title, error.details, error.remedies) from None


def _pieces(text: bytes, start: int, stop: int, name: str) -> Iterator[bytes]:
    """The text, cut at commas, which are left out."""
    while start < stop:
        end = stop if stop - start <= _PIECE_BYTES else text.rfind(b",", start, start + _PIECE_BYTES)
        if end < 0:
            raise FormatError(f"{name} is no tensor", [f"byte {start}: no number ends in {_PIECE_BYTES} bytes"], [])
        yield text[start:end]
        start = end + 1


def _skeleton(piece: bytes, name: str) -> bytes:
    """Brackets and commas of a piece, in which nothing is but these and numbers, none of them beside a bracket."""
    strange = piece.translate(None, _BETWEEN + _NUMBER)
    if strange:
        word = re.search(rb"[^-+0-9.\[\], \t\r\n]+", piece)
        text = ascii((strange if word is None else word[0])[:20].decode("latin-1"))
        raise FormatError(f"{name} holds {text}, which is no number of JSON", [], ["numbers in nested lists"])
    if _MISPLACED.search(piece) is not None:
        raise FormatError(f"{name} is no tensor", ["an empty list, or a number beside a bracket"], [])
    return piece.translate(None, _NUMBER + b" \t\r\n")


def _shape(skeleton: bytes, depth: int, name: str) -> tuple[int, ...]:
    """Of lists of equal lengths, by their brackets and commas: ``[[,,],[,,]]`` has shape (2, 3)."""
    shape: list[int] = []
    block = b""
    for closed in range(1, depth + 1):
        end = skeleton.find(b"]" * closed) + closed
        length = end - (depth - closed)
        many = (length - 1) // (len(block) + 1)
        if end < closed or many < 1:
            break
        block = b"[" + (block + b",") * (many - 1) + block + b"]"
        shape.insert(0, many)
        if len(block) != length:
            break
    if len(shape) != depth or block != skeleton:
        raise FormatError(f"{name} is no tensor", ["nested lists of equal lengths are wanted"], [])
    return tuple(shape)


def _parsed(text: bytes, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name} is no JSON", str(error).splitlines()[:1], ["numbers in nested lists"]) from None


def _no_request(fault: str, names: Mapping[str, object]) -> FormatError:
    return FormatError("this is no request", [fault], [f"an object of nested lists: {', '.join(names)}"])


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
