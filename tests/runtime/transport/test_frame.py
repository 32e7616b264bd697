from __future__ import annotations

import itertools

import pytest
import torch

from planner.ir.errors import TransportError
from runtime.transport import Key
from runtime.transport.frame import Frame, layout_of, tag, unpack

KEY = Key(4, "F", 0, 1, 3)
SPECS = [((2, 3), torch.float32), ((), torch.int64)]


def message() -> torch.Tensor:
    frame = Frame(layout_of(SPECS))
    frame.write(KEY, [torch.arange(6.0).reshape(2, 3), torch.tensor(7)])
    return frame.message


def test_a_flip_of_any_bit_of_the_header_is_noticed():
    for position, bit in itertools.product(range(64), range(8)):
        corrupted = message()
        corrupted[position] ^= 1 << bit
        with pytest.raises(TransportError, match=f"{KEY}: rank 5 sent another message"):
            unpack(corrupted, KEY, 5, layout_of(SPECS))


def test_tags_of_different_keys_differ_and_fit_31_bits():
    ranges = ((0, 3), "AFBZ", (0, 1, 127), (0, 1, 127), (0, 1, 1023))
    tags = [tag(Key(*fields)) for fields in itertools.product(*ranges)]
    assert len(set(tags)) == len(tags)
    assert min(tags) >= 1 << 26
    assert max(tags) < 27 << 26 < 2**31


@pytest.mark.parametrize(
    ("key", "complaint"),
    [
        (Key(0, "f", 0, 0, 0), "the kind is 'f', expected one letter from A to Z"),
        (Key(0, "FB", 0, 0, 0), "the kind is 'FB'"),
        (Key(0, "F", 128, 0, 0), "src_stage is 128, expected 0 to 127"),
        (Key(0, "F", 0, -1, 0), "dst_stage is -1, expected 0 to 127"),
        (Key(0, "F", 0, 0, 1024), "microbatch is 1024, expected 0 to 1023"),
    ],
)
def test_a_key_that_fits_no_tag_is_refused(key, complaint):
    with pytest.raises(TransportError, match=complaint):
        tag(key)
