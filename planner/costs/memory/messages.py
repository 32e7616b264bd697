"""What messages take where they are sent and received, in bytes: buffers, frames, and when both are let go."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from planner.costs.simulator.program import RECEIVE_STEP, SEND_STEP, CompiledProgram
from planner.ir.cluster import PAIR_SUM_BYTES, STANDING_BYTES
from planner.ir.program import ALONE_BYTES, SPARE_BYTES, Part, num_joined


@dataclass(slots=True)
class Received:
    """What a stage is given of a micro-batch on a rank, with its buffers, in bytes.

    What several ranks of a stage send in parts is put together, and the parts go with the action that does so.

    Attributes:
        alone: tensors that came on their own, in buffers each, and those put together; ``tensors``: these themselves.
        together: what came in one piece: frames, and blocks of memory that ranks share.
        assembled: what is put together; ``parts``: the buffers of its parts.
        senders: stages that sent something.
    """

    alone: int = 0
    tensors: int = 0
    together: int = 0
    assembled: int = 0
    parts: int = 0
    senders: tuple[int, ...] = ()

    @classmethod
    def of(cls, messages: Mapping[int, Sequence[tuple[int, int, bool]]]) -> Received:
        """Of the messages by the stage that sent them: (payload, what of it in a frame, whether it is a block)."""
        received = cls(senders=tuple(messages))
        for sent in messages.values():
            for payload, small, is_block in sent:
                framed = payload if is_block else small
                buffer = buffer_bytes(payload, framed, is_block)
                piece = buffer_bytes(framed, framed, is_block)
                if len(sent) > 1:
                    received.assembled += payload
                    received.parts += buffer
                    received.alone += payload
                    received.tensors += payload
                else:
                    received.alone += buffer - piece
                    received.tensors += payload - framed
                    received.together += piece
        return received

    @property
    def sizes(self) -> tuple[int, ...]:
        """All but who sent it."""
        return self.alone, self.tensors, self.together, self.assembled, self.parts

    @property
    def whole(self) -> int:
        """What there is of it once it is put together."""
        return self.alone + self.together

    @property
    def total(self) -> int:
        """The same, and the parts."""
        return self.whole + self.parts

    def left(self, wanted: float | None) -> int:
        """What stays of it for ``wanted`` bytes, at most; None: it is not known how many."""
        if wanted is None:
            return self.whole
        return round(self.alone * min(1.0, wanted / max(1, self.tensors))) + (self.together if wanted > 0 else 0)


class CoalescedMessage(NamedTuple):
    """How a message carries its tensors, in bytes.

    Attributes:
        framed: of those that it copies into its frame, as they are too small to be sent on their own.
        copied: of those that are sent on their own, but from a copy.
    """

    framed: int
    copied: int = 0

    @classmethod
    def of(cls, parts: Iterable[Part]) -> CoalescedMessage:
        """Of a message of these tensors."""
        sizes = [(part.num_bytes, part.num_bytes < ALONE_BYTES, part.is_copied) for part in parts]
        framed = sum(size for size, is_small, _ in sizes if is_small)
        return cls(framed, sum(size for size, is_small, is_copied in sizes if is_copied and not is_small))


def buffer_bytes(payload: int, small: int, is_block: bool = False) -> int:
    """What a message takes where it is received: after a tensor on its own an eighth to spare, after a frame all.

    Args:
        is_block: it is received where its sender put it, in memory that both share.
    """
    if is_block:
        return payload
    alone = payload - small
    return payload + min(alone // 8, SPARE_BYTES) + min(small, SPARE_BYTES)


def sums_standing(sizes: Iterable[int]) -> int:
    """Of what ranks exchange to sum gradients over gloo, the receives that stand ready for the next sums.

    Args:
        sizes: of what comes, in the order in which it is first received.
    """
    standing = 0
    for size in sizes:
        if size <= PAIR_SUM_BYTES and standing + size <= STANDING_BYTES:
            standing += size
    return standing


def joined(compiled: CompiledProgram, transfer_bytes: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """By message that others travel with, those (:func:`planner.ir.program.num_joined`)."""
    joined_to: dict[int, tuple[int, ...]] = {}
    for message, before in compiled.sent_before.items():
        count = num_joined([transfer_bytes[compiled.messages[each][0]] for each in (*before, message)])
        if count:
            first = before[-count]
            joined_to[first] = (*joined_to.get(first, ()), message)
    return joined_to


def answers(compiled: CompiledProgram) -> dict[int, int]:
    """By message, the one that tells its sender that it came: of those that left later, the first to be taken.

    A message tells which ones had come when it was sent (:mod:`runtime.transport.gloo`).  Ranks of several stages need
    not take messages in the order that they were sent.
    """
    received_at: dict[int, int] = {}
    sent: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by (sender, receiver): (position, message), ascending
    for row in compiled.rows:
        for position, (code, _, messages) in enumerate(row):
            if code == RECEIVE_STEP:
                received_at.update(dict.fromkeys(messages, position))
            elif code == SEND_STEP:
                for message in messages:
                    ends = compiled.channels[compiled.messages[message][1]]
                    sent.setdefault(ends, []).append((position, message))
    answer_of: dict[int, int] = {}
    for (src, dst), leaving in sent.items():
        back = sent.get((dst, src), [])
        # Of the last message, of the last two, and so on, the one that is taken first.
        soonest = [*accumulate((one for _, one in reversed(back)), lambda *two: min(two, key=received_at.__getitem__))]
        later = ((one, bisect_right(back, (received_at[one], len(compiled.messages)))) for _, one in leaving)
        answer_of.update({message: soonest[-1 - first] for message, first in later if first < len(back)})
    return answer_of
