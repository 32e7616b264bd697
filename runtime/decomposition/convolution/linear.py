"""Whether a rank's part of a convolution can be computed as a sum of terms, and whether that pays.  Pure integers.

Who knows the boxes of all ranks can so tell what each of them does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from planner.ir.box import Box
from runtime.decomposition.convolution.terms import LEADING, Term, Window, main_term, piece_term


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank does of a convolution.

    Attributes:
        outputs: may be empty.
        needed: of the input; may reach outside the tensor.
        channels: of the whole input and of the whole output.
    """

    window: Window
    outputs: Box
    needed: Box
    channels: tuple[int, int]

    @property
    def is_of_whole_groups(self) -> bool:
        """Whether this rank has filters, those of whole groups, and their weight alone."""
        groups = self.window.groups
        each, filters = self.channels[1] // groups, self.outputs[1]
        if groups == 1 or len(filters) == self.channels[1]:
            return True
        return not self.window.transposed and filters.start % each == 0 and filters.stop % each == 0

    @property
    def local(self) -> Window:
        """The window with the groups that this rank has, where they are whole."""
        groups = self.window.groups * len(self.outputs[1]) // self.channels[1] if self.window.groups > 1 else 1
        return replace(self.window, groups=groups)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a part is the sum of.

    Attributes:
        pieces: of what comes, in order; None for what no output sees.
    """

    main: Term
    pieces: tuple[Term | None, ...]

    @property
    def multiplications(self) -> int:
        """Per pair of channels."""
        return self.main.multiplications + sum(term.multiplications for term in self.pieces if term is not None)


def linear_terms(part: Part, held: Box, wanted: Box, received: Sequence[Box]) -> Terms | None:
    """The terms; None where it is no such sum: what comes has other samples or channels, or nothing is held."""
    outputs = part.outputs
    if not all(map(len, outputs)) or not all(map(len, held)) or not part.is_of_whole_groups:
        return None
    if any(box[:LEADING] != held[:LEADING] for box in (wanted, *received)):
        return None
    window = part.local
    main = main_term(window, held, outputs)
    return None if main is None else Terms(main, tuple(piece_term(window, box, outputs) for box in received))


def pays(part: Part, terms: Terms, wanted: Box, most_extra: float) -> bool:
    """Whether zeros beside what is held add at most this share of multiplications."""
    made = wanted if part.window.transposed else part.outputs
    return terms.multiplications <= (1 + most_extra) * prod(map(len, made[LEADING:])) * prod(part.window.kernel)
