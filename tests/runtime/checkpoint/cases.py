"""States, ranks as threads, and forged checkpoints, for the tests of this folder."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from planner.ir.errors import CorruptFileError
from runtime.checkpoint import Checkpoint, RankState, save
from runtime.checkpoint.folders import MANIFEST, MANIFEST_HASH
from runtime.checkpoint.manifest import manifest_hash

FINGERPRINTS = {"model": "m1", "plan": "p1"}


def whole(seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a small model and its optimiser, whole."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model/a.weight": (3, 4), "model/b.weight": (5,), "optimizer/a.weight/exp_avg": (3, 4)}
    return {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}


def of_two_ranks(seed: int = 0) -> list[RankState]:
    """The same on two ranks: one has ``a``, the other ``b``; the moment of ``a`` is cut in 5 and 7 elements."""
    tensors = whole(seed)
    moment = tensors.pop("optimizer/a.weight/exp_avg")
    numbers = {"run/step": seed, "group/a.weight/lr": 0.1}
    states = []
    for start, stop, name in ((0, 5, "a.weight"), (5, 12, "b.weight")):
        mine = {
            f"model/{name}": tensors[f"model/{name}"],
            "optimizer/a.weight/exp_avg": moment.reshape(-1)[start:stop],
        }
        slices = {"optimizer/a.weight/exp_avg": (start, stop, (3, 4))}
        written = frozenset(mine) | (frozenset(numbers) if start == 0 else frozenset())
        states.append(RankState(mine, slices, numbers, written))
    return states


def alone(tensors: Mapping[str, Tensor], numbers: Mapping[str, object] | None = None) -> RankState:
    """A state of the only rank, which writes it all."""
    return RankState(dict(tensors), {}, dict(numbers or {}), frozenset(tensors) | frozenset(numbers or {}))


def on_ranks(num_ranks: int, run: Callable[[int, Callable[[], None]], None]) -> list[BaseException | None]:
    """What ``run(rank, barrier)`` raised on each rank, the ranks being threads."""
    barrier = threading.Barrier(num_ranks, timeout=30.0)
    with ThreadPoolExecutor(num_ranks) as pool:
        ranks = [pool.submit(run, rank, barrier.wait) for rank in range(num_ranks)]
        return [rank.exception(60.0) for rank in ranks]


def try_save(folder: Path, step: int, states: Sequence[RankState], keep: int = 0) -> list[BaseException | None]:
    """Save on all ranks; what each raised."""

    def run(rank: int, barrier: Callable[[], None]) -> None:
        save(folder, step, states[rank], rank, len(states), barrier, FINGERPRINTS, keep=keep)

    return on_ranks(len(states), run)


def save_all(folder: Path, step: int, states: Sequence[RankState], keep: int = 0) -> Path:
    """Save on all ranks; the checkpoint's folder."""
    for error in try_save(folder, step, states, keep):
        if error is not None:
            raise error
    return folder / f"step-{step}"


def forge(path: Path, change: Callable[[str], str]) -> None:
    """Change a checkpoint's manifest and hash it anew, as one with bad intent would."""
    content = change((path / MANIFEST).read_text("utf-8")).encode()
    (path / MANIFEST).write_bytes(content)
    (path / MANIFEST_HASH).write_bytes(manifest_hash(content))


def assert_flips_are_found(path: Path, folder: Path, num_flips: int) -> None:
    """Any bit that is flipped in a file of ``path`` makes the checkpoint in ``folder`` a corrupt one."""
    files = {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    everywhere = [(file, position) for file, content in files.items() for position in range(len(content))]
    dice = random.Random(0)
    for file, position in dice.sample(everywhere, num_flips):
        content = bytearray(files[file])
        content[position] ^= 1 << dice.randrange(8)
        file.write_bytes(content)
        with pytest.raises(CorruptFileError):
            Checkpoint.open(folder).verify()
        file.write_bytes(files[file])
    Checkpoint.open(folder).verify()
