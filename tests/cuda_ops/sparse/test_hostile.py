"""Arguments that do not fit, to every public operator and layer: refused by name, never a crash, never other memory.

The operators run in a child, so that one that does read elsewhere ends the test and not the suite.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_ops.sparse.nn as spnn
from cuda_ops.sparse import operators
from cuda_ops.sparse.checks import CHECKS, CheckedTensors
from cuda_ops.sparse.errors import SparseInputError
from cuda_ops.sparse.keys import HIGHEST

OPS = torch.ops.halopipe
ONES = (1, 1, 1)
KERNEL = (3, 3, 3)
STRIDE = (2, 2, 2)
FAR = (-(2**31), -2, 10**6, 2**31 - 1)
"""Indices that nothing here has."""


def valid() -> dict[str, tuple[Any, ...]]:
    """Arguments that fit, by operator; a map is one of 40 sites to fewer."""
    torch.manual_seed(0)
    coordinates = torch.unique(torch.randint(0, 6, (60, 4), dtype=torch.int32) % torch.tensor([2, 6, 6, 6]), dim=0)[:40]
    coordinates = coordinates.to(torch.int32)
    keys = OPS.sorted_sites(coordinates)[0]
    coarse = OPS.strided_sites(keys, STRIDE, STRIDE, ONES)
    neighbours = OPS.kernel_map(keys, coarse, KERNEL, STRIDE, ONES, False)
    reverse = OPS.reversed_map(neighbours, len(keys))
    x = torch.randn(len(keys), 3)
    dy = torch.randn(len(coarse), 5)
    weight = torch.randn(27, 3, 5)
    argmax = OPS.sparse_max_pool(x, neighbours, reverse)[1]
    starts = torch.tensor([0, 10, 10, 25])
    lengths = torch.tensor([10, 0, 12, 15])
    index = torch.randint(-1, len(keys), (9, 8), dtype=torch.int32)
    share = torch.rand(9, 8)
    rows = torch.tensor([3, 0, 3, 7])
    boxes = [0, 5, 0, 2, 7, 9, 1, 3]
    return {
        "sorted_sites": (coordinates,),
        "strided_sites": (keys, KERNEL, STRIDE, ONES),
        "generated_sites": (keys, KERNEL, STRIDE, ONES),
        "kernel_map": (keys, coarse, KERNEL, STRIDE, ONES, False),
        "reversed_map": (neighbours, len(keys)),
        "sparse_conv": (x, weight, neighbours, reverse),
        "sparse_conv_weight": (x, dy, neighbours),
        "sparse_max_pool": (x, neighbours, reverse),
        "sparse_max_pool_backward": (dy[:, :3].contiguous(), argmax, reverse),
        "sparse_sum_pool": (x, neighbours, reverse),
        "segment_sum": (x, starts, lengths),
        "segment_max": (x, starts, lengths),
        "segment_grid": (x, torch.arange(len(keys)) % 9, starts, lengths, 9),
        "segment_expand": (torch.randn(4, 3), starts, lengths, len(keys)),
        "interpolate": (x, index, share),
        "interpolate_backward": (torch.randn(9, 3), index, share, len(keys)),
        "interpolate_weight": (x, torch.randn(9, 3), index),
        "pack_rows": (x, rows),
        "unpack_add": (x, rows, torch.randn(4, 3)),
        "pack_boxes": (x, boxes),
        "unpack_boxes": (torch.randn(14), x, boxes, True),
    }


ADDRESSES = {
    "strided_sites": (0,),
    "generated_sites": (0,),
    "kernel_map": (0, 1),
    "reversed_map": (0,),
    "sparse_conv": (2,),
    "sparse_conv_weight": (2,),
    "sparse_max_pool": (1,),
    "sparse_max_pool_backward": (1, 2),
    "sparse_sum_pool": (1,),
    "segment_sum": (1, 2),
    "segment_max": (1, 2),
    "segment_grid": (1, 2, 3),
    "segment_expand": (1, 2),
    "interpolate": (1,),
    "interpolate_backward": (1,),
    "interpolate_weight": (2,),
    "pack_rows": (1,),
    "unpack_add": (1,),
}
"""Arguments that hold indices which the operator reads or writes at."""


def with_far_index(tensor: Tensor, value: int, place: int) -> Tensor:
    found = tensor.clone()
    found.view(-1)[place] = value
    return found


def wrong_indices(name: str, arguments: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each of which must be refused."""
    for place in ADDRESSES.get(name, ()):
        tensor = arguments[place]
        values = FAR if tensor.dtype == torch.int32 else (*FAR, 2**63 - 1, -(2**63))
        if name.endswith("_sites") or name == "kernel_map":
            values = (-1, int(tensor[-2]), -(2**63))  # negative, twice the same, not in order
        for value in values:
            for at in (0, tensor.numel() - 1):
                if not (name.endswith("_sites") or name == "kernel_map") or at or value < 0:
                    yield (
                        f"{value} at {at} of argument {place}",
                        replaced(arguments, place, with_far_index(tensor, value, at)),
                    )


