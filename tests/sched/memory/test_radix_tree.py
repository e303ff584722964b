"""The radix tree compared with a plain dict: page-aligned prefix -> the slots of its last page."""

from __future__ import annotations

from array import array

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from schedbench.sched.memory.tree import RadixTree, TreeNode

Prefix = tuple[int, ...]


class RadixTreeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.stored: dict[Prefix, tuple[int, ...]] = {}
        self.locked: list[tuple[TreeNode, Prefix]] = []
        self.next_slot = 1

    @initialize(page_size=st.sampled_from([1, 2, 16]))
    def build(self, page_size: int) -> None:
        self.page = page_size
        self.tree = RadixTree(page_size)

    def prompt(self, pages: list[int], tail: int) -> array[int]:
        """Prompts over few distinct pages with a common first half and an unaligned tail."""
        half = self.page // 2
        ids: list[int] = []
        for page in pages:
            ids += [7] * half + [page] * (self.page - half)
        return array("q", ids + [7] * min(tail, self.page - 1))

    def prefixes(self, tokens: array[int]) -> list[Prefix]:
        return [tuple(tokens[:end]) for end in range(self.page, len(tokens) + 1, self.page)]

    def longest(self, tokens: array[int]) -> list[Prefix]:
        return [prefix for prefix in self.prefixes(tokens) if prefix in self.stored]

    def protected(self) -> set[Prefix]:
        return {p for _, locked in self.locked for p in self.prefixes(array("q", locked))}

    def oldest_leaves(self, num_tokens: int) -> list[list[int]]:
        """What repeated searches of the whole tree for the oldest leaf would evict."""
        alive = self.tree.nodes()
        dropped: list[list[int]] = []
        while num_tokens > 0:
            parents = {id(node.parent) for node in alive}
            leaves = [node for node in alive if node.lock_ref == 0 and id(node) not in parents]
            if not leaves:
                break
            oldest = min(leaves, key=lambda node: (node.last_access, node.serial))
            alive.remove(oldest)
            dropped.append(oldest.value.tolist())
            num_tokens -= len(oldest.key)
        return dropped

    PAGES = st.lists(st.integers(0, 2), max_size=5)

    @rule(pages=PAGES, tail=st.integers(0, 15))
    def insert(self, pages: list[int], tail: int) -> None:
        tokens = self.prompt(pages, tail)
        present = self.longest(tokens)
        slots = list(range(self.next_slot, self.next_slot + len(tokens)))
        self.next_slot += len(tokens)

        found = self.tree.insert(tokens, torch.tensor(slots, dtype=torch.int64))

        assert found.present == len(present) * self.page
        assert sum(len(node.key) for node in found.path) == len(tokens) // self.page * self.page
        for prefix in self.prefixes(tokens)[len(present) :]:
            self.stored[prefix] = tuple(slots[len(prefix) - self.page : len(prefix)])

    @rule(pages=PAGES, tail=st.integers(0, 15))
    def match(self, pages: list[int], tail: int) -> None:
        tokens = self.prompt(pages, tail)
        path = self.tree.match(tokens)

        slots = [slot for node in path for slot in node.value.tolist()]
        assert slots == [slot for prefix in self.longest(tokens) for slot in self.stored[prefix]]

    @rule(pages=PAGES)
    def lock(self, pages: list[int]) -> None:
        tokens = self.prompt(pages, 0)
        path = self.tree.match(tokens)
        node = path[-1] if path else self.tree.root
        self.tree.lock(node)
        self.locked.append((node, tuple(tokens[: sum(len(n.key) for n in path)])))

    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        if self.locked:
            node, _ = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
            self.tree.unlock(node)

    @rule(num_tokens=st.integers(0, 40))
    def evict(self, num_tokens: int) -> None:
        evictable = self.tree.evictable_size
        expected = self.oldest_leaves(num_tokens)
        dropped = [value.tolist() for value in self.tree.evict(num_tokens)]

        assert dropped == expected
        gone = {slot for value in dropped for slot in value}
        assert len(gone) >= min(num_tokens, evictable)
        assert not dropped or len(gone) - len(dropped[-1]) < num_tokens
        for prefix in [p for p, slots in self.stored.items() if gone & set(slots)]:
            assert prefix not in self.protected()
            assert gone.issuperset(self.stored.pop(prefix))
        assert all(prefix[: -self.page] in self.stored or len(prefix) == self.page for prefix in self.stored)

    @invariant()
    def sizes_add_up(self) -> None:
        protected = len(self.protected()) * self.page
        assert self.tree.protected_size == protected
        assert self.tree.evictable_size == len(self.stored) * self.page - protected

    @invariant()
    def nodes_are_well_formed(self) -> None:
        for node in self.tree.nodes():
            assert node.parent is not None
            assert len(node.key) == node.value.shape[0] > 0
            assert len(node.key) % self.page == 0
            assert node.parent.lock_ref >= node.lock_ref or node.parent is self.tree.root
            assert node.parent.last_access >= node.last_access or node.parent is self.tree.root
            assert not node.evictable or node.queued


RadixTreeMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestRadixTreeMachine = RadixTreeMachine.TestCase
