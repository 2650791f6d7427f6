"""kvtape's composites with everything that SGLang 0.5.23 has in its own: what `allocator.sglang_plugin` puts in their place.

SGLang's composites stop the host themselves, whatever allocates under them: ``free`` and ``free_swa`` select ids by a mask, whose
length the host must know (``unified_hybrid_swa.py``), and exact sizes are asked for before every alloc. So each of them is replaced by a
class that is both: kvtape's composite of the same name, and behind it SGLang's, whose constructor makes the pools (of the sub-pool classes
that stand in its modules by then) and whose admission policy goes on asking. ``isinstance`` answers as before.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, ClassVar, Final

import torch

from allocator.composites import (
    UnifiedMambaSWATokenToKVPoolAllocator,
    UnifiedMambaTokenToKVPoolAllocator,
    UnifiedSWATokenToKVPoolAllocator,
)
from allocator.composites.free_group import PairedFreeGroup
from allocator.composites.members import Composite
from allocator.composites.window_frees import WindowFrees
from allocator.forwards import ForwardDoneEvent

#: Ours, by the module of SGLang's that has a class of the same name.
OURS: Final[Mapping[str, tuple[type[Composite], ...]]] = {
    "sglang.srt.mem_cache.allocator.unified_hybrid_swa": (
        UnifiedSWATokenToKVPoolAllocator,
        UnifiedMambaSWATokenToKVPoolAllocator,
    ),
    "sglang.srt.mem_cache.allocator.unified_mamba": (UnifiedMambaTokenToKVPoolAllocator,),
}


def composites_in_place() -> Iterator[tuple[type[Any], type[Any]]]:
    """SGLang's composites, each with the class that may stand in its place.

    Raises:
        ImportError, AttributeError: they are not where they are looked for.
    """
    for name, classes in OURS.items():
        module = importlib.import_module(name)
        for ours in classes:
            theirs = getattr(module, ours.__name__)
            yield theirs, _joined(ours, theirs, module)


def _joined(ours: type[Composite], theirs: type[Any], module: ModuleType) -> type[Any]:
    first = _PairedInSglang if issubclass(ours, WindowFrees) else _InSglang
    body: dict[str, Any] = {"__doc__": ours.__doc__, "_theirs": theirs}
    must_agree = getattr(module, "rank_consensus", None)
    if must_agree is not None:
        # Ranks check each other's calls if SGLang is told to (SGLANG_ENABLE_RANK_CONSENSUS_CHECKER): this one, as in SGLang's class.
        is_planned = issubclass(ours, UnifiedSWATokenToKVPoolAllocator)
        same = ["num_tokens", "swa_num_tokens"] if is_planned else ["num_tokens"]
        check = must_agree(same_params=same, same_results=True)
        body["evict_to_free_tokens"] = check(ours.evict_to_free_tokens)
    return type(ours.__name__, (first, ours, theirs), body)


class _InSglang(Composite):
    """What stands before the two classes. Takes the arguments of SGLang's."""

    _theirs: ClassVar[type[Any]]

    def __init__(self, **arguments: Any) -> None:
        self._theirs.__init__(self, **arguments)
        self.strategy = self.full_attn_allocator.strategy

    @property
    def size(self) -> int:
        tokens: int = super().size  # type: ignore[misc]
        return tokens

    @size.setter
    def size(self, value: int) -> None:
        """SGLang's base class sets it."""

    # Whoever watches or changes what SGLang's scheduler hands over does so on SGLang's class.

    def set_latest_forward_done_event(self, event: ForwardDoneEvent | None) -> None:
        self._theirs.set_latest_forward_done_event(self, event)

    def set_inflight_forward(
        self, forward_done: ForwardDoneEvent, out_cache_loc_virtual: torch.Tensor | None
    ) -> None:
        self._theirs.set_inflight_forward(self, forward_done, out_cache_loc_virtual)

    def resize(self, config: Any) -> None:
        """Also sets what SGLang's pools say of their size."""
        self._theirs.resize(self, config)


class _PairedInSglang(_InSglang, WindowFrees):
    """The same for two sides under one set of ids."""

    _group: PairedFreeGroup | None = None

    @property
    def free_group(self) -> PairedFreeGroup | None:
        return self._group

    @free_group.setter
    def free_group(self, value: None) -> None:
        """SGLang's constructor sets it."""

    @property
    def prefer_swa_reclaim(self) -> bool:
        """On decode nodes, and where a host tier has storage behind it. Asked every time, for both can change."""
        module = sys.modules[self._theirs.__module__]
        memory = module.get_memory()
        has_storage = memory.enable_hierarchical_cache and memory.hicache_storage_backend is not None
        return bool(has_storage or module.get_disagg().disaggregation_mode == "decode")
