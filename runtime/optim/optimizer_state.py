"""What an optimiser and its schedule keep, by the names of the model's parameters: saved, and read under another plan.

    optimizer/NAME/exp_avg     a tensor, or the slice or box of it that this rank has
    group/NAME/lr              a number of NAME's group; the numbers of a tuple as group/NAME/betas/0
    scheduler/NAME/last_epoch  a number of the schedule of NAME's optimiser; of a list with a number for each group, the
                               one of NAME's group: scheduler/NAME/base_lrs; of several scheduler/NAME/1/last_epoch
    object/NAME/attribute/k    a number or text that the optimiser keeps as an attribute, or under a name in its state

Another plan has other stages and groups, so groups and schedules are saved with each of their parameters.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from planner.ir.box import Box
from planner.ir.errors import UsageError
from runtime.checkpoint.state import BoxOf, Number, RankState, Slice
from runtime.optim.followed import Followed
from runtime.optim.optimizer import StageOptimizer
from runtime.optim.schedules import ScheduleNumbers, filled, is_leaf, leaves, number_like
from runtime.optim.sharding import STEP
from runtime.optim.user_object import is_plain, named_state, own_attributes


class StateSource(Protocol):
    """Where saved state is read from; keys as in :class:`RankState`."""

    def tensors(self) -> Collection[str]:
        """The keys of all tensors."""

    def numbers(self) -> Collection[str]:
        """The keys of all numbers."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a whole tensor."""

    def read(self, key: str) -> Tensor:
        """A whole tensor."""

    def read_slice(self, key: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a tensor, laid flat."""

    def read_box(self, key: str, box: Box) -> Tensor:
        """A box of a tensor."""

    def number(self, key: str) -> Number:
        """A number."""


def state_of(stage: StageOptimizer, speaks_for: Collection[str]) -> RankState:
    """The state of a stage's optimiser on this rank; its tensors are the optimiser's own.

    Args:
        speaks_for: names of the parameters that this rank writes, or its part of them, on behalf of all that have the
            same; slices are written by those that have them.

    Raises:
        UsageError: the optimiser keeps something that is neither tensor nor number.
    """
    stage.follow()
    tensors: dict[str, Tensor] = {}
    slices: dict[str, Slice] = {}
    boxes: dict[str, BoxOf] = {}
    numbers: dict[str, Number] = {}
    writes: set[str] = set()
    for name, tensor in stage.tensors.items():
        sliced = stage.slices.get(name)
        part = stage.parts.get(name)
        is_written = _speaks(stage, name, speaks_for) if sliced is None else sliced.start == 0
        for entry, value in stage.optimizer.state.get(tensor, {}).items():
            key = f"optimizer/{name}/{entry}"
            if isinstance(value, Tensor):
                tensors[key] = value
                if sliced is not None and value.shape == tensor.shape:
                    slices[key] = (sliced.start, sliced.stop, sliced.shape)
                elif part is not None and entry != STEP and value.shape == tensor.shape:
                    boxes[key] = (part.box, part.shape)
            elif isinstance(value, Number):
                numbers[key] = value
            else:
                kind = type(value).__name__
                raise UsageError(
                    f"{type(stage.optimizer).__name__} keeps a {kind} ({entry}) for {name}, which cannot be saved",
                    remedies=["an optimiser that keeps tensors and numbers"],
                )
            if key in slices or (name in speaks_for if key in boxes else is_written):
                writes.add(key)
    for name, key, number in _numbers(stage):
        numbers[key] = number
        if _speaks(stage, name, speaks_for):
            writes.add(key)
    return RankState(tensors, slices, numbers, frozenset(writes), boxes)


def load_state(stage: StageOptimizer, source: StateSource) -> None:
    """Puts back what :func:`state_of` gave, on whatever ranks and in whatever stages the parameters were then.

    What was saved of a group wins over what the factory says; parameters without saved state start without.
    """
    optimizer = stage.optimizer
    steps = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    places = {tensor: place for place, tensor in enumerate(steps)}  # as Optimizer.state_dict numbers them
    entries = _entries(source)
    state = {
        places[tensor]: {entry: _entry(stage, name, entry, source) for entry in entries[name]}
        for name, tensor in stage.tensors.items()
        if name in entries
    }
    groups = optimizer.state_dict()["param_groups"]
    for group, names in zip(groups, stage.group_names, strict=True):
        if names:
            group.update(_saved_settings(group, names[0], source))
    optimizer.load_state_dict({"state": {**state, **named_state(optimizer)}, "param_groups": groups})
    for tensor, place in places.items():
        for entry, value in state.get(place, {}).items():
            if isinstance(value, Tensor):  # it was moved to the right device, but also cast to the parameter's dtype
                optimizer.state[tensor][entry] = optimizer.state[tensor][entry].to(value.dtype)
    _fill_object(optimizer, source)
    stage.loaded()
    is_own = stage.followed is None  # else see :func:`load_followed`
    if is_own and stage.schedules is not None and any(stage.group_names):
        stage.schedules.load(_schedule_numbers(source, [next(iter(names), "") for names in stage.group_names]))


def load_followed(followed: Followed, source: StateSource) -> None:
    """What is followed gets the settings of all its groups, and its schedules go on, whatever this rank trains of it.

    Call when all optimisers that follow it were loaded.
    """
    names = _load_settings(followed, source)
    if followed.schedules is not None and any(names):
        followed.schedules.load(_schedule_numbers(source, names))


def give_back(followed: Followed, source: StateSource) -> None:
    """The user's object gets what :func:`state_of` gave of all optimisers that followed it, and their groups' settings.

    What it kept for parameters that no stage trains stays.
    """
    entries = _entries(source)
    tensors = source.tensors()
    _load_settings(followed, source)
    followed.write(
        {
            name: {
                entry: source.read(key) if (key := f"optimizer/{name}/{entry}") in tensors else source.number(key)
                for entry in kept
            }
            for name, kept in entries.items()
        }
    )


def _load_settings(followed: Followed, source: StateSource) -> list[str]:
    """Those of the user's object; returns the name of a parameter of each group, empty where none of it is trained."""
    trained = {key.removeprefix("group/").split("/")[0] for key in source.numbers() if key.startswith("group/")}
    name_of = {id(parameter): name for name, parameter in followed.names.items() if name in trained}
    groups = followed.optimizer.param_groups
    names = [next((name_of[id(each)] for each in group["params"] if id(each) in name_of), "") for group in groups]
    for group, name in zip(groups, names, strict=True):
        if name:
            group.update(_saved_settings(group, name, source))
    _fill_object(followed.optimizer, source)
    return names


def _saved_settings(group: Mapping[str, Any], name: str, source: StateSource) -> dict[str, Any]:
    """The settings of a group that ``name`` is in, as they were saved."""
    return cast("dict[str, Any]", filled(_settings(group), (), partial(_read, source, "group", name)))


def _schedule_numbers(source: StateSource, names: Sequence[str]) -> ScheduleNumbers:
    """What schedules kept, by a parameter of each group; a group without any, which trains nothing, takes another's."""
    some = next(filter(None, names))
    heads = [f"scheduler/{name or some}/" for name in names]
    return [
        {key.removeprefix(head): source.number(key) for key in source.numbers() if key.startswith(head)}
        for head in heads
    ]


def _speaks(stage: StageOptimizer, name: str, speaks_for: Collection[str]) -> bool:
    """Whether this rank writes what there is once of a parameter, however many ranks have a part of it."""
    part = stage.parts.get(name)
    return name in speaks_for and (part is None or part.speaks)  # of a tied one a single stage speaks


def _entries(source: StateSource) -> dict[str, list[str]]:
    """What is kept for each parameter."""
    entries: dict[str, list[str]] = {}
    for key in (*source.tensors(), *source.numbers()):
        if key.startswith("optimizer/"):
            name, _, entry = key.removeprefix("optimizer/").rpartition("/")
            entries.setdefault(name, []).append(entry)
    return entries


def _entry(stage: StageOptimizer, name: str, entry: str, source: StateSource) -> Any:
    key = f"optimizer/{name}/{entry}"
    sliced = stage.slices.get(name)
    if key in source.numbers():
        return source.number(key)
    if sliced is not None and entry != STEP and tuple(source.shape(key)) == sliced.shape:
        return source.read_slice(key, sliced.start, sliced.stop)
    part = stage.parts.get(name)
    if part is not None and entry != STEP and key in source.tensors() and tuple(source.shape(key)) == part.shape:
        return source.read_box(key, part.box)
    return source.read(key)


def _numbers(stage: StageOptimizer) -> Iterator[tuple[str, str, Number]]:
    """(name, key, number) of all that is kept: of groups and schedules for each parameter, of the object for one."""
    groups = stage.optimizer.param_groups
    none: ScheduleNumbers = [{}] * len(groups)
    schedules = none if stage.schedules is None else stage.schedules.numbers() or none
    for group, numbers, names in zip(groups, schedules, stage.group_names, strict=True):
        kept = [("group", *each) for each in leaves(_settings(group), (), 0)]
        kept += [("scheduler", *each) for each in numbers.items()]
        for name in names:
            yield from ((name, "/".join((head, name, place)), number) for head, place, number in kept)
    for name in [name for names in stage.group_names for name in names][:1]:
        yield from ((name, f"object/{name}/{key}", each) for key, each in _of_object(stage.optimizer).items())


def _of_object(optimizer: torch.optim.Optimizer) -> dict[str, Number]:
    """What it keeps beside groups and the state of parameters: numbers, and anything else as text."""
    attributes = {f"attribute/{key}": value for key, value in own_attributes(optimizer).items() if is_plain(value)}
    named = {f"state/{key}": value for key, value in named_state(optimizer).items() if is_leaf(value)}
    return {key: _written(value) for key, value in {**attributes, **named}.items()}


def _written(value: Any) -> Number:
    if isinstance(value, Tensor):
        return value.item()
    return value if isinstance(value, int | float | None) else repr(value)


def _fill_object(optimizer: torch.optim.Optimizer, source: StateSource) -> None:
    """Puts back what the object kept, which a parameter of each stage was saved with."""
    attributes = vars(optimizer)
    named = {str(key): key for key in named_state(optimizer)}
    of_object = _of_object(optimizer)
    for key in (key for key in source.numbers() if key.startswith("object/")):
        _, _, kind, entry = key.split("/", 3)
        number = source.number(key)
        if f"{kind}/{entry}" not in of_object:
            continue
        if kind == "attribute":
            attributes[entry] = ast.literal_eval(number) if isinstance(number, str) else number
        else:
            optimizer.state[named[entry]] = number_like(optimizer.state[named[entry]], number)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What training depends on: numbers and tuples of them; switches such as ``foreach`` are the factory's to say."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names") and _is_setting(value)}


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_setting, value))
    return is_leaf(value) and value is not None and not isinstance(value, bool | str)


def _read(source: StateSource, head: str, name: str, place: str, _: int | None) -> Number:
    return source.number("/".join((head, name, place)))
