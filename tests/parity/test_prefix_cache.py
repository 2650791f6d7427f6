"""The prefix cache against a list of what was put into it: matches, locks, and every page coming back once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule

from replayer.parity.prefix_cache import Node, PrefixCache

pytestmark = pytest.mark.cpu

PAGE = 2


def grow(cache: PrefixCache, tokens: list[int], first_page: int = 100) -> list[Node]:
    """Put whole pages of ``tokens`` in, full page numbers from ``first_page`` on and window pages 1000 higher; unlocked."""
    path: list[Node] = []
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        piece = tuple(tokens[start : start + PAGE])
        parent = path[-1] if path else None
        page = first_page + start // PAGE
        path.append(cache.child(parent, piece) or cache.add(parent, piece, page, page + 1000))
    cache.touch(path)
    return path


def test_a_match_is_whole_pages_and_leaves_something_to_compute() -> None:
    cache = PrefixCache(PAGE, window=4)
    path = grow(cache, [1, 2, 3, 4, 5, 6])
    assert cache.match([1, 2, 3, 4, 5, 6], 5) == path[:2]
    assert cache.match([1, 2, 3, 4, 5, 6], 6) == path
    assert cache.match([1, 2, 3, 9, 5, 6], 6) == path[:1]
    assert cache.match([9, 2, 3, 4], 4) == []


def test_the_least_recently_used_leaf_goes_first_and_a_parent_after_its_children() -> None:
    cache = PrefixCache(PAGE, window=4)
    old = grow(cache, [1, 1, 2, 2], 10)
    new = grow(cache, [1, 1, 3, 3], 20)
    cache.touch(old)
    assert cache.evict_full(1) == ([new[-1].full_page], [new[-1].window_page])
    assert cache.evict_full(9) == ([11, 10], [1011, 1010])
    assert cache.evict_full(1) == ([], [])


def test_a_prefix_is_cut_where_the_window_needs_a_page_that_is_gone() -> None:
    """Window 4: the token after n pages looks back three tokens, thus into two pages."""
    cache = PrefixCache(PAGE, window=4)
    path = grow(cache, list(range(12)))
    cache.lock(path[3:])  # what is locked in the window pool is kept: the last two pages of what was given
    assert [node.window_locks for node in path] == [0, 0, 0, 0, 1, 1]
    assert sorted(cache.evict_window(9)) == [1100, 1101, 1102, 1103]
    assert cache.match(list(range(12)), 12) == path
    assert cache.match(list(range(12)), 11) == []
    cache.unlock_window(path[5])
    assert cache.evict_window(1) == [1105]
    assert cache.match(list(range(12)), 12) == []


def test_without_a_window_every_page_is_needed() -> None:
    cache = PrefixCache(PAGE, window=None)
    path = grow(cache, list(range(8)))
    assert cache.first_window_page(4) == 0
    cache.lock(path)
    assert cache.evict_window(9) == [] and cache.evict_full(9) == ([], [])


class Tree(RuleBasedStateMachine):
    """Any order of adding, locking, evicting: pages are owned by the tree or came back, each once; what is locked stays."""

    locked = Bundle("locked")

    @initialize(window=st.sampled_from([1, 3, 4, None]))
    def start(self, window: int | None) -> None:
        self.cache = PrefixCache(PAGE, window)
        self.next_page = 1
        self.full: set[int] = set()
        self.window: set[int] = set()
        self.held: list[list[Node]] = []

    @rule(tokens=st.lists(st.integers(0, 1), min_size=2, max_size=9))
    def put(self, tokens: list[int]) -> None:
        parent: Node | None = None
        path = []
        for start in range(0, len(tokens) - PAGE + 1, PAGE):
            piece = tuple(tokens[start : start + PAGE])
            node = self.cache.child(parent, piece)
            if node is None:
                node = self.cache.add(parent, piece, self.next_page, self.next_page)
                self.full.add(self.next_page)
                self.window.add(self.next_page)
                self.next_page += 1
            path.append(node)
            parent = node
        self.cache.touch(path)

    @rule(target=locked, tokens=st.lists(st.integers(0, 1), min_size=2, max_size=9))
    def join(self, tokens: list[int]) -> list[Node]:
        path = self.cache.match(tokens, len(tokens) - 1)
        assert [token for node in path for token in node.tokens] == tokens[: len(path) * PAGE]
        assert len(path) * PAGE < len(tokens)
        self.cache.lock(path)
        self.held.append(path)
        return path

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        path = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        for node in path[self.cache.first_window_page(len(path)) :]:
            self.cache.unlock_window(node)
        self.cache.unlock(path)
        self.cache.touch(path)

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        full, window = self.cache.evict_full(count)
        assert len(full) <= count and len(window) <= len(full)
        self.give_back(full, window)

    @rule(count=st.integers(1, 4))
    def evict_window(self, count: int) -> None:
        window = self.cache.evict_window(count)
        assert len(window) <= count
        self.give_back([], window)

    def give_back(self, full: list[int], window: list[int]) -> None:
        assert len(set(full)) == len(full) and self.full.issuperset(full)
        assert len(set(window)) == len(window) and self.window.issuperset(window)
        self.full.difference_update(full)
        self.window.difference_update(window)

    @invariant()
    def the_tree_owns_what_did_not_come_back(self) -> None:
        full, window = self.cache.held()
        assert (sorted(full), sorted(window)) == (sorted(self.full), sorted(self.window))

    @invariant()
    def what_requests_read_is_there(self) -> None:
        for path in self.held:
            assert all(node.full_page in self.full for node in path)
            assert all(
                node.window_page in self.window for node in path[self.cache.first_window_page(len(path)) :]
            )


Tree.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTree = Tree.TestCase


@given(pages=st.integers(0, 40), window=st.integers(1, 30))
def test_the_first_window_page_holds_the_first_position_read(pages: int, window: int) -> None:
    first = PrefixCache(PAGE, window).first_window_page(pages)
    position = pages * PAGE
    assert first * PAGE <= max(0, position - window + 1) < (first + 1) * PAGE or position < window
