"""Seeded programs with a prefix cache beside the composite: finished requests stay in it until somebody needs their room."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.allocator.composite_program import Program


@dataclass(eq=False)
class Entry:
    """What a request has left: tokens, how many of them from the first on have no window place, and perhaps a state."""

    tokens: torch.Tensor
    left: int
    state: torch.Tensor | None


@dataclass(frozen=True)
class Given:
    num_tokens_evicted: int = 0
    swa_num_tokens_evicted: int = 0
    mamba_num_evicted: int = 0


class Cache:
    """Gives up the oldest entries first: for full tokens whole ones, for window tokens their window side, for states those alone.

    Attributes:
        asked: what has been asked of it, and how much it gave.
    """

    def __init__(self, made: Any, slots: Any) -> None:
        self.made, self.slots, self.size = made, slots, made.page_size
        self.has_window = hasattr(made, "swa_attn_allocator")
        self.entries: list[Entry] = []
        self.asked: list[tuple[int, ...]] = []
        self.shares = True

    def supports_prefix_sharing(self) -> bool:
        return self.shares

    def supports_mamba(self) -> bool:
        return self.slots is not None

    def _full(self, entry: Entry) -> int:
        return -(-len(entry.tokens) // self.size) * self.size

    def _window(self, entry: Entry) -> int:
        return max(0, self._full(entry) - -(-entry.left // self.size) * self.size) if self.has_window else 0

    def full_evictable_size(self) -> int:
        return sum(map(self._full, self.entries))

    evictable_size = full_evictable_size

    def swa_evictable_size(self) -> int:
        return sum(map(self._window, self.entries))

    def mamba_evictable_size(self) -> int:
        return sum(entry.state is not None for entry in self.entries)

    def evict_for_alloc(
        self, params: Any, *, allocation_reclaim_satisfied: Callable[[], bool] | None = None
    ) -> Given:
        full = window = states = 0

        def enough() -> bool:
            return allocation_reclaim_satisfied is not None and allocation_reclaim_satisfied()

        for entry in [entry for entry in self.entries if len(entry.tokens)]:
            if full >= params.num_tokens or enough():
                break
            self.entries.remove(entry)
            full, window = full + self._full(entry), window + self._window(entry)
            states += self._give_state(entry)
            self.made.free(entry.tokens)
        for entry in self.entries:
            if window >= params.swa_num_tokens or enough():
                break
            if self._window(entry):
                window += self._window(entry)
                self.made.free_swa(entry.tokens)
                entry.left = self._full(entry)
        for entry in self.entries:
            if states >= params.mamba_num or enough():
                break
            states += self._give_state(entry)
        self.asked.append((params.num_tokens, params.swa_num_tokens, params.mamba_num, full, window, states))
        return Given(full, window, states)

    def _give_state(self, entry: Entry) -> int:
        if entry.state is None:
            return 0
        self.slots.free(entry.state)
        entry.state = None
        return 1


class CachedProgram(Program):
    """`Program`, whose requests may end in a cache, and which asks for room there."""

    def __init__(self, made: Any, seed: int) -> None:
        super().__init__(made, seed)
        self.cache = Cache(made, self.slots)

    def step(self) -> Any:
        steps: list[Callable[[], Any]] = [
            self.keep,
            self.keep,
            self.evict,
            self.evict_and_take,
            self.decode_capacity,
        ]
        if self.has_window:
            steps += [self.reclaim_for_prealloc]
        if self.chance.random() < 0.5:
            return super().step()
        chosen = self.chance.choice(steps)
        self.counts[chosen.__name__] = self.counts.get(chosen.__name__, 0) + 1
        return chosen(), list(self.cache.asked)

    def keep(self) -> None:
        """A request ends, and its pages stay."""
        if not self.running:
            return
        at = self.chance.randrange(len(self.running))
        state = self.states.pop() if self.states and self.chance.random() < 0.5 else None
        self.cache.entries.append(Entry(self.running.pop(at), self.without_window.pop(at), state))

    def _demand(self) -> int:
        return self.chance.randint(0, self._most() * self.page_size)

    def _most(self) -> int:
        """Pages. Without a window tokens are small, and the buffer holds many more of them."""
        return 24 if self.has_window else 110

    def evict(self) -> Any:
        self.cache.shares = self.chance.random() < 0.95
        answer = self.made.evict_to_free_tokens(self.cache, self._demand())
        self.cache.shares = True
        assert self.made.evict_to_free_tokens(None, self._demand()) is None
        return answer

    def evict_and_take(self) -> Any:
        """As before every prefill. What is said to be there is taken."""
        need = self.chance.randint(1, self._most()) * self.page_size
        ready = self.made.evict_to_free_tokens(self.cache, need)
        if ready:
            tokens = self.made.alloc(need)
            assert tokens is not None
            self.running.append(tokens)
            self.without_window.append(0)
        return ready

    def decode_capacity(self) -> bool:
        return bool(self.made.check_decode_capacity(num_tokens=self._demand(), tree_cache=self.cache))

    def reclaim_for_prealloc(self) -> bool:
        return self.made.reclaim_for_prealloc(self.cache, self._demand(), self._demand()) is None

    def clear(self) -> None:
        super().clear()
        self.cache.entries.clear()
