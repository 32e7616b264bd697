"""A card that is not there: tensors of ``cuda:0`` without numbers, and what crosses between it and the host.

Tensors of the host are real, those of the card are torch's fake tensors.  While a :class:`Card` is entered,

    copies to the card                      are fake tensors
    operators of fake tensors               are checked by torch: all on one device, numbers (0 dims) of the host aside
    copies to the host, reads of a number   are a fault, unless a line of :data:`ALLOWED` says why they are none
    waits of the host, tensors made there   within an action of a step, likewise

A fault names the innermost line of ours that led to it.  What comes to the host is zeros, or one where a single number
is read: nobody may decide by them what is computed.

It sees dispatched operators.  Streams, events and generators of numbers are stood in for where the runtime asks for
them (:mod:`cuda_ops.device.driver`); that a generator of the card fills tensors of the card is checked, values are not
there to check.
"""

from __future__ import annotations

import ctypes
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from cuda_ops.device import driver

DEVICE = torch.device("cuda", 0)
HOST = torch.device("cpu")
ROOT = Path(__file__).parents[2]
OURS = tuple(str(ROOT / name) for name in ("cuda_ops", "halopipe", "planner", "profiler", "runtime"))

_ATEN = torch.ops.aten
_READS = (_ATEN._local_scalar_dense.default, _ATEN.is_nonzero.default, _ATEN.equal.default)
_COPIES = (_ATEN._to_copy.default, _ATEN.copy_.default, _ATEN.copy.default)

COPY = "copy to the host"
READ = "number read by the host"
WAIT = "copy that waits"
MADE = "tensor made on the host"
"""What crosses between card and host."""

_AFTER = "once the step is over"
_ONCE = "once for each size of a batch"
ALLOWED: Mapping[tuple[str, str], str] = {
    ("runtime/stage/local_stage.py:<genexpr>", READ): f"losses are read {_AFTER}",
    ("runtime/numerics/finite.py:all_finite", READ): "NaN is looked for before each update, one number a stage",
    ("runtime/optim/gradient_sync.py:_norm", READ): "so is the norm that gradients are clipped by",
    ("runtime/optim/gradient_sync.py:_norm", MADE): "ranks put their norms together on the host",
    ("runtime/pipeline/loss_weighting.py:_counted", MADE): "what losses count is found of the batch, on the host",
    ("runtime/stage/sample_weights.py", MADE): "the same",
    ("runtime/stage/sample_weights.py", COPY): "weights of classes come to the host once, for that",
    ("runtime/spatial/op_rules/data_movement.py:_read_alike", READ): f"which rows the card's own resize reads: {_ONCE}",
    ("runtime/transport/inprocess.py", MADE): "threads meet in memory of the host",
    ("runtime/transport/inprocess.py", COPY): "what they send one another for sums",
    ("runtime/transport/base.py:plain_like", MADE): "room for that",
    ("runtime/transport/base.py:add_in_order", WAIT): "terms that came by way of the host are added",
    ("runtime/transport/frame.py", COPY): "messages by way of the host, where ranks have no NCCL",
    ("runtime/transport/frame.py", MADE): "their frames",
    ("runtime/numerics/compare.py:of", COPY): "the comparison with one device, beside steps",
    ("runtime/numerics/single_device.py:serial_step_each", READ): "the one device, whose step nobody times",
    ("tests", COPY): "a checkpoint's tensors are saved from the host",
}
"""(file of ours, and its function where not all may; what crosses): why."""


class DeviceError(AssertionError):
    """Something crosses between the card and the host that must not."""


def source_line() -> tuple[str, int, str]:
    """The innermost line of ours that is running: its file, number and function."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    if frame is None:
        return "tests", 0, ""
    return str(Path(frame.f_code.co_filename).relative_to(ROOT)), frame.f_lineno, frame.f_code.co_name


class _Event:
    """A timing event of the card, whose work takes no time."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def elapsed_time(self, later: _Event) -> float:
        """Milliseconds."""
        return 0.0


class Crossings:
    """What crossed between the card and the host, and where: for all ranks of a test.

    Attributes:
        counts: by function of ours and kind, of those that are allowed.
        faults: the others, each once.
    """

    def __init__(self, allowed: Mapping[tuple[str, str], str] = ALLOWED) -> None:
        self.allowed = allowed
        self.counts: Counter[tuple[str, str]] = Counter()
        self.faults: dict[str, None] = {}

    def note(self, kind: str, what: object) -> None:
        """Something crosses in the line of ours that is running."""
        file, line, function = source_line()
        place = next((each for each in (f"{file}:{function}", file) if (each, kind) in self.allowed), "")
        if place:
            self.counts[place, kind] += 1
        else:
            self.faults[f"{kind} ({what}) at {file}:{line}, in {function}"] = None