def variants(arguments: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Which are refused, or give a result."""
    for place, argument in enumerate(arguments):
        if isinstance(argument, Tensor):
            others = {
                **{
                    str(dtype): argument.to(dtype)
                    for dtype in (torch.int8, torch.int64, torch.float16, torch.complex64)
                },
                "bool": argument > 0,
                "without rows": argument[:0],
                "a row less": argument[:-1],
                "a column less": argument[..., :-1],
                "a dim more": argument[None],
                "one number": argument.flatten()[0],
                "without channels": argument.new_empty(*argument.shape[:-1], 0),
                "sparse": argument.to_sparse(),
                "without memory": argument.to("meta"),
            }
        elif isinstance(argument, bool):
            others = {"not": not argument}
        elif isinstance(argument, int):
            others = {str(each): each for each in (-1, 0, 1, 2**31, 2**62)}
        else:
            others = {
                str(each): each for each in ([0, 0, 0], [-1, 1, 1], [2**62] * 3, [2**21] * 3, [1], [], [2**19, 1, 1])
            }
        for what, other in others.items():
            yield f"argument {place} {what}", replaced(arguments, place, other)


def replaced(arguments: tuple[Any, ...], place: int, other: Any) -> tuple[Any, ...]:
    return *arguments[:place], other, *arguments[place + 1 :]


def apart(tensor: Tensor) -> Tensor:
    """The same numbers, not one after another."""
    room = tensor.new_zeros(*tensor.shape, 2)
    room[..., 1] = tensor
    return room[..., 1]


def complaints(name: str) -> Iterator[str]:
    """What is not as it should be of an operator."""
    arguments = valid()[name]
    function = getattr(operators, name, None) or getattr(OPS, name)
    expected = function(*arguments)
    for what, wrong in wrong_indices(name, arguments):
        said = outcome(function, wrong)
        if said != "refused":
            yield f"{name}, {what}: {said}"
    for what, other in variants(arguments):
        said = outcome(function, other)
        if "FakeTensor" in said and "without memory" in what:
            continue  # how many sites there are is known by running: torch says what is needed for tensors without any
        if said not in ("refused", "ran"):
            yield f"{name}, {what}: {said}"
    found = function(*(apart(each) if isinstance(each, Tensor) else each for each in arguments))
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        if not torch.equal(one, other):
            yield f"{name}: other results of tensors that are not contiguous"


def tensors(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    try:
        function(*arguments)
    except SparseInputError as error:
        return "refused" if error.where and str(error.expected) else "refused without a reason"
    except RuntimeError as error:
        if "expected" in str(error) or "Expected" in str(error):  # torch's own check of the schema: a list of 3 numbers
            return "refused"
        return f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001  # whatever it is, it is none of ours
        return f"{type(error).__name__}: {error}"
    return "ran"


def in_a_child(work: Callable[[], list[str]]) -> list[str]:
    """What ``work`` says; the child must live."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def child() -> None:
        torch.set_num_threads(1)
        there.send(work())

    process = context.Process(target=child)
    process.start()
    there.close()
    try:
        said = here.recv() if here.poll(120) else ["it did not end"]
    except EOFError:
        said = []
    process.join(10)
    return [*said, *([f"the child ended with {process.exitcode}"] if process.exitcode else [])]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("implementation", ["native", "torch"])
def test_no_operator_reads_or_writes_elsewhere(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HALOPIPE_SPARSE", implementation)
    assert set(valid()) == set(CHECKS)
    assert in_a_child(lambda: [each for name in CHECKS for each in complaints(name)]) == []


@pytest.mark.parametrize("name", ["sparse_conv", "sparse_max_pool", "interpolate"])
def test_a_wrong_map_of_the_backward_is_refused_there(name: str) -> None:
    x, *others = valid()[name]
    x = x.clone().requires_grad_()
    if name == "interpolate":
        with pytest.raises(SparseInputError, match=r"index out of range in index: found -1\.\.40, expected -1\.\.39"):
            OPS.interpolate(x, with_far_index(others[0], 40, 0), others[1])
        return
    reverse = with_far_index(others[-1], 10**6, 3)
    y = tensors(getattr(OPS, name)(x, *others[:-1], reverse))[0]
    with pytest.raises(SparseInputError, match=r"index out of range in (neighbours|reverse): found -1\.\.1000000"):
        y.sum().backward()


def test_segments_share_no_rows() -> None:
    x = torch.randn(9, 2)
    starts = torch.tensor([4, 0])
    OPS.segment_sum(x, starts, torch.tensor([5, 4]))
    with pytest.raises(SparseInputError, match=r"segments that share rows: found rows 0\.\.4 and from 4 on"):
        OPS.segment_sum(x, starts, torch.tensor([5, 5]))
    with pytest.raises(SparseInputError, match="last row of a segment: found 9, expected at most 8"):
        OPS.segment_sum(x, starts, torch.tensor([6, 4]))


def test_points_of_no_batch_are_not_another_batchs() -> None:
    tensor = spnn.SparseTensor(torch.ones(1, 2), torch.zeros(1, 4, dtype=torch.int32))
    assert spnn.devoxelise(tensor, torch.zeros(1, 4)).tolist() == [[1.0, 1.0]]
    for batch in (1024.0, -1.0, 512.0):
        points = torch.tensor([[batch, 0, 0, 0]])
        with pytest.raises(SparseInputError, match="batch index out of range"):
            spnn.devoxelise(tensor, points)
        with pytest.raises(SparseInputError, match="batch index out of range"):
            spnn.voxelise(torch.ones(1, 2), points)


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "conv": lambda: spnn.Conv3d(2, 3, 3),
    "strided": lambda: spnn.Conv3d(2, 3, 2, stride=2),
    "generative": lambda: spnn.Conv3d(2, 3, 3, stride=2, transposed=True, generative=True),
    "max pool": lambda: spnn.MaxPool3d(2),
    "mean pool": lambda: spnn.AvgPool3d(2),
    "global max": lambda: spnn.GlobalMaxPool(),
    "global mean": lambda: spnn.GlobalAvgPool(),
    "batch norm": lambda: spnn.BatchNorm(2),
    "instance norm": lambda: spnn.InstanceNorm(2),
    "linear": lambda: spnn.Linear(2, 3),
}

CLOUDS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "empty": lambda: (torch.ones(0, 2), torch.zeros(0, 4, dtype=torch.int32)),
    "one": lambda: (torch.ones(1, 2), torch.zeros(1, 4, dtype=torch.int32)),
    "at the corner": lambda: (
        torch.ones(2, 2),
        torch.tensor([[511, HIGHEST, HIGHEST, HIGHEST], [0, -HIGHEST - 1, 0, 0]]),
    ),
    "beyond": lambda: (torch.ones(1, 2), torch.tensor([[0, HIGHEST + 1, 0, 0]])),
    "far beyond": lambda: (torch.ones(1, 2), torch.tensor([[0, 2**62, 0, 0]])),
    "negative batch": lambda: (torch.ones(1, 2), torch.tensor([[-1, 0, 0, 0]])),
    "too many batches": lambda: (torch.ones(1, 2), torch.tensor([[512, 0, 0, 0]])),
    "twice": lambda: (torch.ones(2, 2), torch.zeros(2, 4, dtype=torch.int32)),
    "floats": lambda: (torch.ones(1, 2), torch.zeros(1, 4)),
    "three columns": lambda: (torch.ones(1, 2), torch.zeros(1, 3, dtype=torch.int32)),
    "fewer rows": lambda: (torch.ones(1, 2), torch.arange(8, dtype=torch.int32).view(2, 4)),
    "other channels": lambda: (torch.ones(1, 5), torch.zeros(1, 4, dtype=torch.int32)),
    "integers": lambda: (torch.ones(1, 2, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)),
    "no channels": lambda: (torch.ones(1, 0), torch.zeros(1, 4, dtype=torch.int32)),
    "strided": lambda: (apart(torch.ones(3, 2)), apart(torch.tensor([[0, 1, 2, 3], [0, 0, 0, 0], [0, 5, 5, 5]]))),
}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_layers_run_or_refuse_every_cloud() -> None:
    def work() -> list[str]:
        said = []
        for cloud, make in CLOUDS.items():
            for layer, network in LAYERS.items():
                found = outcome(lambda make=make, network=network: network()(spnn.SparseTensor(*make())), ())
                if found not in ("ran", "refused"):
                    said.append(f"{layer} of {cloud}: {found}")
        return said

    assert in_a_child(work) == []


def test_what_was_looked_at_is_known_until_it_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = CheckedTensors()
    on_the_processor = torch.zeros(3, dtype=torch.int32)
    seen.note(on_the_processor, 5)
    assert not seen.has(on_the_processor, 5)  # numpy may write to it

    index = torch.zeros(3, dtype=torch.int32, device="meta")
    assert not seen.has(index, 5)
    seen.note(index, 5)
    assert seen.has(index, 5)
    assert not seen.has(index, 4)
    assert not seen.has(index[1:], 5)
    index.add_(1)
    assert not seen.has(index, 5)
    for _ in range(3):
        seen.note(index, 5)
        assert seen.has(index, 5)
        index = torch.zeros(3, dtype=torch.int32, device="meta")  # perhaps where the one before was
        assert not seen.has(index, 5)
