"""What is made when it is first asked for is made once."""

from __future__ import annotations

import pytest

from planner.ir.lazy import once, once_by


class Adder:
    """Counts what it works out."""

    def __init__(self, more: int) -> None:
        self.more = more
        self.calls = list[tuple[int, ...]]()

    @once
    def total(self, first: int, second: int = 0) -> int:
        self.calls.append((first, second))
        return first + second + self.more

    @once_by(lambda _, number: number % 2)
    def parity(self, number: int) -> int:
        self.calls.append((number,))
        return number

    @once
    def inverse(self, number: int) -> float:
        self.calls.append((number,))
        return 1 / number


class Doubler(Adder):
    """Has values of its own under the same name."""

    @once
    def total(self, first: int, second: int = 0) -> int:
        return 2 * super().total(first, second)


def test_a_value_is_made_once_for_an_object_and_its_arguments() -> None:
    adder = Adder(1)
    other = Adder(2)
    assert [adder.total(3), adder.total(3), adder.total(3, second=4), adder.total(3, second=4)] == [4, 4, 8, 8]
    assert adder.calls == [(3, 0), (3, 4)]
    assert (other.total(3), other.calls) == (5, [(3, 0)])


def test_arguments_of_one_key_share_a_value() -> None:
    adder = Adder(0)
    assert [adder.parity(number) for number in (1, 2, 3, 4)] == [1, 2, 1, 2]
    assert adder.calls == [(1,), (2,)]


def test_a_method_and_the_one_that_it_overrides_keep_their_own_values() -> None:
    doubler = Doubler(1)
    assert [doubler.total(3), doubler.total(3)] == [8, 8]
    assert doubler.calls == [(3, 0)]


def test_an_error_is_not_kept() -> None:
    adder = Adder(0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            adder.inverse(0)
    assert adder.calls == [(0,), (0,)]
