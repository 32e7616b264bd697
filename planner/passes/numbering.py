"""The actions of a program as integers, so that rules are looked up once for all micro-batches.

A *kind* is (stage, op, peer); the number of an action is ``kind * span + micro-batch``, with a place of its own for
actions of the whole step.  ``dependencies`` asks the same for every micro-batch, so it is asked once a kind, at
micro-batch 0 (where these are cut: at all parts of micro-batch 0), and its answer shifted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from planner.ir.lazy import Memo, once_by
from planner.ir.program import Message, Program
from planner.ir.schedule import PER_STEP, RECEIVE, Action, Op, dependencies

ActionKind = tuple[int, Op, int | None]
Peers = Mapping[int, tuple[int, ...]]
"""By rank, the ranks that it exchanges messages with; ranks that exchange none are left out."""
Alternatives = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unmet:
    """What an action needs of its own rank and is missing, or (``late``) comes later in the row."""

    rank: int
    index: int
    needed: tuple[Action, ...]
    late: bool


class Numbering:
    """Numbers of everything that a program names; lives while the program is looked at.

    Attributes:
        rows: numbers by rank, in order.
        places: by rank, the index of each number in its row.
        kinds: what each kind is.
        strangers: numbers of actions of micro-batches that do not exist.
        moves: by kind of a send or receive and micro-batch, who exchanges messages with whom.
        first_needs: ``dependencies`` of a kind at micro-batch 0, by part: one where micro-batches are whole.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.span = program.stages.num_microbatches + 1
        self.parts = program.stages.parts
        self.kinds: list[ActionKind] = []
        self.strangers: set[int] = set()
        self._kind_of: Memo[ActionKind | tuple[int, Op, int | None, int], int] = Memo(self._new_kind)
        self.first_needs: Memo[int, tuple[tuple[Alternatives, ...], ...]] = Memo(self._first_needs)
        self.moves: Memo[int, list[Peers]] = Memo(self._moves)
        self.rows = [list(map(self.number, row)) for row in program.rows]
        self.places = [{number: index for index, number in enumerate(row)} for row in self.rows]

    def kind(self, stage: int, op: Op, peer: int | None = None) -> int:
        """The number of the kind."""
        return self._kind_of[stage, op, peer]

    def number(self, action: Action) -> int:
        """The number of an action; one of a micro-batch that does not exist has a kind of its own."""
        last = self.span - 1
        m = action.microbatch
        if m is None or 0 <= m < last:
            return self._kind_of[action.stage, action.op, action.peer] * self.span + (last if m is None else m)
        number = self._kind_of[action.stage, action.op, action.peer, m] * self.span
        self.strangers.add(number)
        return number

    def _new_kind(self, key: ActionKind | tuple[int, Op, int | None, int]) -> int:
        self.kinds.append(key[:3])
        return len(self.kinds) - 1

    def action(self, number: int) -> Action:
        """The action of a number; not to be asked for one of a micro-batch that does not exist."""
        kind, m = divmod(number, self.span)
        stage, op, peer = self.kinds[kind]
        return Action(stage, op, None if m == self.span - 1 else m, peer)

    def _moves(self, kind: int) -> list[Peers]:
        stage, op, peer = self.kinds[kind]
        at_source = op in (Op.SEND_FORWARD, Op.RECV_BACKWARD)
        other = -1 if peer is None else peer
        src, dst = (stage, other) if at_source else (other, stage)
        routes = (self.program.messages.get((src, dst, m), ()) for m in range(self.span - 1))
        forward = op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
        return [self._peers_of(route, forward, at_source) for route in routes]

    def peers(self, rank: int, number: int) -> tuple[int, ...]:
        """The ranks that ``rank`` exchanges messages with in a send or receive; none if it moves nothing."""
        kind, m = divmod(number, self.span)
        by_microbatch = self.moves[kind]
        return by_microbatch[m].get(rank, ()) if m < len(by_microbatch) else ()

    def needs(self, number: int) -> Iterator[Alternatives]:
        """``dependencies`` of an action that is no receive: sets of alternatives."""
        kind, m = divmod(number, self.span)
        stage, op, _ = self.kinds[kind]
        if op in PER_STEP:
            last = self.span - 1
            rule = dependencies(Action(stage, op, None if m == last else m), self.program.stages)
            return (tuple(map(self.number, group)) for group in rule)
        which = m % self.parts
        return (tuple(first + m - which for first in group) for group in self.first_needs[kind][which])

    def _first_needs(self, kind: int) -> tuple[tuple[Alternatives, ...], ...]:
        stage, op, peer = self.kinds[kind]
        rules = (dependencies(Action(stage, op, m, peer), self.program.stages) for m in range(self.parts))
        return tuple(tuple(tuple(map(self.number, group)) for group in rule) for rule in rules)

    def unmet(self, missing: bool) -> Unmet | None:
        """The first action whose needs on its own rank come later, or (if ``missing``) are nowhere.

        A receive needs sends on other ranks; these too are looked for if ``missing``.
        """
        span = self.span
        parts = self.parts
        strangers = self.strangers
        rules = [self._rule(kind) for kind in range(len(self.kinds))]
        for rank, (row, place) in enumerate(zip(self.rows, self.places, strict=True)):
            for index, number in enumerate(row):
                kind, shift = divmod(number, span)
                groups = rules[kind]
                if groups is None:
                    if missing and (unsent := self._unsent(rank, number)) is not None:
                        return Unmet(rank, index, (unsent,), late=False)
                    continue
                if number in strangers:
                    if missing:
                        return Unmet(rank, index, (), late=False)
                    continue
                if not groups:
                    needed = tuple(self.needs(number))
                    shift = 0
                else:
                    which = shift % parts
                    needed = groups[which]
                    shift = shift - which
                for group in needed:
                    is_there = not missing
                    for first in group:
                        at = place.get(first + shift)
                        if at is not None:
                            is_there = True
                            if at > index:
                                return Unmet(rank, index, (self.action(first + shift),), late=True)
                    if not is_there:
                        return Unmet(rank, index, tuple(self.action(first + shift) for first in group), late=False)
        return None

    def _rule(self, kind: int) -> tuple[tuple[Alternatives, ...], ...] | None:
        """What the kind needs at micro-batch 0, by part; None for a receive, nothing if each action is asked."""
        op = self.kinds[kind][1]
        if op in RECEIVE:
            return None
        return () if op in PER_STEP else self.first_needs[kind]

    def _unsent(self, rank: int, number: int) -> Action | None:
        """The send of a piece of what ``rank`` receives that is not in its sender's row."""
        stage, op, peer = self.kinds[number // self.span]
        send = Op.SEND_FORWARD if op is Op.RECV_FORWARD else Op.SEND_BACKWARD
        needed = self.kind(-1 if peer is None else peer, send, stage) * self.span + number % self.span
        unsent = any(needed not in self.places[sender] for sender in self.peers(rank, number))
        return self.action(needed) if unsent else None

    @once_by(lambda self, route, forward, at_source: (id(route), forward, at_source))
    def _peers_of(self, route: tuple[Message, ...], forward: bool, at_source: bool) -> Peers:
        """Routes of like micro-batches are one object, hence looked at once."""
        pairs: dict[int, tuple[int, ...]] = {}
        for message in route:
            if message.src != message.dst and (message.parts if forward else message.gradient_parts):
                here, there = (message.src, message.dst) if at_source else (message.dst, message.src)
                pairs[here] = (*pairs.get(here, ()), there)
        return pairs
