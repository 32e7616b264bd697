"""One quantity of a plan beside one device's; without torch, so that a launcher can read what its ranks say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """One quantity of the plan beside one device's.

    Attributes:
        name: of the parameter or buffer; ``loss`` for losses.
        kind: ``loss``, ``gradient``, ``parameter`` or ``buffer``.
        step: counted from 0.
        found, expected: the loss, or the norms of the tensors.
        error: relative.
        accepted: the largest error that is.
        rounding: the error that rounding alone may make, if it is known to be above ``accepted``; else 0.
    """

    name: str
    kind: str
    step: int
    found: float
    expected: float
    error: float
    accepted: float
    rounding: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Whether rounding cannot be the cause."""
        return not self.error <= max(self.accepted, self.rounding)

    @property
    def is_hidden(self) -> bool:
        """Whether rounding may be the cause, and may hide a mistake as well."""
        return self.accepted < self.error <= self.rounding

    def __str__(self) -> str:
        what = "loss" if self.kind == "loss" else f"{self.kind} of {self.name}"
        values = f"{self.found:.9g}, one device {self.expected:.9g}"
        accepted = f"accepted {self.accepted:.0e}" + (f", rounding {self.rounding:.0e}" if self.rounding else "")
        return f"{what} at step {self.step}: {values}, relative error {self.error:.2e}, {accepted}"
