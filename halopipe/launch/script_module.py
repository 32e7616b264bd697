"""The script's own module while ranks train theirs: what the script does to it, no rank sees.

In a loop of one's own a state dict that is loaded, a part that is frozen and ``module.eval()`` act on the next step.
The ranks of :mod:`halopipe.launch.parallelize` have modules of their own, where such a change would be lost in silence.
So the module is looked at before each call, and what the ranks do not know is refused, with the call that tells them.
What is written through ``parameter.data`` nobody can see.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cuda_ops._torch import BatchNormBase, DropoutBase, times_written
from planner.ir.errors import UsageError
from profiler.source.model import named_buffers, named_parameters, owners

_READ_THEIR_MODE = (BatchNormBase, DropoutBase, nn.MultiheadAttention, nn.RNNBase, nn.RReLU)
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class ModuleSettings:
    """How a module is set up beside its weights, by name; sent to the ranks, which compare it with their own.

    Attributes:
        trained: of each parameter, whether it wants a gradient.
        training: of each part that asks for its mode, whether it is in training.
    """

    trained: Mapping[str, bool]
    training: Mapping[str, bool]

    @classmethod
    def of(cls, owned: Mapping[str, nn.Module]) -> ModuleSettings:
        """Of a module and its loss (:func:`profiler.source.model.owners`)."""
        parts = ((prefix + name, part) for prefix, module in owned.items() for name, part in module.named_modules())
        return cls(
            {name: each.requires_grad for name, each in named_parameters(owned).items()},
            {name: part.training for name, part in parts if _asks_for_its_mode(part)},
        )

    def differences(self, other: ModuleSettings) -> list[str]:
        """Of what both have, those that are otherwise in ``other``, in words."""
        changes = []
        for mine, theirs, yes, no in (
            (self.trained, other.trained, "trained", "frozen"),
            (self.training, other.training, "in training mode", "in evaluation mode"),
        ):
            for is_so, was, now in ((True, yes, no), (False, no, yes)):
                names = [
                    name for name, value in mine.items() if value is is_so and theirs.get(name, value) is not value
                ]
                changes += [f"{_shown(names)}: {was} there, {now} now"] if names else []
        return changes


def require_planned(planned: ModuleSettings, now: ModuleSettings) -> None:
    """Raises :class:`UsageError` where a script's module is set up otherwise than the one that was planned."""
    if differences := planned.differences(now):
        raise UsageError(
            "the module is set up otherwise than when it was profiled",
            [f"when profiled, and in the script: {each}" for each in differences],
            ["freeze parts and choose modes before hp.profile", "set it back, as the plan has it"],
        )


class ScriptModule:
    """The module and the loss of a script, and how they were when the ranks last knew them.

    Args:
        module, loss_fn: the script's.

    Attributes:
        owned: both, by what begins the names of their tensors.
        settings: as the ranks have them.
    """

    def __init__(self, module: nn.Module, loss_fn: Any) -> None:
        self.module = module
        self.owned = owners(module, loss_fn)
        self.settings = ModuleSettings.of(self.owned)
        self.known()

    def known(self) -> None:
        """The ranks have its weights, or newer ones, as they are by now."""
        self._written = self._writes()

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of the tensors that the script has written or exchanged since."""
        now = self._writes()
        return tuple(name for name in {**self._written, **now} if now.get(name) != self._written.get(name))

    @property
    def is_replaced(self) -> bool:
        """Whether the script has written all parameters since, as ``load_state_dict`` does."""
        names = named_parameters(self.owned)
        return bool(names) and names.keys() <= set(self.changed)

    def require_known(self) -> None:
        """Raises :class:`UsageError` where the script has written weights or buffers that the ranks do not have."""
        changed = self.changed
        if not changed:
            return
        remedies = [
            "run.load_state_dict(state) in place of module.load_state_dict(state)",
            "by hand: module = run.module, then what is to change, then run.load_state_dict(module.state_dict())",
        ]
        if named_buffers(self.owned).keys() >= set(changed):  # its forward was called
            remedies = ["call it in evaluation mode, module.eval(), and module.train() afterwards", *remedies]
        raise UsageError(
            "the script has changed its module, which the ranks do not see: they train modules of their own",
            [f"written since they were last the same: {_shown(changed)}"],
            remedies,
        )

    def require_settings(self) -> None:
        """Raises :class:`UsageError` where parts were frozen, or put into another mode, since the ranks began."""
        if differences := self.settings.differences(ModuleSettings.of(self.owned)):
            raise UsageError(
                "the script has set up its module otherwise, which the ranks do not see",
                [f"when the run began, and now: {each}" for each in differences],
                [
                    "module.train() after module.eval(); run.evaluate(batch) needs neither",
                    "to freeze or unfreeze parts: close this run, hp.parallelize(...) again, run.load(folder)",
                ],
            )

    def _writes(self) -> dict[str, tuple[int, int]]:
        tensors: dict[str, Tensor] = {**named_parameters(self.owned), **named_buffers(self.owned)}
        return {name: (id(each), times_written(each)) for name, each in tensors.items()}


def require_no_autocast(autocast: str) -> None:
    """Raises :class:`UsageError` where the script is within an autocast that the plan knows nothing of."""
    if not autocast and torch.is_autocast_enabled("cpu"):
        raise UsageError(
            "the script is within torch.autocast, which the ranks do not see",
            ["the plan is of a profile without autocast"],
            ["hp.profile(module, example, autocast='bfloat16'), and its plan; leave torch.autocast out"],
        )


def _asks_for_its_mode(part: nn.Module) -> bool:
    """Modules of torch of which it is known, and those of users whose forward asks for it."""
    if type(part).__module__.startswith("torch.nn."):
        return isinstance(part, _READ_THEIR_MODE)
    code = getattr(inspect.unwrap(type(part).forward), "__code__", None)
    return isinstance(part, _READ_THEIR_MODE) or "training" in getattr(code, "co_names", ())


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    return f"{', '.join(name or 'the module itself' for name in names[:_SHOWN])}{more}"
