"""What an optimiser and its schedule keep, by the names of the model's parameters: saved, and read under another plan.

    optimizer/NAME/exp_avg     a tensor, or the slice or box of it that this rank has
    group/NAME/lr              a number of NAME's group; the numbers of a tuple as group/NAME/betas/0
    object/NAME/attribute/k    a number or text that the optimiser keeps as an attribute, or under a name in its state
    scheduler/NAME/last_epoch  a number of the schedule of NAME's stage; of a list with a number for each group, the one
                               of NAME's group: scheduler/NAME/base_lrs

Another plan has other stages and groups, so groups and schedules are saved with each of their parameters.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from planner.ir.box import Box
from planner.ir.errors import UsageError
from runtime.checkpoint.state import BoxOf, Number, RankState, Slice
from runtime.optim.followed import Followed
from runtime.optim.optimizer import StageOptimizer
from runtime.optim.sharding import STEP
from runtime.optim.user_object import is_plain, named_state, own_attributes

_Path = tuple[str, ...]

_BY_GROUP = frozenset({"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "base_momentums", "max_momentums"})
"""Lists of torch's schedules (2.13) with an element for each group of the optimiser; others are read as they are."""


class StateSource(Protocol):
    """Where saved state is read from; keys as in :class:`RankState`."""

    def tensors(self) -> Collection[str]:
        """The keys of all tensors."""
        ...

    def numbers(self) -> Collection[str]:
        """The keys of all numbers."""
        ...

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a whole tensor."""
        ...

    def read(self, key: str) -> torch.Tensor:
        """A whole tensor."""
        ...

    def read_slice(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop`` of a tensor, laid flat."""
        ...

    def read_box(self, key: str, box: Box) -> torch.Tensor:
        """A box of a tensor."""
        ...

    def number(self, key: str) -> Number:
        """A number."""
        ...


def state_of(stage: StageOptimizer, speaks_for: Collection[str]) -> RankState:
    """The state of a stage's optimiser on this rank; its tensors are the optimiser's own.

    Args:
        speaks_for: names of the parameters that this rank writes, or its part of them, on behalf of all that have the
            same; slices are written by those that have them.

    Raises:
        UsageError: the optimiser keeps something that is neither tensor nor number.
    """
    stage.follow()
    tensors: dict[str, torch.Tensor] = {}
    slices: dict[str, Slice] = {}
    boxes: dict[str, BoxOf] = {}
    numbers: dict[str, Number] = {}
    writes: set[str] = set()
    for name, tensor in stage.tensors.items():
        part, held = stage.slices.get(name), stage.parts.get(name)
        is_written = _speaks(stage, name, speaks_for) if part is None else part.start == 0
        for entry, value in stage.optimizer.state.get(tensor, {}).items():
            key = f"optimizer/{name}/{entry}"
            if isinstance(value, torch.Tensor):
                tensors[key] = value
                if part is not None and value.shape == tensor.shape:
                    slices[key] = (part.start, part.stop, part.shape)
                elif held is not None and entry != STEP and value.shape == tensor.shape:
                    boxes[key] = (held.box, held.shape)
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
            group.update(_filled(_settings(group), (), partial(_read, source, "group", names[:1])))
    optimizer.load_state_dict({"state": {**state, **named_state(optimizer)}, "param_groups": groups})
    for tensor, place in places.items():
        for entry, value in state.get(place, {}).items():
            if isinstance(
                value, torch.Tensor
            ):  # it was moved to the right device, but also cast to the parameter's dtype
                optimizer.state[tensor][entry] = optimizer.state[tensor][entry].to(value.dtype)
    _fill_object(optimizer, source)
    stage.loaded()
    if stage.scheduler is not None and any(stage.group_names):
        fresh = stage.scheduler.state_dict()  # says what there is to read
        saved = partial(_read, source, "scheduler", [names[0] if names else "" for names in stage.group_names])
        stage.scheduler.load_state_dict(_filled(fresh, (), saved))


def give_back(followed: Followed, source: StateSource) -> None:
    """The user's object gets what :func:`state_of` gave of all optimisers that followed it, and their groups' settings.

    What it kept for parameters that no stage trains stays.
    """
    entries = _entries(source)
    tensors, numbers = source.tensors(), source.numbers()
    trained = {key.removeprefix("group/").split("/")[0] for key in numbers if key.startswith("group/")}
    name_of = {id(parameter): name for name, parameter in followed.names.items() if name in trained}
    for group in followed.optimizer.param_groups:
        name = next((name_of[id(each)] for each in group["params"] if id(each) in name_of), "")
        if name:
            group.update(_filled(_settings(group), (), partial(_read, source, "group", [name])))
    _fill_object(followed.optimizer, source)
    followed.write(
        {
            name: {
                entry: source.read(key) if (key := f"optimizer/{name}/{entry}") in tensors else source.number(key)
                for entry in kept
            }
            for name, kept in entries.items()
        }
    )


def _speaks(stage: StageOptimizer, name: str, speaks_for: Collection[str]) -> bool:
    """Whether this rank writes what there is once of a parameter, however many ranks have a part of it."""
    held = stage.parts.get(name)
    return name in speaks_for and (held is None or held.speaks)  # of a tied one a single stage speaks


def _entries(source: StateSource) -> dict[str, list[str]]:
    """What is kept for each parameter."""
    entries: dict[str, list[str]] = {}
    for key in (*source.tensors(), *source.numbers()):
        if key.startswith("optimizer/"):
            name, _, entry = key.removeprefix("optimizer/").rpartition("/")
            entries.setdefault(name, []).append(entry)
    return entries


