"""Factories of data as user code has them: how one is called, and what it gives, checked: batches and micro-batches.

``--data`` names a factory, ``pkg.mod:factory`` or ``path/file.py:factory``, with up to three parameters: global_batch,
input_shape and seed, by these names or in this order (:func:`call_of`).

A batch is made up as the model's example is (:mod:`profiler.source.structure`): ``(inputs, targets)``, or the inputs
alone where the module computes its own loss, such as a dict of a collator, keys in any order; floats are cast to the
model's dtype.  It may also be a list of micro-batches, each a batch of its own size and shape.

Of a sparse network the inputs are coordinates int32 (samples, points, 3), features (samples, points, channels) and
counts (samples,), the points of each cloud that are there; targets are one a sample, or (samples, points).  Every rank
makes the maps that its stages read of whole clouds, and so reads all of them, whoever ``--data-from`` names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from planner.ir.errors import FactoryError, HalopipeError, OutOfMemoryError
from profiler.source.model import Casts, cast_tensors
from profiler.source.parts import where
from profiler.source.structure import BatchStructure
from runtime.memory import out_of_memory
from runtime.numerics.single_device import StepTensors

Pair = tuple[StepTensors, StepTensors]
"""Inputs and targets, samples first."""

SIGNATURE = "a factory takes up to three parameters: global_batch, input_shape, seed, by name or in this order"

BatchItem = Pair | list[Pair]
"""A global batch whole, or its micro-batches one by one."""


def failure_of(name: str, error: Exception, places: Sequence[str] = (), remedies: Sequence[str] = ()) -> HalopipeError:
    """What user code of that name raised, as an error of ours; a lack of memory is no mistake of that code.

    Args:
        places: where it came from, in words.
        remedies: against its mistakes.
    """
    if lack := out_of_memory(error):
        return OutOfMemoryError(f"{name} ran out of memory", [*lack.details, *places])
    return FactoryError(f"{name} raised {type(error).__name__}", [str(error), *places], remedies)


@dataclass(frozen=True, slots=True)
class BatchPytree:
    """Checks what user code gives.

    Attributes:
        name: of the factory.
        casts: dtypes that go with the module's where that was cast; others stay as they are.
        batch: how a batch is made up.
        call: of the factory, with what it was given.
    """

    name: str
    casts: Casts
    batch: BatchStructure
    call: str = ""

    def item(self, raw: Any) -> BatchItem:
        """A batch, or a list of micro-batches, each a batch by itself.

        Raises:
            FactoryError: it is neither.
        """
        return [self.pair(each) for each in raw] if self.is_several(raw) else self.pair(raw)

    def is_several(self, raw: Any) -> bool:
        """Whether it is a list of micro-batches."""
        if not isinstance(raw, list) or not raw or not all(isinstance(each, (tuple, Mapping)) for each in raw):
            return False
        is_pair = len(raw) == 2 and isinstance(raw[0], Mapping) and self.batch.has_targets
        return not is_pair

    def pair(self, raw: Any) -> Pair:
        """The tensors of inputs and targets."""
        inputs, targets = self.batch.apart(raw, self.name)
        return cast_tensors(inputs, self.casts), cast_tensors(targets, self.casts)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Says of errors of user code where they come from; a lack of memory is no mistake of that code.

        Raises:
            OutOfMemoryError: it asked for more memory than there is; a job may be started again for that.
            FactoryError: it raised something else.
        """
        try:
            yield
        except HalopipeError:
            raise
        except Exception as error:
            places = [where(error), *([f"called as {self.call}"] if self.call else [])]
            raise failure_of(self.name, error, places, ["mend it there", SIGNATURE]) from error


@dataclass(frozen=True, slots=True)
class FactoryCall:
    """A factory with what it is given.

    Attributes:
        text: as in ``data.py:photos(global_batch=32, seed=0)``.
    """

    make: Callable[[], Any]
    text: str


_SAME = {"batch_size": "global_batch", "shape": "input_shape"}
"""Other names that people give a factory's parameters."""


def call_of(name: str, factory: Callable[..., Any], offers: Mapping[str, Any]) -> FactoryCall:
    """The factory called ``name`` with those of ``offers`` that it takes.

    A parameter of such a name gets that; others without a default get what is left of ``offers``, in its order.

    Raises:
        FactoryError: it wants more.
    """
    try:
        parameters = tuple(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):  # of a builtin, which does not say
        parameters = (inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),)
    offer_of = {each.name: _SAME.get(each.name, each.name) for each in parameters}
    left = [word for word in offers if word not in offer_of.values()]
    chosen: dict[str, Any] = {}
    args: list[Any] = []
    named: dict[str, Any] = {}
    for each in parameters:
        if each.kind is each.VAR_POSITIONAL and len(args) == len(chosen):
            chosen.update((word, offers[word]) for word in left)
            args += (offers[word] for word in left)
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            continue
        if offer_of[each.name] in offers:
            value = offers[offer_of[each.name]]
        elif each.default is not each.empty:
            continue
        elif left and each.kind is not each.KEYWORD_ONLY:
            value = offers[left.pop(0)]
        else:
            raise FactoryError(
                f"{name} wants {each.name!r}, which nobody gives it",
                [f"it is {name.rpartition(':')[2]}{inspect.signature(factory)}"],
                [f"{SIGNATURE}; give others a default"],
            )
        chosen[each.name] = value
        is_next = each.kind is not each.KEYWORD_ONLY and list(offer_of).index(each.name) == len(args)
        args.append(value) if is_next else named.update({each.name: value})
    text = ", ".join(f"{key}={value}" for key, value in chosen.items())
    return FactoryCall(lambda: factory(*args, **named), f"{name}({text})")
