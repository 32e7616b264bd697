"""The state of the optimisers of all ranks as one mapping, by names of parameters, for checkpoints of a user's own.

    {"state": {"fc.weight": {"step": ..., "exp_avg": a whole tensor}},     as torch.distributed.checkpoint has it
     "param_groups": [{"params": ["fc.weight", ...], "lr": 0.1, "betas": (0.9, 0.999)}],
     "scheduler": {"fc.weight/last_epoch": 3},                             of the schedules that were given
     "object": {"fc.weight/attribute/k": 3},                               of an optimiser that keeps numbers besides
     "num_steps": 3}

It is nothing of the plan: another plan of the model goes on from it.

Whole tensors from those that ranks have, or from their parts, for whoever asks for a model's state or gradients.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from planner.ir.box import Box, volume, whole
from planner.ir.errors import UsageError
from runtime.checkpoint.state import Number, RankState
from runtime.pipeline.routing import assemble
from runtime.transport import Transport

if TYPE_CHECKING:
    from runtime.spatial.parameters import ParameterPart

OPTIMIZER = "optimizer/"
GROUP = "group/"
SCHEDULER = "scheduler/"
OBJECT = "object/"
STATE = "state"
GROUPS = "param_groups"
SCHEDULES = "scheduler"
OBJECTS = "object"
STEPS = "num_steps"
_NUMBERS = "numbers"
_BYTES = torch.uint8


def pieces_of(state: RankState, rank: int) -> dict[str, Tensor]:
    """What a rank contributes: tensors under labels that say of which whole they are, and its numbers."""
    pieces = {}
    for key in sorted(state.writes & state.tensors.keys()):
        if not key.startswith(OPTIMIZER):
            continue
        label: list[Any] = [key]
        if key in state.slices:
            start, stop, shape = state.slices[key]
            label += [[[start, stop]], [math.prod(shape)], shape]
        elif key in state.boxes:
            box, shape = state.boxes[key]
            label += [[[each.start, each.stop] for each in box], shape, shape]
        pieces[json.dumps(label)] = state.tensors[key]
    numbers = {key: state.numbers[key] for key in sorted(state.writes & state.numbers.keys())}
    pieces[json.dumps([_NUMBERS, rank])] = torch.tensor(list(json.dumps(numbers).encode()), dtype=torch.uint8)
    return pieces


def whole_of(pieces: Mapping[str, Tensor], num_steps: int) -> dict[str, Any]:
    """The mapping, of the pieces of all ranks."""
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, list[int]] = {}
    numbers: dict[str, Number] = {}
    for label, tensor in pieces.items():
        key, *rest = json.loads(label)
        if key == _NUMBERS:
            numbers.update(json.loads(bytes(tensor.tolist())))
        elif rest:
            box, extents, shapes[key] = rest
            whole = tensors.setdefault(key, torch.zeros(extents, dtype=tensor.dtype))
            whole[tuple(slice(*each) for each in box)] = tensor
        else:
            tensors[key] = tensor
    states: dict[str, dict[str, Any]] = {}
    kept: dict[str, Any] = {key: tensor.view(shapes.get(key, tensor.shape)) for key, tensor in tensors.items()}
    kept.update((key, number) for key, number in numbers.items() if key.startswith(OPTIMIZER))
    for key, value in sorted(kept.items()):
        name, _, entry = key.removeprefix(OPTIMIZER).rpartition("/")
        states.setdefault(name, {})[entry] = value
    schedules = _under(SCHEDULER, numbers)
    objects = {OBJECTS: own} if (own := _under(OBJECT, numbers)) else {}
    return {STATE: states, GROUPS: _groups(numbers), SCHEDULES: schedules, **objects, STEPS: num_steps}


def _under(head: str, numbers: Mapping[str, Number]) -> dict[str, Number]:
    return {key.removeprefix(head): each for key, each in numbers.items() if key.startswith(head)}


def _groups(numbers: Mapping[str, Number]) -> list[dict[str, Any]]:
    """Parameters whose settings are the same are one group."""
    settings: dict[str, dict[str, Any]] = {}
    for key, number in numbers.items():
        if key.startswith(GROUP):
            name, setting, *place = key.removeprefix(GROUP).split("/")
            own = settings.setdefault(name, {})
            own[setting] = (*own.get(setting, ()), number) if place else number  # ascending, as they were listed
    groups: dict[str, dict[str, Any]] = {}
    for name, own in settings.items():
        groups.setdefault(repr(sorted(own.items())), {"params": [], **own})["params"].append(name)
    return list(groups.values())


class WholeState:
    """What :func:`whole_of` made, as :func:`runtime.optim.optimizer_state.load_state` reads it.

    Raises:
        UsageError: it is no such mapping; later, it lacks something, or has it in another shape.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        try:
            kept = {f"{OPTIMIZER}{name}/{entry}": v for name, own in state[STATE].items() for entry, v in own.items()}
            self._tensors = {key: value for key, value in kept.items() if isinstance(value, Tensor)}
            self._numbers = {key: value for key, value in kept.items() if not isinstance(value, Tensor)}
            for group in state[GROUPS]:
                for setting, value in group.items():
                    several = enumerate(value) if isinstance(value, (tuple, list)) else ()
                    places = {f"{setting}/{place}": each for place, each in several} or {setting: value}
                    for name in group["params"] if setting != "params" else ():
                        self._numbers.update((f"{GROUP}{name}/{place}", each) for place, each in places.items())
            for head, name in ((SCHEDULER, SCHEDULES), (OBJECT, OBJECTS)):
                self._numbers.update((head + key, value) for key, value in state.get(name, {}).items())
            self.num_steps = int(state[STEPS])
        except (KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                "this is not the state of an optimiser",
                [f"{type(error).__name__}: {error}"],
                ["give what optimizer_state_dict() gave"],
            ) from None

    def tensors(self) -> Collection[str]:
        """The keys of all tensors."""
        return self._tensors.keys()

    def numbers(self) -> Collection[str]:
        """The keys of all numbers."""
        return self._numbers.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Of a whole tensor."""
        return tuple(self.read(key).shape)

    def read(self, key: str) -> Tensor:
        """A whole tensor."""
        tensor: Tensor = _stored(self._tensors, key)
        return tensor.clone()

    def read_slice(self, key: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of a tensor, laid flat."""
        return self.read(key).flatten()[start:stop]

    def read_box(self, key: str, box: Box) -> Tensor:
        """A box of a tensor."""
        return self.read(key)[tuple(slice(each.start, each.stop) for each in box)]

    def number(self, key: str) -> Number:
        """A number."""
        scalar: Number = _stored(self._numbers, key)
        return scalar


