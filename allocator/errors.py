"""What an allocator refuses, one class per cause.

Every error carries the pool, the ids at fault and the allocator's state as text, because it is usually read in the log of a machine
nobody can log in to. On a CPU an error is raised before anything was changed. On CUDA, finding the offending id would cost the very
synchronisation this project counts, so there the same condition is handed to ``torch._assert_async`` (SGLang's choice since #34066).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class AllocatorError(Exception):
    """Base of everything this package raises. ``pool`` is the sub-pool's name, ``ids`` the ids at fault (maybe empty)."""

    def __init__(self, message: str, *, pool: str = "", ids: Sequence[int] = (), state: str = "") -> None:
        self.pool = pool
        self.ids = list(ids)
        self.state = state
        where = f"[{pool}] " if pool else ""
        super().__init__(f"{where}{message}" + (f" State: {state}." if state else ""))


class ConfigurationError(AllocatorError):
    """A pool, spec or allocator was described in a way that cannot be laid out or wired."""


class LayoutError(ConfigurationError):
    """A slot's bytes cannot be laid out: a row that is no multiple of 16 bytes, a buffer too small for one page."""


class UnknownStrategyError(ConfigurationError):
    """The lookup strategy asked for does not exist."""


class NotIdOwnerError(AllocatorError):
    """Virtual ids were asked of a pool that is indexed by another pool's ids."""


class PageAlignmentError(AllocatorError):
    """A size or position in tokens that is no multiple of the page size."""


class NotAllocatedError(AllocatorError):
    """Freed or unbound ids that are not live: a double free, an id never allocated, -1, the padding page, out of range."""


class DuplicateFreeError(NotAllocatedError):
    """The same page twice in one release list."""


class BindError(AllocatorError):
    """A virtual page that is live already, or a physical page outside the band, was to be bound."""


class OutOfRoomError(AllocatorError):
    """``alloc_with_virtual`` has no way to answer ``None``; its caller checks capacity first (SGLang's composites do)."""


class StillPairedError(AllocatorError):
    """The full side alone of pages was to be freed whose window side is live: that place would have no owner any more."""


class InvalidRequestError(AllocatorError):
    """The numbers of a request contradict each other."""


class MoveGateClosedError(AllocatorError):
    """Pages would have to move while a move gate is closed."""


class CorruptMappingError(AllocatorError):
    """The two tables or a count contradict each other; nothing the allocator does from here on can be trusted."""


class FreeGroupError(AllocatorError):
    """Free groups do not nest, and only an open one can be closed."""


def require(condition: torch.Tensor, reason: str, make_error: Callable[[], AllocatorError]) -> None:
    """Raise ``make_error()`` unless ``condition`` (bool, one element) holds.

    ``torch._assert_async`` checks at once on a CPU and later, without stopping the host, on CUDA. The same line therefore serves
    both, and reading the ids for the message happens only once the error is certain.
    """
    try:
        torch._assert_async(condition, reason)
    except RuntimeError:
        raise make_error() from None
