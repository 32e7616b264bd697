"""Whether an optimiser makes one parameter's update of others, of which other stages' optimisers know nothing.

One of the user's own is tried on copies with small parameters, a few of each group:

    with      a watched parameter together with others
    louder    the same, where the others' gradients are a thousand times as large, and other ones
    alone     the same, where the others have left their groups

The updates of what is watched must be the same.  Gradients go from tiny to huge, so that a threshold lies between two
of them; then all that counts steps is set ahead, past warm-ups.  Optimisers of torch look at each parameter by itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from planner.ir.errors import UsageError
from runtime.optim.user_object import Twin, copied, named_state, own_attributes, settings_of

_SCALES = tuple(10.0**power for power in range(-9, 13, 3))
"""Of gradients, rising."""

_LOUDER = 1e3
"""As much as two scales are apart: a threshold of the norm of all lies between the two."""

_STEPS = 2
"""At each scale."""

_FIRST_STEPS = 3
"""In which counters show."""

_COUNTS = (0.0, 1e2, 1e3, 1e4, 1e5, 1e6)
"""What is added to whatever counts steps."""

_LR = 0.01
"""In place of the learning rate: a warm-up may begin with 0."""

_MOST_GROUPS = 6
_Trajectories = dict[int, list[Tensor]]
"""A parameter after each step, by its number."""

_SEVERAL = "the plan has several stages, each with an optimiser that has the stage's own parameters alone"
_ONE_STAGE = "a plan of one stage: halopipe plan --solver data-parallel, or --solver one-device"


def require_apart(optimizer: torch.optim.Optimizer, device: torch.device, *, is_alone: bool = False) -> None:
    """Refuses an optimiser whose update of a parameter depends on others, or on chance.

    Args:
        optimizer: with all its parameters, of the model or of a stage.
        device: to try it on.
        is_alone: whether no other stage has parameters.

    Raises:
        UsageError: it clips by the norm of all gradients, say, finds one step size for all, goes by the place in the
            list, or draws random numbers; or that cannot be found out.
    """
    cls = type(optimizer)
    if getattr(torch.optim, cls.__name__, None) is cls or not any(group["params"] for group in optimizer.param_groups):
        return
    failure: Exception | None = None
    for trial in (_Trial(optimizer, device, 4, torch.float64), _Trial(optimizer, device)):
        try:
            fault = _fault(trial, is_alone=is_alone)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001 - it may want what these parameters are not
            failure = error
            continue
        if fault is not None:
            raise fault
        return
    if not is_alone:
        raise UsageError(
            f"whether {cls.__name__} makes the update of one parameter of others as well cannot be tried",
            [f"a step on copies of parameters raised {type(failure).__name__}: {failure}", _SEVERAL],
            [_ONE_STAGE, "an optimiser of torch.optim"],
        )


def _fault(trial: _Trial, *, is_alone: bool) -> UsageError | None:
    """What is wrong with the optimiser of ``trial``."""
    name = type(trial.optimizer).__name__
    with _generators_kept():
        before = _generators()
        together = [trial.updates(parity) for parity in ((0,) if is_alone else (0, 1))]
        if _generators() != before:
            return UsageError(
                f"{name} draws random numbers, and each rank would draw others than one device does",
                ["its step moved the state of a random generator"],
                ["draw in forward or in the loss: those draws are the same under every plan (seed=)"],
            )
        for parity, watched in enumerate(() if is_alone else together):
            if not trial.is_alike(watched, trial.updates(parity, louder=True)):
                return UsageError(
                    f"{name} makes the update of one parameter of others as well",
                    [_SEVERAL],
                    ["clip_norm=... (--clip-norm), which is of all gradients, instead of clipping there", _ONE_STAGE],
                )
            if not trial.is_alike(watched, trial.updates(parity, alone=True)):
                return UsageError(
                    f"{name} makes the update of a parameter of its place among the others, or of how many there are",
                    [_SEVERAL],
                    [
                        "an attribute of each parameter, which goes along: parameter.lr_scale = 0.5",
                        "groups of parameters with settings of their own",
                        _ONE_STAGE,
                    ],
                )
    return None


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Whatever is drawn meanwhile, the state of random generators is as it was."""
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)


def _generators() -> tuple[list[int], object]:
    return torch.get_rng_state().tolist(), random.getstate()


@dataclass(frozen=True, slots=True)
class _Corner:
    """The first elements of a parameter in each dim."""

    shape: tuple[int, ...]

    def cut(self, tensor: Tensor) -> Tensor:
        """Of a tensor of the parameter's shape."""
        return tensor[tuple(map(slice, self.shape))]


