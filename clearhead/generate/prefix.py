"""The prefix cache: a tree of prompt chunks that have been read, so that a shared beginning is read once.

    root ── chunk 0 ─┬─ chunk 1 ── chunk 2
                     └─ chunk 1'

A node is a chunk of tokens after its parent's chunks, with its part of the KV cache (`memory.Saved`), which is mostly
pages that it shares with the rows. Recurrent states and rings cannot be cut by position: some nodes hold a snapshot of
them as they were after the node's last token, and only there a prefix may end.

`order` lists the nodes by last use, children before their parents, so its first node is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass(eq=False)
class Node(Generic[Value]):
    value: Value | None = None
    parent: Node[Value] | None = None
    key: tuple[int, ...] = ()
    resumable: bool = False
    children: dict[tuple[int, ...], Node[Value]] = field(default_factory=dict)


class PrefixCache(Generic[Value]):
    """Chunks of `chunk` tokens. `forget` is called with the value of every node that is dropped."""

    def __init__(self, chunk: int, forget: Callable[[Value], None]) -> None:
        self.chunk, self.forget = chunk, forget
        self.root: Node[Value] = Node()
        self.order: OrderedDict[Node[Value], None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.order)

    def path(self, tokens: Sequence[int]) -> list[Node[Value]]:
        """The nodes of the longest known prefix."""
        node, found = self.root, []
        for start in range(0, len(tokens) - self.chunk + 1, self.chunk):
            child = node.children.get(tuple(tokens[start : start + self.chunk]))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def match(self, tokens: Sequence[int]) -> list[Value]:
        """The values of the longest known prefix from whose end a text can be continued."""
        found = self.path(tokens)
        self.touch(found)
        while found and not found[-1].resumable:
            found.pop()
        return [node.value for node in found if node.value is not None]

    def missing(self, tokens: Sequence[int], resumable: bool) -> bool:
        """Whether to add the last chunk of `tokens`: the earlier ones are here, and it is not, or not resumable."""
        known = self.path(tokens)
        count = len(tokens) // self.chunk
        return len(known) == count - 1 or (len(known) == count and resumable and not known[-1].resumable)

    def insert(self, tokens: Sequence[int], value: Value, resumable: bool) -> None:
        """Add the last chunk of `tokens`, which must be `missing`."""
        known = self.path(tokens)
        if len(known) * self.chunk == len(tokens):
            node = known[-1]
            assert node.value is not None
            self.forget(node.value)
            node.value, node.resumable = value, resumable
        else:
            parent, key = known[-1] if known else self.root, tuple(tokens[len(tokens) - self.chunk :])
            node = parent.children[key] = Node(value, parent, key, resumable)
            known.append(node)
        self.touch(known)

    def touch(self, nodes: Sequence[Node[Value]]) -> None:
        """Mark a path as just used."""
        for node in reversed(nodes):
            self.order[node] = None
            self.order.move_to_end(node)

    def evict(self) -> bool:
        """Drop the least recently used leaf; False if the cache is empty."""
        if not self.order:
            return False
        oldest, _ = self.order.popitem(last=False)
        assert oldest.parent is not None
        assert oldest.value is not None
        del oldest.parent.children[oldest.key]
        self.forget(oldest.value)
        return True
