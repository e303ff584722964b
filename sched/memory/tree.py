"""A radix tree over token ids, in whole pages, which maps prefixes to KV slots.

Keys are compared on the host, block by block; values are only sliced and passed on, never read.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

Tokens: TypeAlias = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class TreeNode:
    """A sequence of tokens that follows its parent's.

    Invariants: len(key) == len(value), a multiple of the page size and 0 only at the root; a parent's
    lock_ref is at least each child's.
    """

    key: Tokens  # [n]
    value: torch.Tensor  # [n] int64 KV slots
    parent: TreeNode | None
    last_access: int  # logical tick
    serial: int
    lock_ref: int = 0
    children: dict[bytes, TreeNode] = field(default_factory=dict)
    queued: bool = False  # has an entry in the eviction queue

    @property
    def evictable(self) -> bool:
        return self.lock_ref == 0 and not self.children and self.parent is not None


class Inserted(NamedTuple):
    present: int  # tokens that were stored already
    path: Sequence[TreeNode]  # of all tokens, root excluded


class _EvictionQueue:
    """Evictable leaves by (last access, serial).

    Every evictable leaf has exactly one entry, no younger than itself. An entry that is out of date when it
    comes up is dropped, or queued again by the leaf's present tick.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, TreeNode]] = []

    def push(self, node: TreeNode) -> None:
        if node.evictable and not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.last_access, node.serial, node))

    def pop(self) -> TreeNode | None:
        while self._heap:
            tick, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.evictable and tick == node.last_access:
                return node
            self.push(node)
        return None


def _common_prefix(a: Tokens, b: Tokens) -> int:
    n = min(len(a), len(b))
    if a[:n].tobytes() == b[:n].tobytes():  # mostly, and found sooner than the place of a difference
        return n
    differ = a[:n] != b[:n]
    return int(differ.argmax())


def upwards(node: TreeNode | None) -> Iterator[TreeNode]:
    """``node`` and the nodes above it, without the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def part(slots: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """``slots[start:stop]``, where both are within bounds: brackets take longer."""
    return slots.narrow(0, start, stop - start)


class RadixTree:
    """Prefixes, locks and least-recently-used order. Sizes are in tokens.

    Invariant: evictable_size sums the nodes with lock_ref 0, protected_size the others.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.evictable_size = 0
        self.protected_size = 0
        self._tick = 0
        self._serial = 0
        self._queue = _EvictionQueue()
        nothing = torch.empty(0, dtype=torch.int64)
        self.root = TreeNode(np.empty(0, np.int64), nothing, None, last_access=0, serial=0, lock_ref=1)

    def match(self, tokens: array[int]) -> list[TreeNode]:
        """The nodes on the path of the longest stored prefix, root excluded. Splits the node within which it ends."""
        return self._walk(self._aligned(tokens))

    def insert(self, tokens: array[int], value: torch.Tensor) -> Inserted:
        """Store ``value`` (int64, one slot for each token of a whole page) for what is not stored yet. The caller keeps
        the ownership of the other slots."""
        key = self._aligned(tokens)
        path = self._walk(key)
        present = sum([len(node.key) for node in path])
        if present < len(key):
            parent = path[-1] if path else self.root
            leaf = self._node(parent, key[present:].copy(), part(value, present, len(key)).clone())
            self.evictable_size += len(leaf.key)
            self._queue.push(leaf)
            path.append(leaf)
        return Inserted(present, path)

    def lock(self, node: TreeNode | None) -> None:
        """Protect the path from ``node`` up to the root from eviction, once more."""
        for each in upwards(node):
            if each.lock_ref == 0:
                self._protect(len(each.key))
            each.lock_ref += 1

    def unlock(self, node: TreeNode | None) -> None:
        for each in upwards(node):
            assert each.lock_ref > 0, "unlocked more often than locked"
            each.lock_ref -= 1
            if each.lock_ref == 0:
                self._protect(-len(each.key))
                self._queue.push(each)

    def evict(self, num_tokens: int) -> list[torch.Tensor]:
        """Drop unlocked leaves, least recently used first, until ``num_tokens`` are gone or none is left.

        Returns the values of the dropped nodes.
        """
        dropped: list[torch.Tensor] = []
        while num_tokens > 0 and (leaf := self._queue.pop()) is not None:
            assert leaf.parent is not None
            num_tokens -= len(leaf.key)
            self.evictable_size -= len(leaf.key)
            del leaf.parent.children[self._first_page(leaf.key)]
            self._queue.push(leaf.parent)
            dropped.append(leaf.value)
        return dropped

    def nodes(self) -> list[TreeNode]:
        """All nodes but the root, parents first."""
        found = list(self.root.children.values())
        for node in found:
            found.extend(node.children.values())
        return found

    def _aligned(self, tokens: array[int]) -> Tokens:
        key: Tokens = np.asarray(tokens, dtype=np.int64)
        return key[: len(key) // self.page_size * self.page_size]

    def _first_page(self, key: Tokens) -> bytes:
        return key[: self.page_size].tobytes()

    def _walk(self, key: Tokens) -> list[TreeNode]:
        self._tick += 1
        path: list[TreeNode] = []
        node = self.root
        while len(key) and (child := node.children.get(self._first_page(key))) is not None:
            child.last_access = self._tick
            common = _common_prefix(child.key, key) // self.page_size * self.page_size
            node = child if common == len(child.key) else self._split(child, common)
            path.append(node)
            key = key[common:]
        return path

    def _split(self, child: TreeNode, at: int) -> TreeNode:
        """Put the first ``at`` tokens of ``child`` into a node of their own above it.

        The lower half stays the same object, so that locks on it remain valid.
        """
        assert child.parent is not None
        upper = self._node(child.parent, child.key[:at], child.value[:at].clone())
        upper.lock_ref = child.lock_ref
        child.parent = upper
        child.key = child.key[at:]
        child.value = child.value[at:].clone()
        upper.children[self._first_page(child.key)] = child
        return upper

    def _node(self, parent: TreeNode, key: Tokens, value: torch.Tensor) -> TreeNode:
        self._serial += 1
        node = TreeNode(key, value, parent, last_access=self._tick, serial=self._serial)
        parent.children[self._first_page(key)] = node
        return node

    def _protect(self, num_tokens: int) -> None:
        self.evictable_size -= num_tokens
        self.protected_size += num_tokens