@dataclass(frozen=True, slots=True)
class _Trial:
    """Steps on copies of an optimiser, with few parameters.

    Attributes:
        width: of the parameters in each dim, at most; 0: as they are.
        dtype: of the parameters; None: their own.
    """

    optimizer: torch.optim.Optimizer
    device: torch.device
    width: int = 0
    dtype: torch.dtype | None = None

    def updates(self, parity: int, *, louder: bool = False, alone: bool = False) -> _Trajectories:
        """The parameters of even or odd numbers after each step.

        Args:
            louder: whether the gradients of the others are other ones, and larger.
            alone: whether the others are not there.
        """
        by_number: _Trajectories = {}
        for count in _COUNTS:
            copy_of, parameters = self._copy([parity] if alone else [0, 1])
            watched = {number: each for number, each in parameters.items() if number % 2 == parity}
            scales = [*[1.0] * _FIRST_STEPS, *(scale for scale in _SCALES for _ in range(_STEPS))]
            history: list[dict[_NumberPath, float]] = []
            for step, scale in enumerate(scales):
                if step == _FIRST_STEPS and count:
                    _set_ahead(copy_of, history, count)
                for number, parameter in parameters.items():
                    is_louder = louder and number not in watched
                    parameter.grad = _gradient(parameter, step + number + is_louder / 2, scale * _LOUDER**is_louder)
                copy_of.step()
                if step < _FIRST_STEPS:
                    history.append({path: value for path, _, _, value in _numbers(copy_of)})
                for number, parameter in watched.items():
                    by_number.setdefault(number, []).append(parameter.detach().clone())
        return by_number

    def is_alike(self, one: _Trajectories, other: _Trajectories) -> bool:
        """Whether the two are the same, but for rounding."""
        pairs = (pair for number, own in one.items() for pair in zip(own, other[number], strict=True))
        return all(
            torch.allclose(*pair, rtol=_ROUNDING * torch.finfo(pair[0].dtype).eps, atol=0.0, equal_nan=True)
            for pair in pairs
        )

    def _copy(self, parities: list[int]) -> tuple[torch.optim.Optimizer, dict[int, nn.Parameter]]:
        """With the parameters of even or odd numbers, or both: the first two of some groups."""
        chosen = [each for group in self.optimizer.param_groups[:_MOST_GROUPS] for each in group["params"][:2]]
        originals = dict(enumerate({id(each): each for each in chosen}.values()))
        parameters = {number: self._small(each) for number, each in originals.items() if number % 2 in parities}
        twins = {
            id(originals[number]): (Twin(each, _Corner(tuple(each.shape))),) for number, each in parameters.items()
        }
        copy_of = copied(self.optimizer, twins)
        if len(originals) == 1 and 1 in parities:  # of a stage that has no other
            parameters[1] = self._small(originals[0])
            copy_of.param_groups[0]["params"].append(parameters[1])
        for group, own in zip(self.optimizer.param_groups, copy_of.param_groups, strict=True):
            if group["params"] and not own["params"]:
                zero = nn.Parameter(torch.zeros_like(self._small(group["params"][0])))
                zero.grad = torch.zeros_like(zero)
                own["params"].append(zero)
            if isinstance(own.get("lr"), float):
                own["lr"] = _LR
            elif isinstance(own.get("lr"), Tensor):
                own["lr"].fill_(_LR)
        return copy_of, parameters

    def _small(self, original: nn.Parameter) -> nn.Parameter:
        shape = [min(size, self.width) if self.width else size for size in original.shape]
        values = torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64, device=self.device)
        dtype = original.dtype if self.dtype is None or original.is_complex() else self.dtype
        return nn.Parameter(values.view(shape).to(dtype), original.requires_grad)


_ROUNDING = 1e4
"""Times that of a number: the two copies do the same, but for how many numbers a processor takes at once."""


def _gradient(parameter: nn.Parameter, phase: float, scale: float) -> Tensor:
    values = torch.arange(parameter.numel(), dtype=torch.float64, device=parameter.device) * 0.7 + phase
    return (values.sin() * scale).view(parameter.shape).to(parameter.dtype)


_NumberPath = tuple[str, ...]


def _numbers(optimizer: torch.optim.Optimizer) -> Iterator[tuple[_NumberPath, Any, Any, float]]:
    """(path, what holds it, under which key, number) of all that an optimiser keeps."""
    states = [each for key, each in optimizer.state.items() if isinstance(key, Tensor)]
    places: list[tuple[str, Any, Iterable[Any]]] = [
        ("own", vars(optimizer), own_attributes(optimizer)),
        ("named", optimizer.state, named_state(optimizer)),
        *((f"group {number}", group, settings_of(group)) for number, group in enumerate(optimizer.param_groups)),
        *((f"state {number}", state, state) for number, state in enumerate(states)),
    ]
    for name, holder, keys in places:
        for key in list(keys):
            yield from _numbers_in((name, str(key)), holder, key)


def _numbers_in(path: _NumberPath, holder: Any, key: Any) -> Iterator[tuple[_NumberPath, Any, Any, float]]:
    value = holder[key]
    if isinstance(value, dict | list):
        for inner in list(value) if isinstance(value, dict) else range(len(value)):
            yield from _numbers_in((*path, str(inner)), value, inner)
    elif isinstance(value, Tensor) and value.numel() == 1:
        yield path, holder, key, value.item()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, holder, key, value


def _set_ahead(optimizer: torch.optim.Optimizer, history: list[dict[_NumberPath, float]], count: float) -> None:
    """Whatever has risen by one with each step of ``history`` has counted ``count`` more."""
    before, last, now = history
    for path, holder, key, value in _numbers(optimizer):
        counts = all(path in each for each in history)
        if counts and now[path] - last[path] == last[path] - before[path] == 1:
            ahead = value + count
            holder[key] = torch.full_like(holder[key], ahead) if isinstance(holder[key], Tensor) else type(value)(ahead)
