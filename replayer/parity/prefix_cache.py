"""Prefix reuse: a tree of pages by their tokens, with locks, and least-recently-used eviction for each pool.

A node is one page of a prompt and holds a virtual page of the full pool and, unless that was evicted, one of the window pool. A prefix
can be reused up to a node if every page that the window's layers will look at is still there; what lies further back need not be. Locks
keep what running requests read: their whole path in the full pool, in the window pool only what is inside the window (as hybrid caches
do: SGLang 0.5.23, ``mem_cache/unified_cache/components/swa.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(eq=False)
class Node:
    """One page of tokens that several requests may read."""

    tokens: tuple[int, ...]
    parent: Node | None
    full_page: int
    window_page: int | None
    last_used: int = 0
    full_locks: int = 0
    window_locks: int = 0
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)


class PrefixCache:
    """The tree. It keeps virtual page ids; who owns them is settled by `add` and the evictions: what they return is the caller's to free.

    Args:
        page_size: tokens of a node.
        window: tokens that a layer of the window pool sees, itself included; None for all.
    """

    def __init__(self, page_size: int, window: int | None) -> None:
        self.page_size, self._window = page_size, window
        self._root = Node((), None, 0, None)
        self._clock = 0

    def match(self, tokens: list[int], most: int) -> list[Node]:
        """Nodes of the longest prefix of ``tokens`` that can be reused, of at most ``most`` tokens. Nothing is locked, and nothing
        counts as used."""
        path: list[Node] = []
        node = self._root
        for start in range(0, most - self.page_size + 1, self.page_size):
            child = node.children.get(tuple(tokens[start : start + self.page_size]))
            if child is None:
                break
            path.append(child)
            node = child
        while path and any(each.window_page is None for each in path[self.first_window_page(len(path)) :]):
            path.pop()
        return path

    def first_window_page(self, pages: int) -> int:
        """The first page that the window's layers read when the token after ``pages`` whole pages is computed."""
        if self._window is None:
            return 0
        return max(0, pages * self.page_size - self._window + 1) // self.page_size

    def lock(self, path: list[Node]) -> None:
        """A request is going to read ``path`` and go on from there. Locking alone does not count as use: see `touch`."""
        for index, node in enumerate(path):
            node.full_locks += 1
            node.window_locks += index >= self.first_window_page(len(path))

    def lock_one(self, node: Node) -> None:
        """A request that has just put a page into the tree keeps reading it, in both pools."""
        node.full_locks += 1
        node.window_locks += 1

    def unlock_window(self, node: Node) -> None:
        """The page has fallen out of a request's window."""
        node.window_locks -= 1

    def unlock(self, path: list[Node]) -> None:
        """A request is done with ``path``; its window locks were given back before, by `unlock_window`."""
        for node in path:
            node.full_locks -= 1

    def touch(self, path: list[Node]) -> None:
        """``path`` was used just now. Every node gets a time of its own, so that "least recently used" names one; the end of a path is
        older than its beginning, which others may share."""
        for node in reversed(path):
            self._clock += 1
            node.last_used = self._clock

    def child(self, parent: Node | None, tokens: tuple[int, ...]) -> Node | None:
        """The node that holds ``tokens`` after ``parent`` (None: at the beginning)."""
        return (parent or self._root).children.get(tokens)

    def add(
        self, parent: Node | None, tokens: tuple[int, ...], full_page: int, window_page: int | None
    ) -> Node:
        """A new node, which owns the pages from now on."""
        above = parent or self._root
        node = Node(tokens, above, full_page, window_page)
        above.children[tokens] = node
        return node

    def evict_full(self, count: int) -> tuple[list[int], list[int]]:
        """Drop at most ``count`` unlocked nodes without children, the least recently used first. Returns their full and window pages."""
        full: list[int] = []
        window: list[int] = []
        while len(full) < count:
            leaves = [node for node in self._nodes() if not node.children and not node.full_locks]
            if not leaves:
                break
            node = min(leaves, key=lambda leaf: leaf.last_used)
            assert node.parent is not None
            del node.parent.children[node.tokens]
            full.append(node.full_page)
            if node.window_page is not None:
                window.append(node.window_page)
        return full, window

    def evict_window(self, count: int) -> list[int]:
        """Take at most ``count`` unlocked window pages away from their nodes, the least recently used first. Returns them."""
        nodes = [node for node in self._nodes() if node.window_page is not None and not node.window_locks]
        taken = sorted(nodes, key=lambda node: node.last_used)[:count]
        pages = [node.window_page for node in taken if node.window_page is not None]
        for node in taken:
            node.window_page = None
        return pages

    def held(self) -> tuple[list[int], list[int]]:
        """Full and window pages that the tree owns."""
        nodes = list(self._nodes())
        return [node.full_page for node in nodes], [
            node.window_page for node in nodes if node.window_page is not None
        ]

    def _nodes(self) -> Iterator[Node]:
        waiting = list(self._root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())