def _stored(kept: Mapping[str, Any], key: str) -> Any:
    if key not in kept:
        raise UsageError(
            f"the state that is given has no {key}",
            [f"it has {len(kept)} others"],
            ["the optimiser and schedule that it was kept of"],
        )
    return kept[key]


@torch.no_grad()
def united(own: Mapping[str, Tensor], transport: Transport) -> dict[str, Tensor]:
    """The tensors that any rank has, by name, on all of them and on the processor; all ranks call this together.

    Of what several ranks have, that of the first counts.  Values stay as they are to the bit.
    """
    everyone = tuple(range(transport.world_size))

    def gather(mine: Tensor) -> list[Tensor]:
        sizes = torch.zeros(len(everyone), dtype=torch.int64)
        sizes[transport.rank] = mine.numel()
        transport.all_gather(sizes, [1] * len(everyone), everyone)
        flat = torch.zeros(int(sizes.sum()), dtype=_BYTES)
        pieces = torch.split(flat, sizes.tolist())
        pieces[transport.rank].copy_(mine)
        if flat.numel():
            transport.all_gather(flat, sizes.tolist(), everyone)
        return list(pieces)

    listed = [[name, str(each.dtype).removeprefix("torch."), list(each.shape)] for name, each in own.items()]
    lists = [json.loads(bytes(each.tolist())) for each in gather(_bytes_of(json.dumps(listed).encode()))]
    owner: dict[str, int] = {}
    for rank, names in enumerate(lists):
        for name, *_ in names:
            owner.setdefault(name, rank)
    mine = [_bytes_of(each) for name, each in own.items() if owner[name] == transport.rank]
    tensors = {}
    for rank, data in enumerate(gather(torch.cat([*mine, torch.zeros(0, dtype=_BYTES)]))):
        first = 0
        for name, dtype, shape in lists[rank]:
            if owner[name] == rank:
                kind: torch.dtype = getattr(torch, dtype)
                size = math.prod(shape) * kind.itemsize
                tensors[name] = data[first : first + size].clone().view(kind).view(shape)
                first += size
    return tensors


def _bytes_of(data: Tensor | bytes) -> Tensor:
    if isinstance(data, bytes):
        return torch.tensor(list(data), dtype=_BYTES)
    return data.detach().cpu().contiguous().reshape(-1).view(_BYTES)


@torch.no_grad()
def gathered(tensor: Tensor, part: ParameterPart | None, transport: Transport) -> Tensor:
    """The whole of what ``tensor`` is this rank's part of; without a part it is the whole.

    All ranks of the stage call this together, for the same tensors in the same order.
    """
    if part is None or not part.is_divided:
        return tensor
    ranks = tuple(sorted(part.ranks))
    boxes = [part.at(rank) for rank in ranks]
    counts = [volume(box) if first else 0 for box, first in boxes]
    flat = tensor.new_empty(sum(counts))
    pieces = torch.split(flat, counts)
    own = ranks.index(transport.rank)
    if counts[own]:
        pieces[own].copy_(tensor.reshape(-1))
    transport.all_gather(flat, counts, ranks)
    placed = [
        (box, piece.view(tuple(map(len, box)))) for (box, _), piece in zip(boxes, pieces, strict=True) if piece.numel()
    ]
    return assemble(placed, whole(part.shape), tensor.dtype, tensor.device)