class Card(TorchDispatchMode):
    """One rank's view of the card.

    Args:
        fakes: of all ranks, which exchange tensors.
        generators: by address in C++, those that stand for generators of the card.

    Attributes:
        in_step: whether waits, and tensors made on the host, are noted.
    """

    def __init__(self, fakes: FakeTensorMode, generators: Mapping[int, torch.Generator], crossings: Crossings) -> None:
        super().__init__()
        self._fakes = fakes
        self._generators = generators
        self._crossings = crossings
        self.in_step = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """A training step, in which the card's work must not be waited for."""
        self.in_step = True
        try:
            yield
        finally:
            self.in_step = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        leaves = [each for each in tree_leaves((args, named)) if isinstance(each, Tensor)]
        here = [each for each in leaves if each.device.type == "cpu"]
        there = len(here) < len(leaves)
        goes_to = torch.device(named["device"]) if named.get("device") is not None else None
        if function in _READS and any(map(_is_fake, leaves)):
            if there:
                self._crossings.note(READ, function)
            return _one(leaves[0], function)
        if function in _COPIES and there and (goes_to or args[0].device).type == "cpu":
            self._crossings.note(COPY, function)
            return _zeros(function, args, named)
        if not there and (goes_to is None or goes_to.type == "cpu"):
            found = function(*args, **named)
            if self.in_step and not leaves and isinstance(found, Tensor):
                self._crossings.note(MADE, function)
            return found
        args, named = self._without_generator(function, args, named)
        copies = function in _COPIES
        waits = not (named.get("non_blocking") or (len(args) > 2 and args[2])) if copies else any(e.ndim for e in here)
        if self.in_step and here and waits:
            self._crossings.note(WAIT, function)
        if function is _ATEN.batch_norm_update_stats.default:  # which has no rule for fake tensors
            return args[0].new_empty(args[0].shape[1]), args[0].new_empty(args[0].shape[1])
        args = self._faked(args)
        named = self._faked(named)
        try:
            with self._fakes:
                return function(*args, **named)
        except NotImplementedError as error:
            raise DeviceError(f"{function} has no rule for fake tensors") from error

    def _without_generator(self, function: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """The arguments for a fake tensor, which draws nothing."""
        drawn = [each for each in (*args, *named.values()) if isinstance(each, torch.Generator)]
        if not all(each._cdata in self._generators for each in drawn):
            raise DeviceError(f"{function} on the card draws by a generator of the host, at {source_line()}")
        return tree_map(lambda each: None if isinstance(each, torch.Generator) else each, (tuple(args), named))

    def of_host(self, tensor: Tensor) -> Tensor:
        """A stand-in for a tensor of the host that may move to the card; each call makes another one."""
        own = tensor.detach().clone()
        return self._fakes.from_tensor(
            nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own
        )

    def _faked(self, arguments: Any) -> Any:
        return tree_map(lambda each: self._fakes.from_tensor(each.detach()) if _is_real(each) else each, arguments)


def _is_fake(value: object) -> bool:
    return isinstance(value, FakeTensor)


def _is_real(value: object) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor)


def _one(tensor: Tensor, function: Any) -> Any:
    if function is not _ATEN._local_scalar_dense.default or tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1


def _zeros(function: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    if function is _ATEN.copy_.default:
        return args[0].zero_()
    return torch.zeros(tuple(args[0].shape), dtype=named.get("dtype") or args[0].dtype)


@contextmanager
def card() -> Iterator[Callable[[Crossings], Card]]:
    """Meanwhile a card is thought to be there; what is given makes a rank's view of it."""
    fakes = FakeTensorMode()
    generators = dict[int, torch.Generator]()
    data = Tensor.data

    def moved(tensor: FakeTensor, value: Tensor) -> None:
        data.__set__(tensor, value)  # type: ignore[attr-defined]  # a descriptor, which torch types as a tensor
        tensor.fake_device = value.device

    def generator(device: torch.device) -> torch.Generator:
        made = torch.Generator()
        if device.type == "cuda":
            generators[made._cdata] = made
        return made

    stands_in = {
        "synchronize": lambda device: None,
        "recorded_event": lambda device: _Event(),
        "generator": generator,
        "kept_generators": lambda device: torch.random.fork_rng([]),
        "default_generator": lambda device: generator(device) if device.type == "cuda" else torch.default_generator,
    }
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # else torch.tensor(..., device="cuda") asks for a driver
    try:
        with (
            _autograd(),
            warnings.catch_warnings(),
            mock.patch.multiple(driver, **stands_in),
            mock.patch.object(FakeTensor, "data", property(data.__get__, moved), create=True),
            mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", return_value=False),
            mock.patch.object(torch.cuda, "_lazy_init"),
            mock.patch.object(torch, "inference_mode", _inference_mode),
            mock.patch.object(torch.cuda, "is_bf16_supported", return_value=True),
        ):
            for message in _NOT_SO_HERE:
                warnings.filterwarnings("ignore", message)
            yield lambda crossings: Card(fakes, generators, crossings)
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)


