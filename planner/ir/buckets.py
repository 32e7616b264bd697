"""Which gradients are summed together: the runtime's buckets, which the cost model prices one by one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

BUCKET_BYTES = 8 * 2**20
"""Most bytes of gradients that are copied together; a larger gradient is summed where it is.

Smaller ones begin earlier.  Measured on two cores of one host over gloo, a network of 47 MB: what is left to wait for
after backward is 181 ms in one go, 69 ms in buckets of 32 MiB, 32 ms of 8 MiB.
"""


def in_buckets(
    sizes: Sequence[int], kinds: Sequence[Hashable] = (), bucket_bytes: int = BUCKET_BYTES
) -> tuple[tuple[int, ...], ...]:
    """Positions of parameters, from the last to the first as backward makes their gradients, in buckets of one kind.

    A parameter larger than ``bucket_bytes`` has a bucket of its own.

    Args:
        sizes: bytes of each parameter, in the order of the model.
        kinds: of each; only those of one kind may share a bucket.  Empty: all are alike.
    """
    buckets: list[list[int]] = []
    room_bytes, current = 0, None
    for position in reversed(range(len(sizes))):
        kind = kinds[position] if kinds else True
        if kind != current or sizes[position] > room_bytes:
            buckets.append([])
            room_bytes, current = bucket_bytes, kind
        buckets[-1].append(position)
        room_bytes -= sizes[position]
    return tuple(map(tuple, buckets))
