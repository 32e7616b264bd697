"""Merging the nodes of a DAG that must stay together, and numbering what comes of it in topological order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Contraction:
    """Nodes merged into blocks.

    Attributes:
        block_of: the block of each node.
        blocks: the nodes of each block, ascending; blocks are in topological order.
        successors: of each block.
    """

    block_of: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    successors: tuple[tuple[int, ...], ...]


def contract(num_nodes: int, edges: Iterable[tuple[int, int]], together: Iterable[Sequence[int]]) -> Contraction:
    """Merges the nodes of each class in ``together``, and then all that lie on a common cycle.

    Blocks come in an order that is topological, else by their first node.
    """
    root = list(range(num_nodes))

    def find(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for group in together:
        for node in group[1:]:
            root[find(node)] = find(group[0])
    pairs = [(find(src), find(dst)) for src, dst in edges]
    label = _components(num_nodes, pairs)
    first: dict[int, int] = {}
    for node in range(num_nodes):
        first.setdefault(label[find(node)], node)
    keys = [first[label[find(node)]] for node in range(num_nodes)]
    return _in_order(keys, {(keys[src], keys[dst]) for src, dst in pairs if keys[src] != keys[dst]})


def _in_order(keys: Sequence[int], edges: Iterable[tuple[int, int]]) -> Contraction:
    """Blocks (named by their first node) in topological order, of those that are ready always the one named first."""
    after: dict[int, list[int]] = {key: [] for key in sorted(set(keys))}
    missing = dict.fromkeys(after, 0)
    for src, dst in edges:
        after[src].append(dst)
        missing[dst] += 1
    ready = [key for key, count in missing.items() if not count]
    number: dict[int, int] = {}
    while ready:
        key = min(ready)
        ready.remove(key)
        number[key] = len(number)
        for dst in after[key]:
            missing[dst] -= 1
            if not missing[dst]:
                ready.append(dst)
    block_of = tuple(number[key] for key in keys)
    blocks: list[list[int]] = [[] for _ in number]
    for node, block in enumerate(block_of):
        blocks[block].append(node)
    successors = tuple(tuple(sorted(number[dst] for dst in after[key])) for key in number)
    return Contraction(block_of, tuple(map(tuple, blocks)), successors)


def _components(num_nodes: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Strongly connected components (Kosaraju): a label for each node."""
    forward: list[list[int]] = [[] for _ in range(num_nodes)]
    backward: list[list[int]] = [[] for _ in range(num_nodes)]
    for src, dst in edges:
        forward[src].append(dst)
        backward[dst].append(src)
    finished: list[int] = []
    seen = [False] * num_nodes
    for start in range(num_nodes):
        stack = [(start, iter(forward[start]))] if not seen[start] else []
        seen[start] = True
        while stack:
            node, rest = stack[-1]
            following = next((dst for dst in rest if not seen[dst]), None)
            if following is None:
                finished.append(node)
                stack.pop()
            else:
                seen[following] = True
                stack.append((following, iter(forward[following])))
    label = [-1] * num_nodes
    for start in reversed(finished):
        queue = [start] if label[start] < 0 else []
        while queue:
            node = queue.pop()
            if label[node] < 0:
                label[node] = start
                queue += [src for src in backward[node] if label[src] < 0]
    return label