_NOT_SO_HERE = ("Accessing the data pointer of FakeTensor", "The AccumulateGrad node's stream does not match")
"""Warnings: addresses are compared, and are 0; and only the device of a stream is known."""
_INFERENCE_MODE = torch.inference_mode


@contextmanager
def _inference_mode(mode: bool = True) -> Iterator[None]:
    """As torch's, which also says that backward runs in threads of its own: there are none for the card."""
    with _INFERENCE_MODE(mode), torch.autograd.set_multithreading_enabled(False):
        yield


@contextmanager
def _autograd() -> Iterator[None]:
    """Autograd finds the card among torch's devices, in builds without CUDA too.

    It asks for an accelerator, and for the guard of its streams.  The hooks of CUDA, which builds without it have as
    well, say that it is there; the guard of ``meta`` stands in for that of CUDA, with streams of the card and events
    that are nothing.
    """
    folder = Path(torch.__file__).parent
    core, whole = (ctypes.CDLL(str(folder / "lib" / f"lib{name}.so")) for name in ("c10", "torch_cpu"))
    get_hooks = whole._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    guards = (ctypes.c_void_p * 32).in_dll(core, "_ZN3c104impl26device_guard_impl_registryE")
    headers = folder / "include"
    detail = headers / "ATen" / "detail"
    hooks = [*_virtual(detail / "AcceleratorHooksInterface.h"), *_virtual(detail / "CUDAHooksInterface.h")]
    guard = [*_virtual(headers / "c10" / "core" / "impl" / "DeviceGuardImplInterface.h")]
    with _overridden(get_hooks(), hooks, _HOOKS), _overridden(guards[_META] or 0, guard, _GUARD):
        before = guards[_CUDA]
        guards[_CUDA] = guards[_META]
        try:
            yield
        finally:
            guards[_CUDA] = before


_CUDA = 1
_META = 14
"""c10::DeviceType."""
_HOOKS = {"isBuilt": 1, "isAvailable": 1, "hasCUDA": 1, "hasPrimaryContext": 1}
_GUARD = {"getStream": _CUDA, "record": 0, "block": 0, "destroyEvent": 0}
"""By function of C++, what it gives: of a stream its device, ``cuda:0``; where it gives nothing, nobody looks."""
_ANSWERS = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)
_WORD = ctypes.sizeof(ctypes.c_void_p)
_BEFORE = 2
"""What stands before the first of a table of virtual functions, in words."""


@contextmanager
def _overridden(thing: int, names: Sequence[str], answers: Mapping[str, int]) -> Iterator[None]:
    """Meanwhile some virtual functions of the C++ object at the address ``thing`` give these answers.

    Args:
        names: of all its functions, in the order of their table.
    """
    table = ctypes.c_void_p.from_address(thing)
    size = _BEFORE + len(names)
    before = table.value or 0
    functions = (ctypes.c_void_p * size).from_buffer_copy(ctypes.string_at(before - _BEFORE * _WORD, size * _WORD))
    kept = {name: _ANSWERS(lambda own, answer=answer: answer) for name, answer in answers.items()}
    for name, function in kept.items():
        functions[_BEFORE + names.index(name)] = ctypes.cast(function, ctypes.c_void_p).value
    table.value = ctypes.addressof(functions) + _BEFORE * _WORD
    try:
        yield
    finally:
        table.value = before


def _virtual(header: Path) -> Iterator[str]:
    """The virtual functions that a header of torch's declares, in their order."""
    for name in re.findall(r"virtual\s[^;{=]*?(~?\w+)\s*\(", re.sub(r"//.*", "", header.read_text("utf-8"))):
        yield from (name, "deleting") if name.startswith("~") else (name,)
