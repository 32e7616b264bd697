"""Models captured once for all tests of a process: ``torch.export`` takes longer than what most tests do with it.

A model is known again by what it holds: classes, attributes and the values of its tensors, and those of its example and
its loss.  Who asks for it again gets a graph of its own, whose parameters and buffers are those of its own module, as
:func:`profiler.capture.graph.capture` gives it.  What cannot be told by what it holds (functions that a test makes) is
captured anew.  That captures are the same every time, and leave the model as it was, is tested beside ``capture``.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import pickle
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from profiler.capture import graph
from profiler.capture.graph import capture as capture_anew
from profiler.capture.kinds import NO_RULES, Rules
from profiler.source.model import LoadedModel
from runtime.captured import CapturedModule


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Meanwhile ranks of this process, and runs on one device, get copies of one capture."""
    with mock.patch.object(graph, "capture", capture):  # which ``capture_for`` calls
        yield


Key = tuple[object, ...]
_known: dict[Key, tuple[list[object], CapturedModule]] = {}


def capture(model: LoadedModel, rules: Rules = NO_RULES) -> CapturedModule:
    """As :func:`profiler.capture.graph.capture`, of a model that was captured before a copy of what that gave."""
    key = _key(model) if rules is NO_RULES else None
    if key is None:
        return capture_anew(model, rules)
    if key not in _known:
        found = capture_anew(model)
        twin, kept = copy.deepcopy((model, found), {id(found.graph): found.graph})  # what is given may be trained
        _known[key] = list(_parts(twin)), kept
        return found
    parts, found = _known[key]
    same = {id(old): new for old, new in zip(parts, _parts(model), strict=True)}
    return copy.deepcopy(found, {**same, id(found.graph): found.graph})


def _modules(model: LoadedModel) -> list[nn.Module]:
    loss = getattr(model.loss_fn, "function", model.loss_fn)
    return [*model.module.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]


def _parts(model: LoadedModel) -> Iterator[object]:
    """Modules and all that they hold themselves, in an order of their own."""
    for module in _modules(model):
        yield module
        for tensors in (module._parameters, module._buffers, module.__dict__):
            yield from (each for each in tensors.values() if isinstance(each, Tensor))


def _key(model: LoadedModel) -> Key | None:
    """What ``model`` is; None where that cannot be told."""
    written = io.BytesIO()
    try:
        _Digest(written).dump(model)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError, RecursionError):
        return None
    classes = tuple((type(module), type(module).forward) for module in _modules(model))  # a name may be given again
    loss = getattr(model.loss_fn, "function", model.loss_fn)
    function = None if isinstance(loss, nn.Module) else loss
    return hashlib.sha256(written.getvalue()).digest(), classes, function, torch.get_default_dtype()


class _Digest(pickle.Pickler):
    """Writes a tensor as a digest of its values, and as the same one where it is met again."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.fast = True  # names of objects within the stream would depend on which of them are one
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> tuple[object, ...] | None:
        if not isinstance(value, Tensor):
            return None
        if type(value) not in (Tensor, nn.Parameter) or value.device.type != "cpu" or value.layout != torch.strided:
            raise pickle.PicklingError("its values are not told by its bytes")
        number = self._numbers.setdefault(id(value), len(self._numbers))
        values = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = type(value).__name__, str(value.dtype), tuple(value.shape), value.stride(), value.requires_grad
        return number, kind, hashlib.sha256(values).digest()
