"""Files of torch.save, read without torch.load: tensors, and dicts of them by name.

    an archive    data.pkl      a pickle: which numbers of which storage are a tensor, by shape and strides
                  data/0 ...    storages: numbers, as they lie in memory

The pickle is interpreted here, as far as tensors need it: nothing that it names is looked up or called.  What it
describes is looked at before a storage is read, and a storage is only what its file holds.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halopipe.extras.serving.arrays import LARGER, MOST_DIMS, require_packed
from planner.ir.errors import FormatError

_MOST_PICKLE_BYTES = 2**16
"""A tensor takes some 200 of them; what is made of them here is a few dozen times as large."""
_SHORT_TUPLES = ("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3")
_SAVED = ("torch.save(TENSOR, FILE), or of a dict of tensors by name",)


def read_tensors(path: Path, first_name: str, most_bytes: int) -> dict[str, Tensor]:
    """The tensors of a file that ``torch.save`` wrote of a tensor, then of ``first_name``, or of a dict of them.

    Args:
        most_bytes: that the tensors may take together.

    Raises:
        FormatError: it is too large, or holds something else.
        zipfile.BadZipFile: it is no such file.
    """
    with zipfile.ZipFile(path) as archive:
        files = {member.filename.partition("/")[2]: member for member in archive.infolist()}
        if "byteorder" in files and _stored(archive, files, "byteorder", 10) != b"little":
            raise FormatError("its numbers begin with their largest digits", ["byteorder"], _SAVED)
        content = _interpreted(_stored(archive, files, "data.pkl", _MOST_PICKLE_BYTES))
        specs = content if isinstance(content, dict) else {first_name: content}
        _require_tensors(specs, most_bytes)
        storages: dict[tuple[str, torch.dtype], Tensor] = {}
        for spec in specs.values():
            key = spec.storage, spec.dtype
            if key not in storages:
                numbers = bytearray(_stored(archive, files, f"data/{spec.storage}", most_bytes))
                most_bytes -= len(numbers)
                empty = torch.empty(0, dtype=spec.dtype)
                storages[key] = torch.frombuffer(numbers, dtype=spec.dtype) if numbers else empty
        return {
            name: torch.as_strided(storages[spec.storage, spec.dtype], spec.shape, spec.strides, spec.offset)
            for name, spec in specs.items()
        }


def _stored(archive: zipfile.ZipFile, files: Mapping[str, zipfile.ZipInfo], name: str, most_bytes: int) -> bytes:
    """What a file of an archive of torch holds, which are not compressed."""
    if name not in files:
        raise FormatError("this is no file of tensors", [f"it has no {ascii(name)[:100]}"], _SAVED)
    member = files[name]
    require_packed(member, zipfile.ZIP_STORED)
    if member.file_size > most_bytes:
        fault = f"{ascii(name)[:100]}: {member.file_size} bytes, at most {most_bytes}"
        raise FormatError("it is too large", [fault], LARGER)
    return archive.read(member)


class _TorchName(NamedTuple):
    """A word of a pickle that stands for a class, a function or a dtype of torch."""

    name: str


class _StorageSpec(NamedTuple):
    """A storage as a pickle names it."""

    kind: _TorchName
    file: str


@dataclass(frozen=True, slots=True)
class _TensorSpec:
    """A tensor as a pickle describes it: numbers of a storage, by shape and strides."""

    storage: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_DTYPES = {
    **{
        f"torch {name}Storage": dtype
        for name, dtype in {
            "Double": torch.float64,
            "Float": torch.float32,
            "Half": torch.float16,
            "BFloat16": torch.bfloat16,
            "Long": torch.int64,
            "Int": torch.int32,
            "Short": torch.int16,
            "Char": torch.int8,
            "Byte": torch.uint8,
            "Bool": torch.bool,
            "ComplexDouble": torch.complex128,
            "ComplexFloat": torch.complex64,
        }.items()
    },
    **{f"torch uint{bits}": getattr(torch, f"uint{bits}") for bits in (16, 32, 64)},
}
"""What a storage holds, by the name of its class, or of the dtype beside one without."""


def _interpreted(pickled: bytes) -> Any:
    """What the pickle of a file of torch describes: a :class:`_TensorSpec`, or a dict of them.

    Of pickle's language this knows the words that ``torch.save`` writes for tensors and dicts of them.

    Raises:
        FormatError: it says something else.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def popped(count: int) -> tuple[Any, ...]:
        top = tuple(stack[len(stack) - count :])
        del stack[len(stack) - count :]
        return top

    try:
        for code, value, _ in pickletools.genops(pickled):
            argument: Any = value
            match code.name:
                case "PROTO":
                    pass
                case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE":
                    stack.append(argument)
                case "NONE" | "NEWTRUE" | "NEWFALSE":
                    stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[code.name])
                case "GLOBAL":
                    stack.append(_TorchName(argument))
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "MARK":
                    marks.append(len(stack))
                case "EMPTY_TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                    stack.append(popped(_SHORT_TUPLES.index(code.name)))
                case "TUPLE":
                    stack.append(popped(len(stack) - marks.pop()))
                case "EMPTY_DICT":
                    stack.append({})
                case "SETITEM" | "SETITEMS":
                    items = popped(2 if code.name == "SETITEM" else len(stack) - marks.pop())
                    stack[-1].update({_text(name): item for name, item in zip(items[::2], items[1::2], strict=True)})
                case "BINPERSID":
                    _, kind, file, *_ = stack.pop()
                    stack.append(_StorageSpec(kind, _text(file)))
                case "REDUCE":
                    function, arguments = popped(2)
                    stack.append(_made(function.name, arguments))
                case "STOP":
                    return stack.pop()
                case _:
                    raise FormatError("it holds something else than tensors", [code.name.lower()], _SAVED)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise FormatError("its pickle is damaged", str(error).splitlines()[:1], _SAVED) from None
    raise FormatError("its pickle is damaged", ["it has no end"], _SAVED)