def _entry(stage: StageOptimizer, name: str, entry: str, source: StateSource) -> Any:
    key, part = f"optimizer/{name}/{entry}", stage.slices.get(name)
    if key in source.numbers():
        return source.number(key)
    if part is not None and entry != STEP and tuple(source.shape(key)) == part.shape:
        return source.read_slice(key, part.start, part.stop)
    held = stage.parts.get(name)
    if held is not None and entry != STEP and key in source.tensors() and tuple(source.shape(key)) == held.shape:
        return source.read_box(key, held.box)
    return source.read(key)


def _numbers(stage: StageOptimizer) -> Iterator[tuple[str, str, Number]]:
    """(name, key, number) of all that is kept: of groups and schedules for each parameter, of the object for one."""
    schedule = {} if stage.scheduler is None else stage.scheduler.state_dict()
    groups = stage.optimizer.param_groups
    for index, (group, names) in enumerate(zip(groups, stage.group_names, strict=True)):
        kept = [("group", *each) for each in _leaves(_settings(group), (), index)]
        kept += [("scheduler", *each) for each in _leaves(schedule, (), index)]
        for name in names:
            yield from ((name, "/".join((head, name, *path)), number) for head, path, number in kept)
    for name in [name for names in stage.group_names for name in names][:1]:
        yield from ((name, f"object/{name}/{key}", each) for key, each in _of_object(stage.optimizer).items())


def _of_object(optimizer: torch.optim.Optimizer) -> dict[str, Number]:
    """What it keeps beside groups and the state of parameters: numbers, and anything else as text."""
    attributes = {f"attribute/{key}": value for key, value in own_attributes(optimizer).items() if is_plain(value)}
    named = {f"state/{key}": value for key, value in named_state(optimizer).items() if _is_leaf(value)}
    return {key: _written(value) for key, value in {**attributes, **named}.items()}


def _written(value: Any) -> Number:
    if isinstance(value, torch.Tensor):
        return value.item()
    return value if isinstance(value, int | float | None) else repr(value)


def _fill_object(optimizer: torch.optim.Optimizer, source: StateSource) -> None:
    """Puts back what the object kept, which a parameter of each stage was saved with."""
    attributes, named = vars(optimizer), {str(key): key for key in named_state(optimizer)}
    of_object = _of_object(optimizer)
    for key in (key for key in source.numbers() if key.startswith("object/")):
        _, _, kind, entry = key.split("/", 3)
        number = source.number(key)
        if f"{kind}/{entry}" not in of_object:
            continue
        if kind == "attribute":
            attributes[entry] = ast.literal_eval(number) if isinstance(number, str) else number
        else:
            optimizer.state[named[entry]] = _like(optimizer.state[named[entry]], number)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What training depends on: numbers and tuples of them; switches such as ``foreach`` are the factory's to say."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names") and _is_setting(value)}


def _is_setting(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_setting, value))
    return _is_leaf(value) and value is not None and not isinstance(value, bool | str)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _leaves(value: Any, path: _Path, group: int) -> Iterator[tuple[_Path, Number]]:
    """The numbers in ``value``; of a list with one for each group, that of ``group``."""
    if path and path[-1] in _BY_GROUP and isinstance(value, list):
        value = value[group]
    if _is_leaf(value):
        yield path, value.item() if isinstance(value, torch.Tensor) else value
    elif isinstance(value, Mapping | list | tuple):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _leaves(each, (*path, str(key)), group)


def _filled(fresh: Any, path: _Path, read: Callable[[_Path, int | None], Number]) -> Any:
    """``fresh`` with every number read anew; ``read`` gets the group, where there is a number for each."""
    if _is_leaf(fresh):
        return _like(fresh, read(path, None))
    if path and path[-1] in _BY_GROUP and isinstance(fresh, list):
        return [_like(each, read(path, group)) if _is_leaf(each) else each for group, each in enumerate(fresh)]
    if isinstance(fresh, Mapping):
        filled: Any = copy.copy(fresh)
        for key, each in fresh.items():
            filled[key] = _filled(each, (*path, str(key)), read)
        return filled
    if isinstance(fresh, list | tuple):
        return type(fresh)(_filled(each, (*path, str(key)), read) for key, each in enumerate(fresh))
    return fresh


def _like(fresh: Any, number: Number) -> Any:
    if not isinstance(fresh, torch.Tensor):
        if isinstance(fresh, int | float) and isinstance(number, str):
            raise UsageError(
                f"the saved state of the optimiser has {number!r} where this optimiser keeps a number",
                ["it was saved by an optimiser with other options, or the manifest was edited"],
                ["give the options that it was saved with"],
            )
        return number
    if not isinstance(number, int | float):
        raise UsageError(
            f"the saved state of the optimiser has {number!r} where this optimiser keeps a tensor of numbers",
            ["it was saved by an optimiser with other options"],
            ["give the options that it was saved with"],
        )
    return torch.full_like(fresh, number)


def _read(source: StateSource, head: str, names: Sequence[str], path: _Path, group: int | None) -> Number:
    """``names``: a parameter of each group; a group without any, which trains nothing, takes another's number."""
    name = (names[group] if group is not None else "") or next(filter(None, names))
    return source.number("/".join((head, name, *path)))
