"""A batch as its user has it, and the tuple of tensors that a step is fed: the one place that makes one of the other.

    {"input_ids": a, "mask": None, "sizes": [b, c]}    <->    a, b, c

Mappings (dict, BatchEncoding, ModelOutput), tuples, named tuples, lists, dataclasses and what is registered with
``torch.utils.pytree`` may hold one another.  Tensors are fed; anything else is a constant, the same in every batch.
"""

from __future__ import annotations

import builtins
import copy
import dataclasses
import enum
import inspect
import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cuda_ops._torch import tree_flatten, tree_unflatten
from planner.ir.errors import FactoryError
from planner.ir.graph import SAMPLE

_PLAIN = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, slice, range, type)
_MOST_SHOWN = 8

POSITIONS = "positions"
KEYWORDS = "keywords"
WHOLE = "whole"
"""How a module is called: ``module(*inputs)``, ``module(**inputs)``, ``module(inputs)``."""


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """In the place of a tensor: which of those that are fed it is."""

    index: int


ValuePath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Nest:
    """A value with tensors inside.

    Attributes:
        template: the value, each tensor of which is a :class:`TensorSlot`.
        paths: of the tensors, keys and positions from the outside in.
    """

    template: Any
    paths: tuple[ValuePath, ...]

    @classmethod
    def of(cls, value: Any, name: str) -> tuple[Nest, tuple[Tensor, ...]]:
        """The nest that ``value`` is, and its tensors.

        Raises:
            FactoryError: it holds something that is neither a tensor nor a constant.
        """
        tensors: list[Tensor] = []
        paths: list[ValuePath] = []

        def emptied(value: Any, path: ValuePath) -> Any:
            if isinstance(value, Tensor):
                tensors.append(value)
                paths.append(path)
                return TensorSlot(len(tensors) - 1)
            opened = _opened(value)
            if opened is None:
                _require_constant(name, value, path)
                return value
            children, rebuilt = opened
            return rebuilt({key: emptied(child, (*path, key)) for key, child in children.items()})

        template = emptied(value, ())
        return cls(template, tuple(paths)), tuple(tensors)

    def filled(self, tensors: Sequence[Tensor]) -> Any:
        """The value that holds ``tensors``; everything but them and the constants is new."""

        def filled(value: Any) -> Any:
            if isinstance(value, TensorSlot):
                return tensors[value.index]
            opened = _opened(value)
            if opened is None:
                return value
            children, rebuilt = opened
            return rebuilt({key: filled(child) for key, child in children.items()})

        return filled(self.template)

    def tensors(self, value: Any) -> tuple[Tensor, ...]:
        """The tensors of another such value, whose mappings may have their keys in another order, and tuples be lists.

        Raises:
            ValueError: it is of another form, or holds other constants; its text says where.
        """
        by_index: dict[int, Tensor] = {}

        def match(wanted: Any, value: Any, path: ValuePath) -> None:
            if isinstance(wanted, TensorSlot):
                if not isinstance(value, Tensor):
                    raise ValueError(f"{_text(path)} is {_kind_text(value)}, a tensor in the example")
                by_index[wanted.index] = value
                return
            opened = _opened(wanted)
            if opened is None:
                if isinstance(value, Tensor) or type(value) is not type(wanted) or value != wanted:
                    raise ValueError(f"{_text(path)} is {_kind_text(value)}, {wanted!r} in the example: a constant")
                return
            children = opened[0]
            others = _children_like(wanted, value, path)
            odd = [key for key in (*others, *children) if (key in others) != (key in children)]
            if odd:
                raise ValueError(f"{_text((*path, odd[0]))} is {'not there' if odd[0] in children else 'not known'}")
            for key, child in children.items():
                match(child, others[key], (*path, key))

        match(self.template, value, ())
        return tuple(by_index[index] for index in range(len(by_index)))