def _made(name: str, arguments: tuple[Any, ...]) -> Any:
    """What a function of torch would make of ``arguments``, as a description."""
    match name, arguments:
        case "collections OrderedDict", ():
            return {}
        case "torch._utils _rebuild_parameter", (_TensorSpec() as spec, *_):
            return spec
        case "torch._utils _rebuild_tensor_v2", (_StorageSpec() as storage, offset, shape, strides, _, _, *marks):
            kind = storage.kind
        case "torch._utils _rebuild_tensor_v3", (
            _StorageSpec() as storage,
            offset,
            shape,
            strides,
            _,
            _,
            _TorchName() as kind,
            *marks,
        ):
            pass
        case _:
            raise FormatError("it holds something else than tensors", [ascii(name)[:100]], _SAVED)
    if kind.name not in _DTYPES or any(marks):
        fault = "of a dtype that is not read here" if kind.name not in _DTYPES else "conjugated or negated on the way"
        raise FormatError(
            "it holds a tensor in a form of its own", [fault], ["x.resolve_conj().resolve_neg()", *_SAVED]
        )
    return _TensorSpec(storage.file, _DTYPES[kind.name], int(offset), _extents(shape), _extents(strides))


def _text(word: Any) -> str:
    if type(word) is not str:
        raise ValueError("a name that is no text")
    return word


def _extents(numbers: Any) -> tuple[int, ...]:
    extents = tuple(numbers)
    if len(extents) > MOST_DIMS or not all(type(extent) is int and 0 <= extent < 2**63 for extent in extents):
        raise ValueError("the shape or strides of a tensor")
    return extents


def _require_tensors(specs: Mapping[str, Any], most_bytes: int) -> None:
    """Raises :class:`FormatError` unless these are tensors, of at most ``most_bytes`` together."""
    odd = [name for name, spec in specs.items() if not isinstance(spec, _TensorSpec)]
    if odd:
        raise FormatError("it holds something else than tensors", [f"{odd[0][:100]} is none"], _SAVED)
    num_bytes = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs.values())
    if num_bytes > most_bytes:
        raise FormatError("it is too large", [f"{num_bytes} bytes, at most {most_bytes}"], LARGER)
