"""Where a pool's pages lie in the buffer, who its neighbours are, and what it could still hand out.

All of it is host arithmetic on a handful of integers: lengths of tensors are known without asking the device. Nothing is cached. A
capacity that is remembered must be forgotten whenever any member of the chain moves or a gate turns, and forgetting too rarely is a
bug this field has had (sgl-project/sglang#39982); computing it takes about as long as checking whether it is stale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import count
from typing import Literal

import torch

from allocator.errors import ConfigurationError
from allocator.free_lists import HoleList

Side = Literal["low", "high"]


class Band(ABC):
    """One member of the chain of pools that share a buffer, low byte end to high byte end.

    Subclasses say where their band starts and ends. ``low_peer`` and ``high_peer`` are the next members, whatever they are;
    an *empty* float is transparent: it holds no bytes, so its neighbours look through it.
    """

    sub_pool_name: str
    grow_direction: str
    total_bytes: int
    page_size: int
    num_pages: int
    min_page_index: int
    entry_bytes_per_page: int
    lazy_compaction: bool
    holes: HoleList

    def __init__(self) -> None:
        self.low_peer: Band | None = None
        self.high_peer: Band | None = None
        #: Two independent reasons not to move pages: published addresses of an RDMA transfer, and of a copy to the host.
        self.disagg_move_gate: Callable[[], bool] | None = None
        self.host_transfer_move_gate: Callable[[], bool] | None = None
        self._reserved_for_load = 0
        self._epochs = count(1)

    # -- neighbours

    def bind_peer(self, peer: Band) -> None:
        """Make the *other end* the neighbour on this end's growth side (two pools, no float between)."""
        if "float" in (self.grow_direction, peer.grow_direction):
            raise ConfigurationError(
                f"bind_peer joins the two ends; {peer.sub_pool_name!r} ({peer.grow_direction}) and this pool "
                f"({self.grow_direction}) are joined with bind_low_peer and bind_high_peer",
                pool=self.sub_pool_name,
            )
        if self.grow_direction == "up":
            self.high_peer = peer
        else:
            self.low_peer = peer

    def bind_low_peer(self, peer: Band) -> None:
        self.low_peer = peer

    def bind_high_peer(self, peer: Band) -> None:
        self.high_peer = peer

    def _neighbour(self, side: Side) -> Band | None:
        """The next member on ``side`` that holds bytes."""
        member = self.low_peer if side == "low" else self.high_peer
        while member is not None and member._is_frontier_transparent():
            member = member.low_peer if side == "low" else member.high_peer
        return member

    def _growth_side_neighbor(self) -> Band | None:
        """Whose compaction frees bytes this pool can grow into. A float asks the low side (SGLang 0.5.23)."""
        return self._neighbour("high" if self.grow_direction == "up" else "low")

    # -- frontiers, in bytes

    @abstractmethod
    def _byte_low_frontier(self) -> int:
        """First byte of the band."""

    @abstractmethod
    def _byte_high_frontier(self) -> int:
        """Byte just past the band."""

    def _byte_low_frontier_on_device(self) -> int | torch.Tensor:
        """The same, exact where the host knows a bound only: int64 ``[]`` then."""
        return self._byte_low_frontier()

    def _byte_high_frontier_on_device(self) -> int | torch.Tensor:
        return self._byte_high_frontier()

    @abstractmethod
    def _allocated_pages(self) -> int:
        """Pages of index space that are taken."""

    def _is_frontier_transparent(self) -> bool:
        return False

    def _bands_of_buffer(self) -> Iterator[Band]:
        """This band and all others that are bound to it, from the low end up."""
        band = self
        while band.low_peer is not None:
            band = band.low_peer
        following: Band | None = band
        while following is not None:
            yield following
            following = following.high_peer

    def _chain_low_frontier_above_bytes(self) -> int:
        above = self._neighbour("high")
        return self.total_bytes if above is None else above._byte_low_frontier()

    def _chain_high_frontier_below_bytes(self) -> int:
        below = self._neighbour("low")
        return 0 if below is None else below._byte_high_frontier()

    def _current_gap_bytes(self) -> int:
        """Free bytes between this band and the neighbour on its growth side."""
        if self.grow_direction == "up":
            return max(0, self._chain_low_frontier_above_bytes() - self._byte_high_frontier())
        return max(0, self._byte_low_frontier() - self._chain_high_frontier_below_bytes())

    @property
    def _is_settled(self) -> bool:
        """Whether sizes and frontiers are exact now; see `allocator.deferring`."""
        return True

    def _poll_chain(self) -> bool:
        """Take in numbers of all pools of the buffer that have arrived; whether sizes are exact then."""
        return True

    def _settle_chain(self) -> None:
        """Have the sizes of all pools of the buffer exact. They always are where a flush is planned on the host."""
        return

    # -- gates

    def moves_blocked(self) -> bool:
        """Whether anything forbids moving pages now. Gates are asked every time: they turn without telling the allocator."""
        if self._reserved_for_load:
            return True
        disagg, transfer = self.disagg_move_gate, self.host_transfer_move_gate
        return (disagg is not None and not disagg()) or (transfer is not None and not transfer())

    def _drains_on_urgent_flush(self) -> bool:
        return self.lazy_compaction and not self.moves_blocked()

    def _drainable_hole_bytes(self, side: Side) -> int:
        """Bytes an urgent flush of the neighbour on ``side`` would open. Pages in pending reuse are not counted: they wait on an
        event that may not have fired."""
        neighbour = self._neighbour(side)
        if neighbour is None or not neighbour._drains_on_urgent_flush():
            return 0
        return len(neighbour.holes) * neighbour.entry_bytes_per_page

    # -- capacity, in tokens

    def _index_room(self) -> int:
        """Pages of this pool's own index space that lie outside the band."""
        return self.num_pages - self.min_page_index - self._allocated_pages()

    def _available_tokens(self, extra_gap_bytes: int = 0) -> int:
        by_bytes = (self._current_gap_bytes() + extra_gap_bytes) // self.entry_bytes_per_page
        return (min(by_bytes, self._index_room()) + len(self.holes)) * self.page_size

    def available_size(self) -> int:
        """Tokens that can be handed out now, with no help from a neighbour."""
        return self._certain_size()

    def schedulable_available_size(self) -> int:
        """Tokens that can be handed out after an urgent flush of the growth-side neighbour; what a scheduler plans with."""
        return self._certain_schedulable_size()

    def _certain_size(self) -> int:
        """`available_size` as far as the host knows: at most what there is. For the allocators themselves, which go on from bounds."""
        return self._available_tokens()

    def _certain_schedulable_size(self) -> int:
        """`schedulable_available_size`, likewise."""
        side: Side = "high" if self.grow_direction == "up" else "low"
        return self._available_tokens(self._drainable_hole_bytes(side))

    @property
    def _capacity_epoch(self) -> int:
        """SGLang's composites key their own memos on this number: a new one each time, so that they never serve a stale one."""
        return next(self._epochs)

    def _chain_capacity_epoch(self) -> int:
        return next(self._epochs)