@dataclass(frozen=True, slots=True)
class BatchStructure:
    """What a user's batch is made of, and how the module and its loss are called with it.

    Attributes:
        inputs: what the module is called with.
        targets: what the loss function is given; None: there is none, the batch is ``inputs`` alone.
        passing: ``positions``, ``keywords`` or ``whole``.
    """

    inputs: Nest
    targets: Nest | None
    passing: str

    @classmethod
    def of(
        cls, name: str, module: nn.Module, inputs: Any, targets: Any, *, is_pair: bool
    ) -> tuple[BatchStructure, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The structure of an example, and the tensors of its inputs and targets.

        Args:
            is_pair: whether there are targets.

        Raises:
            FactoryError: it holds something else than tensors and constants, or ``module`` takes other keywords.
        """
        passing = _passing(name, module, inputs)
        if passing == POSITIONS and not isinstance(inputs, tuple):
            inputs = (inputs,)
        nest, fed = Nest.of(inputs, f"{name}: inputs")
        aims, compared = Nest.of(targets, f"{name}: targets") if is_pair else (None, ())
        return cls(nest, aims, passing), fed, compared

    @classmethod
    def plain(cls, num_inputs: int, num_targets: int) -> BatchStructure:
        """Of tuples of tensors."""
        inputs, targets = (
            Nest(tuple(map(TensorSlot, range(n))), tuple((each,) for each in range(n)))
            for n in (num_inputs, num_targets)
        )
        return cls(inputs, targets, POSITIONS)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tensors of inputs and targets, as the graph has them: ``input_ids``, or ``inputs``, ``inputs_2``."""
        by_name: dict[str, None] = {}
        for what, nest in (("inputs", self.inputs), ("targets", self.targets)):
            for index, path in enumerate(nest.paths if nest is not None else ()):
                by_name[_name(what, index, path, by_name)] = None
        return tuple(by_name)

    @property
    def has_targets(self) -> bool:
        """Whether a batch is ``(inputs, targets)``, not inputs alone."""
        return self.targets is not None and self.targets.template != ()

    def output(self, module: nn.Module, tensors: Sequence[Tensor]) -> Any:
        """What ``module`` gives for the inputs that ``tensors`` are."""
        inputs = self.inputs.filled(tensors)
        if self.passing == KEYWORDS:
            return module(**inputs)
        return module(*inputs) if self.passing == POSITIONS else module(inputs)

    def aims(self, tensors: Sequence[Tensor]) -> Any:
        """What the loss function is given beside the output."""
        return () if self.targets is None else self.targets.filled(tensors)

    def apart(self, batch: Any, name: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The tensors of a batch like the example: ``(inputs, targets)``, or inputs alone where there are no targets.

        Args:
            name: of who gives it, for errors.

        Raises:
            FactoryError: it is of another form, or holds other constants.
        """
        if self.has_targets and not (isinstance(batch, (tuple, list)) and len(batch) == _PAIR):
            loops = ["for batch in loader: run.step(batch)", "run.evaluate(*loader)"] if is_loader(batch) else []
            raise FactoryError(
                f"{name} gave no (inputs, targets)",
                [f"it gave {_kind_text(batch)}", f"wanted: {self.text}"],
                [*loops, f"a batch that is made up as the model's example: {self.text}"],
            )
        pair = tuple(batch) if isinstance(batch, (tuple, list)) and len(batch) == _PAIR else None
        try:
            if pair is not None and (self.has_targets or pair[1] is None or _is_empty(pair[1])):
                return self._of_inputs(pair[0]), self._of_targets(pair[1])
            return self._of_inputs(batch), ()
        except ValueError as error:
            fault = str(error)
        raise FactoryError(
            f"{name} gave another batch than the model's example",
            [fault, f"the example: {self.text}"],
            [
                "a batch of the same form: keys in any order, lists for tuples",
                "what is no tensor is the same each time",
            ],
        )

    @property
    def text(self) -> str:
        """``({input_ids, labels})``, ``(tensor, tensor)`` for people."""
        inputs = self.inputs.template
        if self.passing == POSITIONS and len(inputs) == 1:
            inputs = inputs[0]
        return (
            f"({_kind_text(inputs)}, {_kind_text(self.targets.template)})"
            if self.has_targets and self.targets
            else _kind_text(inputs)
        )

    def _of_inputs(self, value: Any) -> tuple[Tensor, ...]:
        return self.inputs.tensors(_like(self.inputs.template, value))

    def _of_targets(self, value: Any) -> tuple[Tensor, ...]:
        return () if self.targets is None else self.targets.tensors(_like(self.targets.template, value))


def require_samples_first(name: str, inputs: Any, targets: Any) -> None:
    """Raises :class:`FactoryError` where samples are the items of a list, and not the rows of a tensor.

    Args:
        name: of who gives the example, for errors.
    """
    rows = {len(leaf) for leaf in leaves(targets) if isinstance(leaf, Tensor) and leaf.ndim}
    first = next((leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim), None)
    samples = len(first) if first is not None else 0
    is_list = isinstance(targets, (list, tuple)) and len(targets) == samples and not rows
    if is_list and all(isinstance(each, (int, float)) for each in targets):
        raise FactoryError(
            f"{name}: targets are {samples} numbers in a {type(targets).__name__}, one a sample",
            ["what is no tensor is a constant, the same in every batch"],
            ["torch.tensor(targets)"],
        )
    counts = {len(targets)} if isinstance(targets, (list, tuple)) else rows
    holders = inputs.values() if isinstance(inputs, Mapping) else inputs if isinstance(inputs, tuple) else (inputs,)
    for each in holders:
        is_samples = isinstance(each, list) and len(each) in counts and samples not in rows | {len(each)}
        if is_samples and all(isinstance(item, Tensor) for item in each):
            raise FactoryError(
                f"{name}: inputs hold a list of {len(each)} tensors, one a sample",
                [f"their shapes: {', '.join(map(str, dict.fromkeys(tuple(item.shape) for item in each)))}"],
                ["torch.stack(inputs), all samples in one tensor", "of unlike sizes: padded to one, F.pad, and a mask"],
            )


def is_loader(value: Any) -> bool:
    """Whether it holds batches, as a DataLoader, a Dataset or an iterator does, rather than being one."""
    return not _opened_or_leaf(value) and (hasattr(value, "__iter__") or hasattr(value, "__getitem__"))


def _opened_or_leaf(value: Any) -> bool:
    return isinstance(value, (Tensor, *_PLAIN)) or hasattr(value, "__array__") or _opened(value) is not None


def _is_empty(targets: Any) -> bool:
    return isinstance(targets, (tuple, list)) and not targets


_PAIR = 2


def leaves(value: Any) -> Iterator[Any]:
    """What ``value`` holds that holds nothing itself: tensors and constants."""
    opened = _opened(value)
    if opened is None:
        yield value
    else:
        for child in opened[0].values():
            yield from leaves(child)


def named_tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module's output by the keys that lead to them: ``logits``, ``features.0``; ``output`` alone."""
    if isinstance(value, Tensor):
        yield name or "output", value
    elif (opened := _opened(value)) is not None:
        for key, child in opened[0].items():
            yield from named_tensors(child, f"{name}.{key}" if name else str(key))


def is_part(tensor: Tensor) -> bool:
    """Whether its memory holds more than its own elements, as that of a slice of a data set does."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes


def alone(value: Any) -> Any:
    """``value`` with such tensors in memory of their own, so that a file of it holds nothing else."""
    if isinstance(value, Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad) if is_part(value) else value
    opened = _opened(value)
    if opened is None:
        return value
    children, rebuilt = opened
    return rebuilt({key: alone(child) for key, child in children.items()})


def _opened(value: Any) -> tuple[Mapping[str | int, Any], Callable[[Mapping[str | int, Any]], Any]] | None:
    """What ``value`` holds by key, and the function that makes the like of it; None of a leaf."""
    kind = type(value)
    if isinstance(value, (Tensor, TensorSlot, *_PLAIN)):
        return None
    if isinstance(value, Mapping):
        return value, lambda children: _mapping(value, children)
    if isinstance(value, (tuple, list)):
        is_named = hasattr(value, "_fields")
        make = (lambda children: kind(*children.values())) if is_named else lambda children: kind(children.values())
        return dict(enumerate(value)), make
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names}, lambda children: _dataclass(value, children)
    leaves, structure = tree_flatten(value, is_leaf=lambda each: each is not value)
    if len(leaves) == 1 and leaves[0] is value:
        return None
    return dict(enumerate(leaves)), lambda children: tree_unflatten(list(children.values()), structure)


def _mapping(value: Mapping[Any, Any], children: Mapping[str | int, Any]) -> Any:
    if type(value) is dict:
        return dict(children)
    copied: Any = copy.copy(value)  # whatever else it holds: BatchEncoding, defaultdict
    for key, child in children.items():
        copied[key] = child
    return copied


def _dataclass(value: Any, children: Mapping[str | int, Any]) -> Any:
    copied = copy.copy(value)
    for name, child in children.items():
        object.__setattr__(copied, str(name), child)
    return copied


def _children_like(wanted: Any, value: Any, path: ValuePath) -> Mapping[str | int, Any]:
    """What ``value`` holds, which must be of the kind of ``wanted``."""
    opened = None if isinstance(value, Tensor) else _opened(value)
    is_mapping = isinstance(wanted, Mapping)
    is_sequence = isinstance(wanted, (tuple, list))
    if opened is not None and (
        (is_mapping and isinstance(value, Mapping))
        or (is_sequence and isinstance(value, (tuple, list)))
        or type(value) is type(wanted)
    ):
        return opened[0]
    raise ValueError(f"{_text(path)} is {_kind_text(value)}, {_kind_text(wanted)} in the example")


def _like(template: Any, value: Any) -> Any:
    """A tensor alone for a tuple of one and the other way round, and no targets as None."""
    is_sequence = isinstance(value, (tuple, list))
    if isinstance(template, tuple):
        if len(template) == 1 and not is_sequence:
            return (value,)
        return () if value is None and not template else value
    return value[0] if is_sequence and len(value) == 1 and isinstance(template, TensorSlot) else value


def _passing(name: str, module: nn.Module, inputs: Any) -> str:
    """A mapping is keywords where ``forward`` takes its keys, else the one thing that it takes."""
    if not isinstance(inputs, Mapping):
        return POSITIONS
    if not all(isinstance(key, str) for key in inputs):
        return WHOLE
    try:
        signature = inspect.signature(module.forward)
    except (TypeError, ValueError):
        return KEYWORDS
    parameters = signature.parameters.values()
    keywords = {each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}
    if keywords & inputs.keys() or any(each.kind is each.VAR_KEYWORD for each in parameters):
        try:
            signature.bind(**inputs)
        except TypeError as error:
            raise FactoryError(
                f"{name}: forward cannot be called with the keys of the example",
                [str(error), f"keys: {', '.join(inputs)}", f"forward{signature}"],
                ["leave out of the batch what forward does not take: {key: batch[key] for key in ...}"],
            ) from None
        return KEYWORDS
    return WHOLE


def _require_constant(name: str, value: Any, path: ValuePath) -> None:
    if isinstance(value, _PLAIN):
        return
    arrays = ["torch.as_tensor makes a tensor of it"] if hasattr(value, "__array__") else []
    raise FactoryError(
        f"{name} hold a {type(value).__name__}, which is neither a tensor nor a constant",
        [f"at {_text(path)}"],
        [
            *arrays,
            *(["next(iter(loader)), one batch of it"] if is_loader(value) else []),
            "tensors, numbers, text and None, in tuples, lists, dicts and dataclasses",
        ],
    )


def _name(what: str, index: int, path: ValuePath, used: Mapping[str, None]) -> str:
    if not any(isinstance(key, str) for key in path):
        return what if index == 0 else f"{what}_{index + 1}"
    first = next(index for index, key in enumerate(path) if isinstance(key, str))
    base = _word(path[first:])
    if not base.isidentifier() or keyword.iskeyword(base) or hasattr(builtins, base) or base in (*_RESERVED, *used):
        base = f"{what}_{_word(path)}"
    while base in used:
        base += "_"
    return base


def _word(path: ValuePath) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in "_".join(map(str, path))).strip("_")


_RESERVED = frozenset(["loss", "num_samples", "self", SAMPLE])


def _text(path: ValuePath) -> str:
    return "batch" + "".join(f"[{key!r}]" for key in path)


def _kind_text(value: Any) -> str:
    """A value's form, for people."""
    if isinstance(value, (Tensor, TensorSlot)):
        return "tensor"
    if isinstance(value, Mapping):
        return f"{{{', '.join(map(str, list(value)[:_MOST_SHOWN]))}}}"
    if isinstance(value, (tuple, list)):
        marks = "()" if isinstance(value, tuple) else "[]"
        shown = [_kind_text(each) for each in value[:_MOST_SHOWN]]
        return f"{marks[0]}{', '.join(shown)}{', ...' if len(value) > _MOST_SHOWN else ''}{marks[1]}"
    return repr(value)[:60] if isinstance(value, _PLAIN) else f"a {type(value).__name__}"
