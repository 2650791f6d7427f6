"""What a composite asks of the engine's prefix cache, and what it does with every kind of pools: evict what is missing."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class EvictParams:
    """How much a cache is asked to give up: full tokens, window tokens, states. Names are those of SGLang 0.5.23's class of this name
    (``mem_cache/base_prefix_cache.py``), whose caches take this one as well."""

    num_tokens: int = 0
    swa_num_tokens: int = 0
    mamba_num: int = 0


class EvictResult(Protocol):
    """How much a cache has given up: full tokens, window tokens, states."""

    @property
    def num_tokens_evicted(self) -> int: ...

    @property
    def swa_num_tokens_evicted(self) -> int: ...

    @property
    def mamba_num_evicted(self) -> int: ...


class PrefixCache(Protocol):
    """The calls made on a cache; SGLang's ``UnifiedRadixCache`` has them. Sizes are of what is not in use: tokens, and states."""

    def supports_prefix_sharing(self) -> bool: ...

    def full_evictable_size(self) -> int: ...

    def swa_evictable_size(self) -> int: ...

    def mamba_evictable_size(self) -> int: ...

    def evict_for_alloc(
        self, params: EvictParams, *, allocation_reclaim_satisfied: Callable[[], bool] = ...
    ) -> EvictResult:
        """Without the predicate ``params`` says what is missing. With it, what may be given up at the most, and the cache stops as soon as
        the predicate is true."""
        ...


class Evicting:
    """A composite whose pools are each judged by themselves. Those that share bytes between two sides know better
    (`allocator.composites.reclaim`)."""

    @abstractmethod
    def available_size(self) -> int: ...

    @abstractmethod
    def _has_room_for(self, num_tokens: int) -> bool:
        """Whether `available_size` is ``num_tokens`` or more. Where sizes come late from the device, it is waited for only if what is known
        for certain is less."""

    def evict_to_free_tokens(self, tree_cache: PrefixCache | None, num_tokens: int) -> bool | None:
        """Have the cache give up what an alloc of ``num_tokens`` is short of.

        Returns:
            Whether so many can be handed out now; None if that has not been looked at.
        """
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return None
        if not self._has_room_for(num_tokens):
            tree_cache.evict_for_alloc(EvictParams(num_tokens=num_tokens - self.available_size()))
        return None

    def check_decode_capacity(
        self,
        *,
        num_tokens: int,
        tree_cache: PrefixCache | None,
        requests: Any = None,
        spec_algorithm: Any = None,
    ) -> bool:
        """Whether the next decode step, which takes ``num_tokens``, can be served, after the cache has given up what is missing. A
        scheduler that is told False preempts a request and asks again. ``requests`` and ``spec_algorithm`` are not looked at."""
        # Once it was made sure of there is nothing to ask: the device may have been left to find out how.
        return self.evict_to_free_tokens(tree_cache, num_tokens) is True or self._has_room_for(num_tokens)
