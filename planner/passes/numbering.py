"""The actions of a program as integers, so that rules are looked up once for all micro-batches.

A *kind* is (stage, op, peer); the number of an action is ``kind * span + micro-batch``, with a place of its own for
actions of the whole step.  ``dependencies`` asks the same for every micro-batch, so it is asked once a kind, at
micro-batch 0, and its answer shifted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from planner.ir.program import Message, Program
from planner.ir.schedule import PER_STEP, RECEIVE, Action, Op, dependencies

Kind = tuple[int, Op, int | None]
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
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.span = program.stages.num_microbatches + 1
        self.kinds: list[Kind] = []
        self.strangers: set[int] = set()
        self._kind_of: dict[object, int] = {}
        self._needs: dict[int, tuple[Alternatives, ...]] = {}
        self._moves: dict[int, list[Peers]] = {}
        self._peers: dict[tuple[int, str], Peers] = {}
        self.rows = [self._numbers(row) for row in program.rows]
        self.places = [{number: index for index, number in enumerate(row)} for row in self.rows]

    def kind(self, stage: int, op: Op, peer: int | None = None) -> int:
        """The number of the kind."""
        key = (stage, op, peer)
        found = self._kind_of.get(key)
        return self._new_kind(key, key) if found is None else found

    def number(self, action: Action) -> int:
        """The number of an action; one of a micro-batch that does not exist has a kind of its own."""
        last, m = self.span - 1, action.microbatch
        if m is None:
            return self.kind(action.stage, action.op, action.peer) * self.span + last
        if 0 <= m < last:
            return self.kind(action.stage, action.op, action.peer) * self.span + m
        key = (action.stage, action.op, action.peer, m)
        found = self._kind_of.get(key)
        number = (self._new_kind(key, key[:3]) if found is None else found) * self.span
        self.strangers.add(number)
        return number

    def action(self, number: int) -> Action:
        """The action of a number; not to be asked for one of a micro-batch that does not exist."""
        kind, m = divmod(number, self.span)
        stage, op, peer = self.kinds[kind]
        return Action(stage, op, None if m == self.span - 1 else m, peer)

    def moves(self, kind: int) -> Sequence[Peers]:
        """By micro-batch, who exchanges the messages of a send or receive with whom."""
        found = self._moves.get(kind)
        if found is None:
            stage, op, peer = self.kinds[kind]
            at_source = op in (Op.SEND_FORWARD, Op.RECV_BACKWARD)
            other = -1 if peer is None else peer
            src, dst = (stage, other) if at_source else (other, stage)
            messages = self.program.messages
            routes = (messages.get((src, dst, m), ()) for m in range(self.span - 1))
            forward = op in (Op.SEND_FORWARD, Op.RECV_FORWARD)
            found = self._moves[kind] = [self._peers_of(route, forward, at_source) for route in routes]
        return found

    def peers(self, rank: int, number: int) -> tuple[int, ...]:
        """The ranks that ``rank`` exchanges messages with in a send or receive; none if it moves nothing."""
        kind, m = divmod(number, self.span)
        by_microbatch = self.moves(kind)
        return by_microbatch[m].get(rank, ()) if m < len(by_microbatch) else ()

    def needs(self, number: int) -> Iterator[Alternatives]:
        """``dependencies`` of an action that is no receive: sets of alternatives."""
        kind, m = divmod(number, self.span)
        stage, op, _ = self.kinds[kind]
        if op in PER_STEP:
            last = self.span - 1
            rule = dependencies(Action(stage, op, None if m == last else m), self.program.stages)
            return (tuple(map(self.number, group)) for group in rule)
        return (tuple(first + m for first in group) for group in self.first_needs(kind))

    def first_needs(self, kind: int) -> tuple[Alternatives, ...]:
        """``dependencies`` of the kind at micro-batch 0."""
        found = self._needs.get(kind)
        if found is None:
            stage, op, peer = self.kinds[kind]
            rule = dependencies(Action(stage, op, 0, peer), self.program.stages)
            found = self._needs[kind] = tuple(tuple(map(self.number, group)) for group in rule)
        return found

    def unmet(self, missing: bool) -> Unmet | None:
        """The first action whose needs on its own rank come later, or (if ``missing``) are nowhere.

        A receive needs sends on other ranks; these too are looked for if ``missing``.
        """
        span, strangers = self.span, self.strangers
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
                    groups, shift = tuple(self.needs(number)), 0
                for group in groups:
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

    def _rule(self, kind: int) -> tuple[Alternatives, ...] | None:
        """What the kind needs at micro-batch 0; None for a receive, nothing if every action is to be asked."""
        op = self.kinds[kind][1]
        if op in RECEIVE:
            return None
        return () if op in PER_STEP else self.first_needs(kind)

    def _unsent(self, rank: int, number: int) -> Action | None:
        """The send of a piece of what ``rank`` receives that is not in its sender's row."""
        stage, op, peer = self.kinds[number // self.span]
        send = Op.SEND_FORWARD if op is Op.RECV_FORWARD else Op.SEND_BACKWARD
        needed = self.kind(-1 if peer is None else peer, send, stage) * self.span + number % self.span
        unsent = any(needed not in self.places[sender] for sender in self.peers(rank, number))
        return self.action(needed) if unsent else None

    def _numbers(self, row: Sequence[Action]) -> list[int]:
        kind_of, span, last = self._kind_of, self.span, self.span - 1
        found = []
        for action in row:
            m = action.microbatch
            if m is None:
                m = last
            elif not 0 <= m < last:
                found.append(self.number(action))
                continue
            key = (action.stage, action.op, action.peer)
            kind = kind_of.get(key)
            if kind is None:
                kind = self._new_kind(key, key)
            found.append(kind * span + m)
        return found

    def _new_kind(self, key: object, kind: Kind) -> int:
        self._kind_of[key] = len(self.kinds)
        self.kinds.append(kind)
        return len(self.kinds) - 1

    def _peers_of(self, route: tuple[Message, ...], forward: bool, at_source: bool) -> Peers:
        """Routes of like micro-batches are one object, hence looked at once."""
        key = (id(route), "FB"[not forward] + "><"[not at_source])
        found = self._peers.get(key)
        if found is None:
            pairs: dict[int, tuple[int, ...]] = {}
            for message in route:
                if message.src != message.dst and (message.parts if forward else message.gradient_parts):
                    here, there = (message.src, message.dst) if at_source else (message.dst, message.src)
                    pairs[here] = (*pairs.get(here, ()), there)
            found = self._peers[key] = pairs
        return found
