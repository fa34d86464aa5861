"""The prefix cache: a tree of prompt chunks that have been read, so that a shared beginning is read once.

A node is a chunk of tokens after its parent's chunks, with the copied part of the KV cache (`memory.Saved`). Recurrent
states and rings cannot be cut by position, so a node holds a snapshot of them as they were after its last token.
Nodes are dropped oldest first, leaves only, when the cache is larger than its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .memory import Saved


@dataclass
class Node:
    saved: Saved | None
    parent: Node | None
    key: tuple[int, ...] = ()
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    used: int = 0  # when it was last used


class PrefixCache:
    """Chunks of `chunk` tokens, in at most `limit` bytes. A limit of 0 turns the cache off."""

    def __init__(self, chunk: int, limit: int) -> None:
        self.chunk, self.limit, self.size, self.clock = chunk, limit, 0, 0
        self.root = Node(None, None)

    def match(self, tokens: Sequence[int]) -> list[Saved]:
        """The saved chunks of the longest known prefix."""
        node, found = self.root, []
        self.clock += 1
        for start in range(0, len(tokens) - self.chunk + 1, self.chunk):
            child = node.children.get(tuple(tokens[start : start + self.chunk]))
            if child is None or child.saved is None:
                break
            child.used = self.clock
            found.append(child.saved)
            node = child
        return found

    def insert(self, tokens: Sequence[int], saved: Saved) -> None:
        """Add the last chunk of `tokens`. Its earlier chunks must be in the tree; otherwise nothing happens."""
        if self.limit == 0 or len(tokens) % self.chunk or saved.size > self.limit:
            return
        node = self.root
        for start in range(0, len(tokens) - self.chunk, self.chunk):
            child = node.children.get(tuple(tokens[start : start + self.chunk]))
            if child is None:
                return
            node = child
        key = tuple(tokens[len(tokens) - self.chunk :])
        if key in node.children:
            return
        self.clock += 1
        node.children[key] = Node(saved, node, key, used=self.clock)
        self.size += saved.size
        self.evict()

    def evict(self) -> None:
        """Drop the least recently used leaves until the cache fits its limit."""
        while self.size > self.limit:
            oldest = min(self.leaves(), key=lambda node: node.used)
            assert oldest.parent is not None
            assert oldest.saved is not None
            del oldest.parent.children[oldest.key]
            self.size -= oldest.saved.size

    def leaves(self) -> list[Node]:
        found, pending = [], list(self.root.children.values())
        while pending:
            node = pending.pop()
            if node.children:
                pending += node.children.values()
            else:
                found.append(node)
        return found
